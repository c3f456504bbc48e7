"""Private fetching: the sub-model is that of a plain fetch, and no server sees a key."""

import time
from functools import partial
from random import random

import numpy as np
import pytest

import keyhole as kh
from keyhole import tree
from keyhole.delivery.pir import two_server as batch
from keyhole.delivery.pir.one_server import OneServerPir
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.delivery.records import Coding
from keyhole.device.private import QueryFetch
from keyhole.device.take_part import Participant, take_part
from keyhole.errors import KeySpaceError, NotFoundError, ServiceError, StaleError
from keyhole.service.access import Access, Keyring
from keyhole.wire.assignment import Pace, admit
from tests.helpers import LAYOUTS, assert_trees_equal, zeros
from tests.service.pir.pair import ONE, pair, second_device

ANSWERED = "keyhole_private_queries_total"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    with pair(tmp_path_factory.mktemp("rounds")) as made:
        yield made


@pytest.fixture
def fetch(both):
    made = both.fetch()
    with made.others[0]:
        yield made


def published(both, layout, per_client=2, **options):
    """A round in which a client has so many keys of each key space."""
    told = {space.name: per_client for space in layout.spaces}
    return both.service.publish(layout, settings={"keys_per_client": told}, **options)


def keys_of(layout, limit=2, seed=0):
    rng = np.random.default_rng(seed)
    chosen = {s.name: rng.choice(s.num_keys, limit, replace=False) for s in layout.spaces}
    return {name: [*z, z[0], *z] for name, z in chosen.items()}  # repeated, out of order


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_private_fetch_gives_the_bytes_of_a_plain_one(both, fetch, name):
    layout = LAYOUTS[name]
    state, before = published(both, layout), [both.metric(i, ANSWERED) for i in (0, 1)]
    keys = keys_of(layout)
    with both.device() as device:
        plain = device.fetch(state.published.id, keys)
        found = fetch(device, state.published.id, keys)
    assert_trees_equal(found.model, plain.model)
    assert found.keys == plain.keys
    cut = sum(bool(part.product.factors) for part in layout.parts)
    assert [both.metric(i, ANSWERED) for i in (0, 1)] == [count + cut for count in before]


@pytest.mark.parametrize("kind", ["half", "uint8", "uint4"])
def test_coded_slices_are_fetched_alike(both, fetch, kind):
    layout = LAYOUTS["two key spaces"]
    state = published(both, layout, coding=Coding(kind, 5))
    with both.device() as device:
        plain = device.fetch(state.published.id, keys_of(layout))
        found = fetch(device, state.published.id, keys_of(layout))
    assert_trees_equal(found.model, plain.model)


def test_one_server_fetches_alike(tmp_path):
    layout = LAYOUTS["one parameter cut twice"]
    with pair(tmp_path, ONE) as both, both.device() as device:
        state = published(both, layout)
        fetch = QueryFetch(OneServerPir())
        plain = device.fetch(state.published.id, keys_of(layout))
        for seed in (0, 1):
            plain = device.fetch(state.published.id, keys_of(layout, seed=seed))
            found = fetch(device, state.published.id, keys_of(layout, seed=seed))
            assert_trees_equal(found.model, plain.model)
        hints = [path for _, path, *_ in both.recorders[0].seen if path.endswith("/hint")]
        assert len(hints) == len(set(hints)) == 3  # once a round


def test_a_table_of_which_every_client_may_take_all_is_downloaded_whole(both, fetch):
    layout = LAYOUTS["two key spaces"]
    state = published(both, layout, per_client=7)  # all of 6 neurons, 7 of 8 words
    seen = len(both.recorders[0].seen)
    with both.device() as device:
        found = fetch(device, state.published.id, keys_of(layout, 3))
        plain = device.fetch(state.published.id, keys_of(layout, 3))
    assert_trees_equal(found.model, plain.model)
    routes = [(m, p.split("/", 4)[-1]) for m, p, *_ in both.recorders[0].seen[seen:-1]]
    posted = [path for method, path in routes if method == "POST"]
    assert posted == ["tables/2/pir/two-server", "slices"]
    assert ("GET", "tables/1/segments/0") in routes


def test_a_table_without_content_shows_no_key(both, fetch):
    layout = kh.Layout.of(
        zeros(w=(7, 3), none=(5, 0)),
        kh.Cut(kh.KeySpace("row", 7), {"w": 0}),
        kh.Cut(kh.KeySpace("empty", 5), {"none": 0}),
    )
    state, seen = published(both, layout), len(both.recorders[0].seen)
    with both.device() as device:
        found = fetch(device, state.published.id, keys_of(layout))
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
    assert not any(path.endswith("/slices") for _, path, *_ in both.recorders[0].seen[seen:])


def fetch_once(both, fetch, state, layout):
    """The tops of a round are fetched with the first queries of a device, and then kept."""
    with both.device() as device:
        fetch(device, state.published.id, keys_of(layout))


def shown(recorder, start):
    """What a server can see of requests, but for their secrets: methods, paths, lengths."""
    return [(method, path, query, len(body)) for method, path, query, body, _ in recorder[start:]]


