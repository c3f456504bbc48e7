"""Bounded inputs: what an honest device sends is always taken; nothing longer is ever added up."""

from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.aggregation import aggregation_named
from keyhole.aggregation.base import ClientResult, rows_of
from keyhole.errors import InputError, NotFiniteError, TooLargeError
from keyhole.rounds.adding import add_up_jobs
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering
from keyhole.rounds.round import Engine, in_process
from keyhole.server.inputs import InputBound, TakenUpdate, length_of, norm
from keyhole.server.row_sums import BLOCK, pair_up
from tests.engines import crowd
from tests.helpers import LAYOUTS, SEEDS
from tests.rounds import toy

ROW = kh.KeySpace("row", 9)
NORMS = st.floats(1e-3, 1e3)


def update_of(layout, seed, scale):
    """An update with repeated keys."""
    rng = np.random.default_rng(seed)
    keys = {s.name: s.keys(rng.integers(0, s.num_keys, rng.integers(0, 5))) for s in layout.spaces}
    leaves = {
        field.path: scale
        * rng.standard_normal(field.client_shape([len(keys[f.name]) for f in part.product.factors]))
        for part in layout.parts
        for field in part.fields
    }
    leaves = {path: np.float32(leaf) for path, leaf in leaves.items()}
    return tree.unflatten(layout.structure, leaves), keys


def added(layout, update, keys):
    """The norm of the vector that is added up: rows of equal keys are one."""
    rows = rows_of(layout, ClientResult(0, "sent", keys, update))
    return norm([own for _, own in rows])


@given(st.sampled_from(sorted(LAYOUTS)), SEEDS, st.floats(1e-6, 1e6), NORMS)
def test_what_an_honest_device_sends_is_taken_as_it_is(name, seed, scale, limit):
    update, keys = update_of(LAYOUTS[name], seed, scale)
    bound = InputBound(limit)
    clipped = bound.clip(update, keys)
    taken = bound.take(clipped, keys)
    assert not taken.is_above
    kept = tree.flatten(taken.update)
    for path, leaf in tree.flatten(clipped).items():
        np.testing.assert_array_equal(leaf, kept[path])


@given(st.sampled_from(sorted(LAYOUTS)), SEEDS, st.floats(1e-6, 1e6), NORMS)
def test_nothing_longer_is_added_up_however_often_a_key_is_named(name, seed, scale, limit):
    layout = LAYOUTS[name]
    update, keys = update_of(layout, seed, scale)
    refused, cut = (InputBound(limit, above).take(update, keys) for above in ("refuse", "clip"))
    assert added(layout, cut.update, keys) <= limit * 1.001
    assert refused.is_above == cut.is_above
    assert (refused.update is None) == refused.is_above
    if length_of(update, keys) > 1.001 * limit:
        assert refused.is_above


@given(st.lists(st.integers(0, 8), min_size=1, max_size=6), SEEDS)
def test_an_update_measures_what_it_adds_at_the_most(numbers, seed):
    layout = kh.Layout.of({"w": np.zeros((9, 3), np.float32)}, kh.Cut(ROW, {"w": 0}))
    rows = np.random.default_rng(seed).standard_normal((len(numbers), 3)).astype(np.float32)
    keys = {"row": ROW.keys(numbers)}
    length = length_of({"w": rows}, keys)
    assert added(layout, {"w": rows}, keys) <= length * (1 + 1e-6)
    if len(set(numbers)) == len(numbers):
        assert length == norm({"w": rows})
    same = {"w": np.repeat(rows[:1], len(numbers), axis=0)}
    again = {"row": ROW.keys(numbers[:1] * len(numbers))}
    assert added(layout, same, again) == pytest.approx(length_of(same, again), rel=1e-5)


@pytest.mark.parametrize("above", ["refuse", "clip"])
@pytest.mark.parametrize(("value", "is_above"), [(nan, False), (inf, True), (1e38, True)])
def test_what_cannot_be_added_up_is_refused_under_any_bound(above, value, is_above):
    taken = InputBound(1.0, above).take({"w": np.array([value, 0.0])}, {})
    assert (taken.update, taken.is_above) == (None, is_above)


def test_a_huge_number_is_refused_or_clipped():
    huge = {"w": np.array([1e30, 0.0], np.float32)}
    assert InputBound(1.0).take(huge, {}).update is None
    assert norm(InputBound(1.0, "clip").take(huge, {}).update) == pytest.approx(1.0, rel=1e-5)
    assert InputBound().take(huge, {}).update is not None, "without a bound it is a number"


def test_a_server_that_sees_no_update_measures_none():
    bound = InputBound(1.0, is_checked=False)
    taken = bound.take({"w": np.array([1e6], np.float32)}, {})
    assert (taken.is_above, taken.norm) == (False, None)
    assert norm(bound.clip({"w": np.array([1e6], np.float32)}, {})) <= 1.0, "the device clips"


