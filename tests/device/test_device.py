"""The device: the bytes of the in-process deliveries, whatever the network does to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import tree
from keyhole.delivery.records import RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.device.cache import SliceCache
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
from keyhole.wire.assignment import Wait
from tests.helpers import DIGEST, LAYOUTS, assert_trees_equal
from tests.service.scripted import answer, scripted

KEYS = {"word": [3, 1, 3], "neuron": [5]}


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
    published = service.publisher.publish(
        [source], layout=None, number=service.next_number(), step=0
    )
    return service, published.id, table


def test_many_keys_are_asked_for_in_several_queries(service):
    state = service.publish()
    keys = {"word": [7, 6, 5, 4, 3, 2, 1, 0, 0, 3], "neuron": [5, 0]}
    for limit, requests in (
        ({"max_keys": 3}, 5),
        ({"max_answer": 60}, 6),
        ({"max_answer": 36}, 12),
    ):
        with service.device(**limit, cache=SliceCache(None, min_record=0)) as device:
            for _ in range(2):
                found = device.fetch(state.published.id, keys)
                assert found.traffic.requests == requests
                assert_trees_equal(found.model, state.select(tuple(found.keys.values())))


def test_one_query_fetches_all_tables(service, device):
    state = service.publish()
    assert device.fetch(state.published.id, KEYS).traffic.requests == 1


def test_no_key_no_query(service, device):
    state = service.publish(LAYOUTS["rows"])
    found = device.fetch(state.published.id, {"row": []})
    assert found.model["w"].shape == (0, 3)
    assert found.traffic.requests == 0


@pytest.mark.parametrize(
    "keys",
    [{}, {"word": [1]}, {"word": [1], "neuron": [6]}, {"word": [-1], "neuron": []}, {"x": [1]}],
)
def test_keys_that_do_not_fit_are_refused_at_home(service, device, keys):
    state = service.publish()
    device.known(state.published.id)
    with pytest.raises(KeySpaceError):
        device.fetch(state.published.id, keys)


def test_tables_that_do_not_exist_are_refused(service, device):
    state = service.publish()
    with pytest.raises(NotFoundError, match="no such table"):
        device.fetch_slices(state.published.id, "wrod", [1])


@pytest.mark.parametrize("place", [-1, 1, 5])
def test_segments_that_do_not_exist_are_refused_at_home(service, device, place):
    state = service.publish(LAYOUTS["rows"])
    with pytest.raises(NotFoundError, match=r"no such segment: got -?\d; expected 0..0"):
        device.fetch_segment(state.published.id, "row", place)


def test_what_is_longer_than_a_device_takes_is_not_asked_for(service):
    """Whatever a manifest says of records and segments, it allocates no more than that."""
    state = service.publish(LAYOUTS["rows"])  # 7 records of 12 bytes
    with service.device(max_answer=83) as device:
        device.fetch(state.published.id, {"row": [1]})
        for ask in (device.fetch_all, lambda i: device.fetch_segment(i, "row", 0)):
            with pytest.raises(ServiceError, match=r"segment is longer.*got 84 bytes; .* 83"):
                ask(state.published.id)
    with service.device(max_answer=11) as device:
        with pytest.raises(ServiceError, match=r"slice is longer.*got 12 bytes; .* 11"):
            device.fetch(state.published.id, {"row": [1]})
        assert device.fetch(state.published.id, {"row": []}).traffic.requests == 0


# Rounds, tokens, updates.


def test_a_device_takes_part_from_check_in_to_update(service, device):
    state = service.publish()
    told = device.check_in()
    assert told.round == device.current().round == state.published.id
    fetched = device.fetch(told, KEYS)
    device.send(told, fetched.model, fetched.keys)
    device.send(told, fetched.model, KEYS)  # the same again
    assert list(service.stored(told.round)) == ["phone"]
    assert device.check_in() == Wait(1.0)


def test_a_different_update_is_a_conflict(service, device):
    service.publish()
    told = device.check_in()
    fetched = device.fetch(told, KEYS)
    device.send(told, fetched.model, KEYS)
    doubled = tree.map_leaves(lambda leaf: 2 * leaf, fetched.model)
    before = service.stored(told.round)
    with pytest.raises(ConflictError):
        device.send(told, doubled, KEYS)
    assert service.stored(told.round) == before


def test_a_closed_round_is_too_late_for_an_update(service, device):
    service.publish()
    told = device.check_in()
    fetched = device.fetch(told, KEYS)
    service.publisher.close_round()
    with pytest.raises(TooLateError):
        device.send(told, fetched.model, KEYS)
    assert service.stored(told.round) == {}


def test_a_bad_token_is_refused(service):
    service.publish()
    with service.device(token="kh2.nonsense") as device, pytest.raises(AccessError):
        device.check_in()


def test_the_manifest_must_be_the_one_the_round_is_named_after(service, device):
    published = service.publish().published
    assert device.manifest(published.id) == published.manifest
    other = f"{published.manifest.number}-{DIGEST}"
    with scripted(*[answer(200, published.encoded)] * 4) as script:
        url = f"http://127.0.0.1:{script.port}"
        with service.device(url) as fooled, pytest.raises(DamageError, match="manifest"):
            fooled.manifest(other)


@pytest.mark.parametrize(
    "said",
    [
        b"{}",
        b"[]",
        b"null",
        b'{"x": ' * 5000,
        b"\xff",
        b'{"wait": null}',
        b'{"wait": "3"}',
        b'{"wait": NaN}',
        b'{"round": "3", "number": 3}',
        b'{"round": "../x", "number": 3}',
        b'{"round": "3-%s", "number": 4}' % DIGEST.encode(),
        b'{"round": "3-%s", "number": 3, "fetch_after": "x"}' % DIGEST.encode(),
    ],
)
def test_a_check_in_that_makes_no_sense_is_refused(service, said):
    with scripted(answer(200, said)) as script:
        url = f"http://127.0.0.1:{script.port}"
        with service.device(url) as device, pytest.raises(ServiceError, match="no sense"):
            device.check_in()


@pytest.mark.parametrize(("said", "seconds"), [(b"-5", 0.0), (b"1e300", 3600.0), (b"2", 2.0)])
def test_a_wait_is_neither_negative_nor_forever(service, said, seconds):
    with (
        scripted(answer(200, b'{"wait": %s}' % said)) as script,
        service.device(f"http://127.0.0.1:{script.port}") as device,
    ):
        assert device.check_in() == Wait(seconds)


@pytest.mark.parametrize("wrong", ["", "../../x", "1-0", "1-" + "0" * 15 + "/", "-1-" + "0" * 16])
def test_what_cannot_be_a_round_never_becomes_a_path(device, wrong):
    with pytest.raises(InputError, match="not the identifier of a round"):
        device.manifest(wrong)


def test_nothing_that_is_printed_tells_a_key_or_a_token(service, device):
    service.publish()
    told = device.check_in()
    fetched = device.fetch(told, {"word": [6, 7], "neuron": [4]})
    whole = device.fetch_all(told)
    shown = repr([device, told, fetched, whole, device.known(told)])
    assert told.token not in shown
    assert service.token() not in shown
    assert "[6" not in shown
    assert "2 of 'word'" in shown
