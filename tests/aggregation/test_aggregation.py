"""Aggregations: the plain sum, up to the rounding that each states, whoever drops out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.aggregation import aggregation_named, aggregation_names
from keyhole.aggregation.base import ClientResult, Rounding, SumRequest
from keyhole.errors import InputError
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, SEEDS
from tests.seams.toys import Sum

AGGREGATIONS = aggregation_names(lambda about: not about.is_robust)

SECURE = [name for name in AGGREGATIONS if name.startswith("secure")]
FATES = ("sent", "sent", "sent", "sent", "lost_after", "late", "lost_before", "refused")


def result(layout, rng, client, outcome):
    keys = {s.name: s.keys(rng.integers(0, s.num_keys, rng.integers(0, 4))) for s in layout.spaces}
    shapes = {
        field.path: field.client_shape([len(keys[f.name]) for f in part.product.factors])
        for part in layout.parts
        for field in part.fields
    }
    leaves = {path: rng.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    update = tree.unflatten(layout.structure, leaves) if outcome in ("sent", "late") else None
    return ClientResult(client, outcome, keys, update)


def request_of(name, seed, over="cohort", outcomes=FATES):
    layout, rng = LAYOUTS[name], np.random.default_rng(seed)
    made = [result(layout, rng, 10 + i, outcome) for i, outcome in enumerate(outcomes)]
    limit = {space.name: min(4, space.num_keys) for space in layout.spaces}
    return SumRequest(layout, made, over, limit, (seed, 0, 3))


def dense(layout, updates):
    found = []
    for part, update in zip(layout.parts, updates, strict=True):
        whole = np.zeros((part.space.num_keys, part.slice_size), np.float32)
        whole[update.keys] = update.rows
        found.append(whole)
    return found


@pytest.mark.parametrize("way", AGGREGATIONS)
@pytest.mark.parametrize("over", ["cohort", "choosers", "nothing"])
@settings(max_examples=4)
@given(name=st.sampled_from(sorted(LAYOUTS)), seed=SEEDS)
def test_every_aggregation_gives_the_plain_sum_up_to_its_rounding(way, over, name, seed):
    """Four of eight clients send, the others are lost at every stage; the threshold is six of eight
    only for one server, which needs more of them."""
    outcomes = ("sent",) * 6 + ("late", "lost_after") if way in SECURE else FATES
    request = request_of(name, seed, over, outcomes)
    found, expected = aggregation_named(way).add(request), aggregation_named("plain").add(request)
    assert found.error is None
    tolerance = len(outcomes) * Rounding().fixed_point(request).rounding if way in SECURE else 0
    sums = (dense(request.layout, each.rows) for each in (found, expected))
    for one, other in zip(*sums, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("way", SECURE)
def test_the_same_seed_gives_the_same_bytes_although_masks_are_fresh(way):
    one, other = (
        aggregation_named(way).add(request_of("two key spaces", 5, outcomes=("sent",) * 4))
        for _ in range(2)
    )
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.rows.tobytes() == b.rows.tobytes()


@pytest.mark.parametrize("way", ["secure-dense", "secure-sketch"])
def test_a_sum_with_too_few_clients_is_not_opened(way):
    summed = aggregation_named(way).add(request_of("rows", 0))
    assert summed.rows is None
    assert "too few" in summed.error


def test_two_servers_release_no_sum_of_one_client():
    summed = aggregation_named("secure-sparse").add(
        request_of("rows", 0, outcomes=("sent", "late"))
    )
    assert summed.rows is None
    assert "too few" in summed.error


@pytest.mark.parametrize("way", ["secure-dense", "secure-sketch", "secure-sparse"])
def test_what_is_sent_does_not_depend_on_keys_or_updates(way):
    sizes = set()
    for seed in range(4):
        request = request_of("two key spaces", seed, outcomes=("sent",) * 4)
        sizes |= set(aggregation_named(way).add(request).bytes_up.values())
    assert len(sizes) == 1


def test_numbers_beyond_the_clip_are_clipped_and_not_wrapped():
    request = request_of("rows", 1, over="nothing", outcomes=("sent",) * 3)
    big = [
        ClientResult(c.client, c.outcome, c.keys, tree.map_leaves(lambda x: x * 1e6, c.update))
        for c in request.results
    ]
    request = SumRequest(request.layout, big, "nothing", request.keys_per_client, request.seed_path)
    summed = aggregation_named("secure-dense", Rounding(clip=2.0)).add(request)
    limit = max(np.abs(update.rows).max() for update in summed.rows)
    # A client may have drawn a key up to four times: its row is clipped as one number.
    assert 2.0 <= limit <= 3 * 2.0 + 1e-6


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(InputError, match="no such aggregation"):
        aggregation_named("abacus")


def test_keys_without_a_place_in_a_sum_are_in_the_record():
    def loses_two(request):
        return replace(aggregation_named("plain").add(request), unplaced_keys=2)

    space = kh.KeySpace("row", 9)
    model = {"w": np.zeros((9, 2), np.float32)}
    layout = kh.Layout.of(model, kh.Cut(space, {"w": 0}))
    population = Clients(
        3,
        data=lambda client: client,
        choose=lambda data, context: space.keys([1, 2]),
        train=lambda submodel, data, rng: submodel,
    )
    plan = RunParts(Cohorts(3, 3), keys_per_client={"row": 2}, aggregate=Sum(loses_two))
    run = start_run(ServerState.dense(layout, model, SGD(1.0)), population, plan)
    (record,) = run.rounds(1)
    assert record.unplaced_keys == 2