def test_what_a_server_sees_does_not_depend_on_the_keys(both, fetch):
    layout = LAYOUTS["two key spaces"]
    state = published(both, layout)
    views, bodies = [], []
    fetch_once(both, fetch, state, layout)
    for keys in (
        {"word": [3, 1], "neuron": [5, 0]},
        {"word": [7], "neuron": [2] * 9},
        {"word": [], "neuron": []},
    ):
        starts = [len(recorder.seen) for recorder in both.recorders]
        with both.device() as device:
            device.known(state.published.id)
            found = fetch(device, state.published.id, keys)
        assert {name: list(z) for name, z in found.keys.items()} == keys
        pairs = list(zip(both.recorders, starts, strict=True))
        views.append([shown(recorder.seen, start) for recorder, start in pairs])
        for recorder, start in pairs:
            bodies += [bytes(s[3]) for s in recorder.seen[start:] if "/pir/" in s[1] and s[3]]
    assert views[0] == views[1] == views[2]
    assert len(set(bodies)) == len(bodies) == 3 * 2 * 2  # rounds, tables, servers
    # What everybody receives is asked for in the clear, and is the same for all.
    path = f"/v1/rounds/{state.published.id}/slices"
    slices = [bytes(body) for _, asked, _, body, _ in both.recorders[0].seen if asked == path]
    assert len(set(slices)) == 1


def test_too_many_keys_are_refused_before_anything_is_sent(both, fetch):
    layout = LAYOUTS["two key spaces"]
    state = published(both, layout)
    starts = [len(recorder.seen) for recorder in both.recorders]
    with both.device() as device, pytest.raises(KeySpaceError, match="3 different keys") as caught:
        fetch(device, state.published.id, {"word": [3], "neuron": [5, 0, 1]})
    assert "5" not in str(caught.value)
    for recorder, start in zip(both.recorders, starts, strict=True):
        assert {method for method, *_ in recorder.seen[start:]} == {"GET"}


def test_a_slice_beyond_what_a_device_takes_is_refused(both, fetch):
    layout = LAYOUTS["two key spaces"]
    state = published(both, layout)
    with both.device(max_answer=100) as device, pytest.raises(ServiceError, match="longer than"):
        fetch(device, state.published.id, keys_of(layout))


def test_traffic_counts_what_every_server_sent_and_received(both, fetch):
    layout = LAYOUTS["rows"]
    state = published(both, layout)
    with both.device() as device:
        traffic = fetch(device, state.published.id, keys_of(layout)).traffic
    bodies = [len(s[3]) for r in both.recorders for s in r.seen if state.published.id in s[1]]
    assert traffic.bytes_up == sum(bodies)
    assert traffic.requests == 5
    params = both.params(state.published.id, 0)
    replies = 2 * TwoServerPir().lengths(params.encode()).reply
    top = 32 * params.num_keys
    assert traffic.bytes_down == 2 * len(params.encode()) + replies + top


STASH = batch.batch_shape(40, 20_000).stash  # of up to forty keys of a client of `wide`


def wide(word=20_000):
    """A table of so many rows that queries go to buckets."""
    return kh.Layout.of(
        zeros(embed=(word, 2), bias=(3,)), kh.Cut(kh.KeySpace("word", word), {"embed": 0})
    )


def test_keys_that_found_no_place_are_dropped_and_nobody_notices(both, fetch, monkeypatch):
    state, keys = published(both, wide(), per_client=40), [*range(0, 200, 20), 0, 20]
    lengths = []
    fetch_once(both, fetch, state, wide())
    for placed in (True, False):
        starts = [len(recorder.seen) for recorder in both.recorders]
        if not placed:  # none of ten in a bucket, but some in the stash
            monkeypatch.setattr(batch, "place", lambda choices, _: np.full(len(choices), -1))
        with both.device() as device:
            found = fetch(device, state.published.id, {"word": keys})
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        pairs = zip(both.recorders, starts, strict=True)
        lengths.append([shown(recorder.seen, start) for recorder, start in pairs])
    left = sorted(set(keys))[:STASH]
    assert list(found.keys["word"]) == [key for key in keys if key in left]  # order and repeats
    assert lengths[0] == lengths[1]


def test_a_device_trains_with_the_keys_that_are_left(both, fetch, monkeypatch):
    state, trained = published(both, wide(), per_client=40), []

    def train(known, fetched):
        trained.append({name: len(z) for name, z in fetched.keys.items()})
        return tree.map_leaves(np.zeros_like, fetched.model)

    monkeypatch.setattr(batch, "place", lambda choices, _: np.full(len(choices), -1))
    with both.device("dropper") as device:
        taken = take_part(device, Participant(lambda _: {"word": range(10)}, train, fetch))
    assert trained == [{"word": STASH}]
    assert (taken.keys, taken.missing) == (STASH, 10 - STASH)
    assert list(both.service.stored(state.published.id)) == ["dropper"]


def test_a_second_service_that_asks_for_tokens_is_shown_its_own(tmp_path):
    layout, ring = LAYOUTS["rows"], Keyring((b"2" * 32,))
    admitting = partial(admit, pace=Pace(), uniform=random)
    options = {"access": Access(ring, reads_need_token=True), "admit": admitting}
    with pair(tmp_path, second=options) as both:
        state = published(both, layout)
        token = ring.issue("device", "there", now=time.time(), seconds=60.0)
        with both.device() as device, second_device(both.urls[1], token=token) as second:
            assignment = device.check_in()
            found = QueryFetch(TwoServerPir(), (second,))(device, assignment, keys_of(layout))
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
            bearers = [{dict(s[4]).get(b"authorization") for s in r.seen} for r in both.recorders]
            assert f"Bearer {assignment.token}".encode() in bearers[0]
            assert not bearers[0] & bearers[1]
            state = published(both, layout)  # the second service is in a later round by now
            with pytest.raises(StaleError, match="second service"):
                QueryFetch(TwoServerPir(), (second,))(device, assignment, keys_of(layout))


def test_a_service_without_private_retrieval_is_told(both):
    state = published(both, LAYOUTS["rows"])
    with both.device() as device, pytest.raises(NotFoundError):
        QueryFetch(OneServerPir())(device, state.published.id, keys_of(LAYOUTS["rows"]))