@pytest.mark.parametrize(("is_above", "kind"), [(True, TooLargeError), (False, NotFiniteError)])
def test_a_refusal_tells_nothing_of_the_update(is_above, kind):
    told = InputBound(2.5).refusal(TakenUpdate(None, 1234.5, is_above))
    assert type(told) is kind
    assert "1234" not in str(told)


@pytest.mark.parametrize("changes", [{"max_norm": 0.0}, {"max_norm": nan}, {"above": "ignore"}])
def test_a_bound_that_cannot_be_is_refused(changes):
    with pytest.raises(InputError, match="the bound on updates is invalid"):
        InputBound(**{"max_norm": 1.0, **changes})


LIARS = frozenset(range(0, crowd.COUNT, 13))


def boosting(clients, jobs):
    """Liars among the clients send a million times their update, which nobody has clipped."""
    for job in jobs:
        update = replace(job, bound=InputBound()).run(clients).update
        is_liar = job.client in LIARS
        honest = update if is_liar else job.bound.clip(update, job.keys)
        yield {"x": honest["x"] * np.float32(1e6)} if is_liar else honest


class Blocks:
    """An engine whose workers are this process."""

    choose = staticmethod(lambda clients, asked, t, layout, run: crowd_choose(asked))
    __call__ = staticmethod(in_process)

    def add_up(self, clients, jobs, layout):
        blocks = (jobs[at : at + BLOCK] for at in range(0, len(jobs), BLOCK))
        return pair_up(add_up_jobs(clients, block, layout) for block in blocks)

    def incidents(self):
        return []


def crowd_choose(asked):
    return [toy.chosen(crowd.EXAMPLES[client]) for client in asked]


def run_crowd(execute=in_process, rounds=2, **changes):
    run = start_run(toy.make_state(), crowd.make_clients(), crowd.make_plan(**changes))
    records = list(run.rounds(rounds, execute=execute))
    return run.state.model()["x"], records


@pytest.mark.parametrize("above", ["refuse", "clip"])
def test_a_round_counts_updates_above_the_norm_and_names_none(above):
    honest, _ = run_crowd(max_update_norm=0.5)
    model, records = run_crowd(boosting, max_update_norm=0.5, above_norm=above)
    ruined, _ = run_crowd(boosting, rounds=1)
    for record in records:
        liars = [c for c in record.clients if c in LIARS and c not in record.refused]
        broken = len(record.refused) if above == "clip" else 0
        assert record.above_norm > 5
        assert record.input_bound == "checked"
        assert (above == "clip") == bool(liars), "those clipped take part, those refused do not"
        assert broken < 10, "only NaN is refused where others are clipped"
    assert np.abs(ruined).max() > 1e3
    assert np.abs(model - honest).max() < 0.5


def test_an_engine_bounds_updates_where_they_are_added_up():
    """In blocks, wherever they are made: the same bytes and the same counts."""
    assert isinstance(Blocks(), Engine)
    here, there = (run_crowd(e, max_update_norm=0.05) for e in (in_process, Blocks()))
    assert here[0].tobytes() == there[0].tobytes()
    assert here[1] == there[1]
    free, _ = run_crowd()
    assert free.tobytes() != here[0].tobytes(), "clients had something to clip"


def test_a_secure_sum_takes_the_word_of_devices():
    """Honest clients clip; nobody sees that a liar does not, and the record says so."""
    secure = aggregation_named("secure-dense")
    _, records = run_crowd(rounds=1, aggregate=secure, max_update_norm=0.5, cohorts={"size": 9})
    assert [r.input_bound for r in records] == ["unproved"]
    few = {"aggregate": secure, "max_update_norm": 0.5, "cohorts": {"size": 30}}
    _, records = run_crowd(boosting, rounds=1, **few)
    assert LIARS & set(records[0].clients)
    assert [r.above_norm for r in records] == [0]
    _, records = run_crowd(rounds=1, aggregate=secure, cohorts={"size": 9})
    assert [r.input_bound for r in records] == ["unproved"], "numbers are clipped on devices, too"


def test_a_plain_sum_without_a_bound_says_so():
    _, records = run_crowd(rounds=1)
    assert [r.input_bound for r in records] == ["none"]


def test_asynchronous_rounds_are_bounded_too():
    changes = {"buffering": Buffering(20, 10), "max_update_norm": 0.5}
    model, records = run_crowd(boosting, rounds=3, **changes)
    assert sum(record.above_norm for record in records) > 0
    assert {record.input_bound for record in records} == {"checked"}
    assert np.abs(model).max() < 5
