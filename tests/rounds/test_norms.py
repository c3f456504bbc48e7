"""Norms of last updates: by definition, kept with a run, resumed, and refused where none are."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.keys.choice import ClientContext, KeyCounts, KeyTable, choose_with
from keyhole.keys.structured import importance
from keyhole.rounds.norms import dump_norms, load_norms, norms_after
from keyhole.server.row_sums import RowUpdate
from tests.helpers import LAYOUTS
from tests.rounds import toy


def drawn_updates(layout, rng):
    """An update of some rows of each part."""
    for part in layout.parts:
        count = int(rng.integers(0, part.space.num_keys + 1))
        keys = np.sort(rng.choice(part.space.num_keys, count, replace=False)).astype(np.int64)
        yield RowUpdate(keys, rng.normal(size=(count, part.slice_size)).astype(np.float32))


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.spaces])
def test_the_norm_of_a_key_is_that_of_all_it_cuts_in_the_last_step_that_touched_it(name):
    layout, rng, by_hand, norms = LAYOUTS[name], np.random.default_rng(3), {}, {}
    for _ in range(3):
        updates = list(drawn_updates(layout, rng))
        norms = norms_after(norms, layout, updates)
        found = {}
        for part, update in zip(layout.parts, updates, strict=True):
            keys = part.product.split(kh.Keys(part.space, update.keys))
            for at, row in enumerate(update.rows.astype(np.float64)):
                for z in keys:
                    place = z.space.name, int(z.array[at])
                    found[place] = found.get(place, 0.0) + row @ row
        by_hand |= {place: square**0.5 for place, square in found.items()}
    for space in layout.spaces:
        expected = [by_hand.get((space.name, key), 0.0) for key in range(space.num_keys)]
        np.testing.assert_allclose(norms[space.name].of(space.all_keys().array), expected)
    assert dump_norms(load_norms(dump_norms(norms))) == dump_norms(norms)


@pytest.mark.parametrize(
    "choose",
    [
        lambda context: context.counts.keys[context.norms.of(context.counts.keys) >= 0],
        lambda context: context.counts.keys[context.users.tables["word"].of(0) > 0],
    ],
)
def test_a_fact_that_is_read_without_a_mark_is_named_with_the_mark(choose):
    word = kh.KeySpace("word", 9)
    choose = choose_with({"word": choose}, lambda own: {"word": KeyCounts.of(word, own)})
    with pytest.raises(InputError, match="marked @needs"):
        choose(np.array([1, 2]), ClientContext({"word": 2}, np.random.default_rng(0)))


def test_an_attribute_error_of_another_kind_stays_as_it_is():
    word = kh.KeySpace("word", 9)
    choose = choose_with(
        {"word": lambda context: None.of(context.counts)},
        lambda own: {"word": KeyCounts.of(word, own)},
    )
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'of'"):
        choose(np.array([1, 2]), ClientContext({"word": 2}, np.random.default_rng(0)))


def test_a_row_that_moved_by_nothing_is_forgotten():
    still = RowUpdate(np.array([3]), np.zeros((1, 1), np.float32))
    norms = norms_after({"feature": KeyTable(np.array([3]), np.ones(1))}, toy.LAYOUT, [still])
    assert norms["feature"].keys.tolist() == []


def clients():
    count = {"feature": KeyCounts.none(toy.FEATURE)}
    return replace(toy.make_clients(), choose=choose_with({"feature": importance}, lambda _: count))


PARTS = {"keys_per_client": {"feature": 9}, "norms": {}}


def test_a_run_by_importance_is_resumed_to_the_same_bytes(tmp_path):
    whole = kh.start_run(toy.make_state(), clients(), toy.make_plan(**PARTS))
    list(whole.rounds(6))
    part = kh.start_run(toy.make_state(), clients(), toy.make_plan(**PARTS), tmp_path)
    list(part.rounds(3, snapshot_every=2))
    part.close()
    rest = kh.resume_run(toy.make_state(), clients(), toy.make_plan(**PARTS), tmp_path)
    list(rest.rounds(6))
    rest.close()
    assert toy.model_bytes(rest.state) == toy.model_bytes(whole.state)
    forgetful = kh.start_run(rest.state, clients(), toy.make_plan(**PARTS))
    assert forgetful.kind.dump() == b"" != rest.kind.dump() == whole.kind.dump()


def test_rounds_that_keep_no_norms_refuse_them():
    stream = kh.Buffering(concurrency=3, goal=2, duration=lambda rng: 1.0)
    with pytest.raises(InputError, match=r"keep no norms of updates.*got Buffered rounds"):
        kh.start_run(toy.make_state(), clients(), toy.make_plan(**PARTS, buffering=stream))
    run = kh.start_run(toy.make_state(), clients(), toy.make_plan(keys_per_client={"feature": 9}))
    with pytest.raises(InputError, match="needs the norms of last updates"):
        list(run.rounds(1))
