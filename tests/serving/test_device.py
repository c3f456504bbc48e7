"""The device: the bytes of the in-process deliveries, whatever the network does to them."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from keyhole.delivery.records import Coding, RecordField, Records
from keyhole.delivery.sources import FunctionSource, sources_of
from keyhole.errors import (
    AccessError,
    ConflictError,
    DamageError,
    InputError,
    KeySpaceError,
    NotFoundError,
    ServiceError,
    TooLateError,
)
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.serving.client import Timeouts
from keyhole.serving.coordinator import Wait
from keyhole.serving.device import Assignment, Device
from keyhole.serving.participation import Participant, run, take_part
from keyhole.serving.retrying import Clock, Retry
from keyhole.serving.slice_cache import SliceCache
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys
from tests.serving.fault_proxy import CUT, DELAY, FLIP, HALF_CLOSE, RESET, FaultProxy
from tests.serving.small_service import random_state, small_service

CODINGS = ("plain", "half", "uint8", "uint4")
LAYOUT = LAYOUTS["two key spaces"]
KEYS = {"word": [3, 1, 3], "neuron": [5]}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with small_service(tmp_path_factory.mktemp("rounds")) as made:
        yield made


@pytest.fixture(scope="module")
def proxy(service):
    with FaultProxy(service.port) as made:
        yield made


@pytest.fixture
def device(service):
    with service.device() as made:
        yield made


@pytest.fixture
def proxied(service, proxy):
    """A device behind the proxy."""
    proxy.arm()
    with service.device(f"http://127.0.0.1:{proxy.port}") as made:
        yield made


_numbers = iter(range(10**6))


def publish(service, layout=LAYOUT, seed=0, **options):
    """The state of a new round."""
    state = random_state(layout, seed)
    state.published = service.publisher.publish_state(state, number=next(_numbers), **options)
    return state


def decoded(state, keys, coding):
    """The sub-model of what coded slices stand for, by way of the plain definitions."""
    leaves = {}
    chosen = state.layout.keys_by_space(keys)
    for part, source in zip(state.layout.parts, sources_of(state, coding), strict=True):
        rows = source.records.decode_rows(source.read(part.keys_of(chosen).array))
        leaves |= part.from_rows(rows, [len(chosen[f.name]) for f in part.product.factors])
    return tree.unflatten(state.layout.structure, leaves)


# The law: over HTTP as in process.


@pytest.mark.parametrize("kind", CODINGS)
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=8)
@given(data=st.data())
def test_fetching_gives_the_bytes_of_selecting_in_process(service, name, kind, data):
    layout, coding = LAYOUTS[name], Coding(kind, seed=7)
    published = _published(service, name, coding)
    keys = data.draw(client_keys(layout))
    expected = decoded(published, keys, coding)
    if kind == "plain":
        assert_trees_equal(expected, published.select(keys))
    with service.device() as device:
        found = device.fetch(published.id, keys)
        assert_trees_equal(found.model, expected)
        assert_trees_equal(device.fetch_all(published.id).select(keys).model, expected)
        assert tuple(found.keys.values()) == keys


_kept = {}


def _published(service, name, coding):
    """The round of a layout and coding; hypothesis asks for it many times in a row."""
    wanted = (str(service.directory), name, coding)
    if wanted not in _kept:
        _kept.clear()
        state = publish(service, LAYOUTS[name], coding=coding, segment_bytes=100)
        state.id = state.published.id
        _kept[wanted] = state
    return _kept[wanted]


@given(st.lists(st.integers(0, 99), max_size=9))
def test_slices_of_a_select_function_arrive(many, keys):
    service, round_id, table = many
    with service.device() as device:
        found = device.fetch_slices(round_id, "word", np.array(keys, np.int64))
        home = device.fetch_all(round_id).slices("word", np.array(keys, np.int64))
        with pytest.raises(InputError, match="select functions"):
            device.fetch(round_id, {"word": keys})
    expected = np.stack([table[k] for k in keys]) if keys else np.empty((0, 3), np.float32)
    np.testing.assert_array_equal(found["w"], expected)
    np.testing.assert_array_equal(home["w"], expected)


@pytest.fixture(scope="module")
def many(service):
    table = np.random.default_rng(0).standard_normal((100, 3)).astype(np.float32)
    records = Records("word", 100, (RecordField("w", (3,), np.dtype("f4")),))
    source = FunctionSource(records, table, lambda x, z: {"w": x[z]})
    published = service.publisher.publish([source], layout=None, number=next(_numbers), step=0)
    return service, published.id, table


def test_many_keys_are_asked_for_in_several_queries(service):
    state = publish(service)
    keys = {"word": [7, 6, 5, 4, 3, 2, 1, 0, 0, 3], "neuron": [5, 0]}
    with service.device(most_keys=3, cache=SliceCache(None, least_record=0)) as device:
        for _ in range(2):
            found = device.fetch(state.published.id, keys)
            assert found.traffic.requests == 5
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_one_query_fetches_all_tables(service, device):
    state = publish(service)
    assert device.fetch(state.published.id, KEYS).traffic.requests == 1


def test_no_key_no_query(service, device):
    state = publish(service, LAYOUTS["rows"])
    found = device.fetch(state.published.id, {"row": []})
    assert found.model["w"].shape == (0, 3)
    assert found.traffic.requests == 0


@pytest.mark.parametrize(
    "keys",
    [{}, {"word": [1]}, {"word": [1], "neuron": [6]}, {"word": [-1], "neuron": []}, {"x": [1]}],
)
def test_keys_that_do_not_fit_are_refused_at_home(service, device, keys):
    state = publish(service)
    device.known(state.published.id)
    with pytest.raises(KeySpaceError):
        device.fetch(state.published.id, keys)


def test_tables_that_do_not_exist_are_refused(service, device):
    state = publish(service)
    with pytest.raises(NotFoundError, match="no such table"):
        device.fetch_slices(state.published.id, "wrod", [1])


# Rounds, tokens, updates.


def test_a_device_takes_part_from_check_in_to_update(service, device):
    state = publish(service)
    told = device.check_in()
    assert told.round == device.current().round == state.published.id
    fetched = device.fetch(told, KEYS)
    device.send(told, fetched.model, fetched.keys)
    device.send(told, fetched.model, KEYS)  # the same again
    assert list(service.stored(told.round)) == ["phone"]
    assert device.check_in() == Wait(1.0)


def test_a_different_update_is_a_conflict(service, device):
    publish(service)
    told = device.check_in()
    fetched = device.fetch(told, KEYS)
    device.send(told, fetched.model, KEYS)
    doubled = tree.map_leaves(lambda leaf: 2 * leaf, fetched.model)
    before = service.stored(told.round)
    with pytest.raises(ConflictError):
        device.send(told, doubled, KEYS)
    assert service.stored(told.round) == before


def test_a_closed_round_is_too_late_for_an_update(service, device):
    publish(service)
    told = device.check_in()
    fetched = device.fetch(told, KEYS)
    service.publisher.close_round()
    with pytest.raises(TooLateError):
        device.send(told, fetched.model, KEYS)
    assert service.stored(told.round) == {}


def test_a_bad_token_is_refused(service):
    publish(service)
    with service.device(token="kh1.nonsense") as device, pytest.raises(AccessError):
        device.check_in()


def test_the_manifest_must_be_the_one_the_round_is_named_after(service, device):
    state = publish(service)
    number, _, digest = state.published.id.partition("-")
    for other in (f"{number}-{'0' * 16}", f"{number}9-{digest}"):
        with pytest.raises(NotFoundError):
            device.manifest(other)
    path = service.directory / "rounds" / state.published.id / "manifest.json"
    assert device.manifest(state.published.id) == state.published.manifest
    assert path.read_bytes() == state.published.encoded


@pytest.mark.parametrize("wrong", ["", "../../x", "1-0", "1-" + "0" * 15 + "/", "-1-" + "0" * 16])
def test_what_cannot_be_a_round_never_becomes_a_path(device, wrong):
    with pytest.raises(ServiceError, match="no sense"):
        device.manifest(wrong)


def test_nothing_that_is_printed_tells_a_key_or_a_token(service, device):
    publish(service)
    told = device.check_in()
    fetched = device.fetch(told, {"word": [6, 7], "neuron": [4]})
    whole = device.fetch_all(told)
    shown = repr([device, told, fetched, whole, device.known(told)])
    assert told.token not in shown
    assert service.token() not in shown
    assert "[6" not in shown
    assert "2 of 'word'" in shown


# Faults on the way.


def answer_length(proxy, ask):
    """Bytes of the answers that `ask` brings."""
    proxy.arm()
    ask()
    return proxy.passed


@pytest.mark.parametrize("kind", [CUT, RESET, HALF_CLOSE])
def test_slices_survive_a_cut_at_every_byte(service, proxy, proxied, kind):
    state = publish(service, seed=1)
    proxied.known(state.published.id)
    keys = {"word": [7, 0, 2], "neuron": [1, 4]}
    expected = proxied.fetch(state.published.id, keys)
    length = answer_length(proxy, lambda: proxied.fetch(state.published.id, keys))
    assert length > 250
    for at in range(length):
        proxy.arm(kind, at)
        found = proxied.fetch(state.published.id, keys)
        assert_trees_equal(found.model, expected.model)


def test_a_cut_answer_is_asked_for_from_where_it_ended(service, proxy, proxied):
    state = publish(service, seed=1)
    proxied.known(state.published.id)
    keys = {"word": [7, 0, 2], "neuron": [1, 4]}
    whole = proxied.fetch(state.published.id, keys).traffic
    length = answer_length(proxy, lambda: proxied.fetch(state.published.id, keys))
    proxy.arm(CUT, length - 1)
    found = proxied.fetch(state.published.id, keys).traffic
    assert found.requests == 2
    assert found.bytes_down < whole.bytes_down + 24  # one record again, and what was cut of it


@pytest.mark.parametrize("kind", [CUT, RESET, HALF_CLOSE])
def test_segments_survive_a_cut_at_every_byte(service, proxy, proxied, kind):
    state = publish(service, LAYOUTS["rows"], seed=2, strong=True)
    proxied.known(state.published.id)

    def fetch():
        return proxied.fetch_segment(state.published.id, "row", 0)

    expected, length = fetch().copy(), answer_length(proxy, fetch)
    for at in range(length):
        proxy.arm(kind, at)
        np.testing.assert_array_equal(fetch(), expected)


@pytest.mark.parametrize("kind", [CUT, RESET, HALF_CLOSE])
def test_an_update_whose_answer_is_cut_at_any_byte_is_stored_once(service, proxy, proxied, kind):
    publish(service, seed=3)
    told = proxied.check_in()
    fetched = proxied.fetch(told, KEYS)
    length = answer_length(proxy, lambda: proxied.send(told, fetched.model, KEYS))
    expected = service.stored(told.round)
    for at in range(length):
        service.spool._path(told.round, "phone").unlink()
        proxy.arm(kind, at)
        proxied.send(told, fetched.model, KEYS)
        assert service.stored(told.round) == expected


def body_offsets(proxy, ask, body):
    """Where the bytes of a body lie among those of the answers."""
    length = answer_length(proxy, ask)
    return range(length - body, length)


def test_a_flipped_byte_of_slices_is_found_and_healed(service, proxy, proxied):
    state = publish(service, seed=4)
    proxied.known(state.published.id)
    expected = proxied.fetch(state.published.id, KEYS)

    def fetch():
        return proxied.fetch(state.published.id, KEYS)

    for at in body_offsets(proxy, fetch, expected.traffic.bytes_down):
        proxy.arm(FLIP, at)
        found = fetch()
        assert found.traffic.requests == 2
        assert_trees_equal(found.model, expected.model)


def test_a_flipped_byte_of_a_segment_its_sums_or_a_manifest_is_found(service, proxy, proxied):
    state = publish(service, LAYOUTS["rows"], seed=5)
    round_id = state.published.id
    expected = proxied.fetch_segment(round_id, "row", 0).copy()

    def fetch():
        return proxied.fetch_segment(round_id, "row", 0)

    for at in body_offsets(proxy, fetch, expected.nbytes):
        proxy.arm(FLIP, at)
        np.testing.assert_array_equal(fetch(), expected)
        assert proxy.passed > expected.nbytes * 2
    for at in body_offsets(proxy, lambda: service_manifest(proxied, round_id), 100):
        proxy.arm(FLIP, at)
        assert service_manifest(proxied, round_id) == state.published.manifest


def service_manifest(device, round_id):
    device._rounds.clear()
    return device.manifest(round_id)


def test_damage_that_stays_is_told(service, device):
    """A record that is not what it was when its sum was made."""
    state = publish(service, LAYOUTS["rows"], seed=6)
    path = service.directory / "rounds" / state.published.id / "table-0" / "seg-0.bin"
    with path.open("r+b") as file:
        file.seek(5 * 12)
        file.write(b"\xff")
    with pytest.raises(DamageError, match="slices were damaged"):
        device.fetch(state.published.id, {"row": [1, 5]})
    with pytest.raises(DamageError, match="segment"):
        device.fetch_segment(state.published.id, "row", 0)
    device.fetch(state.published.id, {"row": [1, 4]})


def test_a_slow_service_is_asked_again(service, proxy):
    state = publish(service)
    url = f"http://127.0.0.1:{proxy.port}"
    proxy.arm()
    with service.device(url, timeouts=Timeouts(5, 0.1)) as device:
        device.known(state.published.id)
        proxy.arm(DELAY, 40)
        found = device.fetch(state.published.id, KEYS)
        assert found.traffic.requests == 2
        proxy.released.set()
    assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_an_error_never_names_keys(service, device):
    state = publish(service, LAYOUTS["rows"])
    device.known(state.published.id)
    with service.device(service.url, most_keys=10**9) as greedy:
        with pytest.raises(InputError, match="too many keys") as told:
            greedy.fetch(state.published.id, {"row": [6] * 70_000})
    assert "6, 6" not in str(told.value)


# The cache.


def changed(service, state, rows):
    """The next round, in which some rows of the first table differ."""
    model = state.select(tuple(space.all_keys() for space in state.layout.spaces))
    model["w"] = model["w"].copy()
    model["w"][rows] += 1
    after = ServerState.dense(state.layout, model, SGD(lr=0.5))
    after.published = service.publisher.publish_state(after, number=next(_numbers))
    return after


WIDE = kh.Layout.of({"w": np.zeros((50, 64), np.float32)}, kh.Cut(kh.KeySpace("row", 50), {"w": 0}))


@pytest.mark.parametrize("on_disk", [False, True])
def test_only_slices_that_changed_are_sent_again(service, tmp_path, on_disk):
    directory = tmp_path / "cache" if on_disk else None
    cache, state = SliceCache(directory), publish(service, WIDE)
    with service.device(cache=cache) as device:
        device.fetch(state.published.id, {"row": [1, 2, 3]})
        state = changed(service, state, [2, 9])
        if on_disk:
            device._cache = SliceCache(directory)  # as after a restart
        found = device.fetch(state.published.id, {"row": [3, 2, 1, 9, 9, 3]})
        assert found.traffic.reused == 3
        assert found.traffic.bytes_down == 1 + 3 * 256  # a bit for each of 6 keys; 2, 9 and 9
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        found = device.fetch(state.published.id, {"row": [9, 2]})
        assert found.traffic.bytes_down == 1
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


@settings(max_examples=25)
@given(rounds=st.lists(st.lists(st.integers(0, 49), max_size=6), min_size=1, max_size=3))
def test_a_cache_changes_no_byte(service, rounds):
    cache, state = SliceCache(None, 5 * 280), publish(service, WIDE)
    with service.device(cache=cache) as device:
        for place, keys in enumerate(rounds):
            found = device.fetch(state.published.id, {"row": keys})
            assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
            state = changed(service, state, [place])


def test_a_cut_answer_to_a_device_with_a_cache_goes_on(service, proxy, proxied):
    state = publish(service, WIDE)
    for at in range(0, 900, 7):
        proxied._cache = SliceCache(None)
        proxy.arm()
        proxied.fetch(state.published.id, {"row": [1, 2, 3]})
        proxy.arm(CUT, at)
        found = proxied.fetch(state.published.id, {"row": [1, 9, 2, 8, 3, 7]})
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))
        assert found.traffic.bytes_down <= 6 + 256 * 4


def test_a_cache_that_rots_in_memory_is_not_used_again(service):
    cache, state = SliceCache(None), publish(service, WIDE)
    with service.device(cache=cache) as device:
        device.fetch(state.published.id, {"row": [1, 2]})
        for table in cache._tables.values():
            table.records[0, 5] ^= 1
        found = device.fetch(state.published.id, {"row": [1, 2]})
        assert found.traffic.requests == 2
        assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


# Taking part.


def twice(known, fetched):
    return tree.map_leaves(lambda leaf: 2 * leaf, fetched.model)


HABIT = Participant(lambda known: KEYS, twice)


@pytest.mark.parametrize("at_home", [False, True])
def test_taking_part_stores_the_update_of_what_was_trained(service, at_home):
    state = publish(service)
    with service.device(name=f"phone-{at_home}") as device:
        taken = take_part(device, replace(HABIT, selects_at_home=at_home))
    assert (taken.number, taken.keys) == (state.published.manifest.number, 4)
    assert taken.bytes_down == (348 + 8 * 15 if at_home else 108)
    assert list(service.stored(state.published.id)) == [f"phone-{at_home}"]


def test_a_device_waits_as_told_before_it_fetches(service, device):
    publish(service)
    waits = []
    device.clock = Clock(sleep=waits.append)
    told = device.check_in()
    device.check_in = lambda: Assignment(told.round, told.number, told.token, 7.5)
    take_part(device, HABIT)
    assert waits == [7.5]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_that_closed_is_refused_before_bytes_are_wasted(service, device, when):
    publish(service)
    bytes_before = {}

    def choose(known):
        if when == "after":
            return KEYS
        raise AssertionError("too late to choose")

    def train(known, fetched):
        service.publisher.close_round()
        bytes_before["sent"] = True
        return fetched.model

    told = device.check_in()
    device.check_in = lambda: told
    device.send = lambda *_: pytest.fail("too late to send")
    if when == "before":
        service.publisher.close_round()
    with pytest.raises(TooLateError, match="is over"):
        take_part(device, Participant(choose, train))


def test_run_takes_part_in_every_round_and_skips_those_it_misses(service):
    publish(service)
    seen, missed, trained = [], [], []

    def train(known, fetched):
        trained.append(known.manifest.number)
        if len(trained) == 2:  # this one takes too long
            service.publisher.close_round()
        return fetched.model

    def sleep(_):  # nothing to do until there is another round
        publish(service)

    with service.device(clock=Clock(sleep=sleep)) as device:
        count = run(
            device,
            Participant(lambda _: KEYS, train),
            rounds=3,
            on_round=lambda taken: seen.append(taken.number),
            on_miss=lambda: missed.append(1),
        )
    assert count == 3
    assert len(missed) == 1
    assert seen == [trained[0], *trained[2:]]


def test_a_stop_ends_waiting_at_once(service):
    publish(service)
    service.publisher.close_round()
    stop = threading.Event()
    with service.device(stop=stop, clock=None, retry=Retry()) as device:
        thread = threading.Thread(target=run, args=(device, HABIT))
        thread.start()
        stop.set()
        thread.join(5)
        assert not thread.is_alive()


def test_a_stop_ends_retrying_when_nobody_answers():
    stop = threading.Event()
    clock = Clock(sleep=lambda _: stop.set())
    with Device("http://127.0.0.1:9", stop=stop, clock=clock, retry=Retry(attempts=99)) as device:
        assert run(device, HABIT) == 0


def test_threads_share_a_device(service):
    state = publish(service)
    found = [None] * 8
    with service.device() as device:

        def fetch(place):
            keys = {"word": [place], "neuron": [place % 6] * place}
            found[place] = device.fetch(state.published.id, keys)

        threads = [threading.Thread(target=fetch, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in found:
        assert_trees_equal(each.model, state.select(tuple(each.keys.values())))
