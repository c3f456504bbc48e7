"""The binary messages: round trips, every byte of an example, and what is refused."""

import struct
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.errors import DamageError, KeySpaceError, RequestError, StaleError, TooLargeError
from keyhole.wire.messages import (
    MAX_BLOCKS,
    Ask,
    decode_answer,
    decode_query,
    decode_update,
    encode_query,
    encode_update,
    max_answer_bytes,
    names_of,
    sent_mask,
    unchanged,
)
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, counts_of, model_of

NUM_KEYS = [7, 2**31, 2**63]

NAMES = st.integers(0, 2**64 - 1)
MADE_FROM = bytes(range(32))  # the digest of a manifest


@st.composite
def asks(draw):
    table = draw(st.integers(0, len(NUM_KEYS) - 1))
    keys = draw(st.lists(st.integers(0, NUM_KEYS[table] - 1), max_size=9))
    names = draw(st.none() | st.lists(NAMES, min_size=len(keys), max_size=len(keys)))
    names = None if names is None else np.array(names, np.uint64)
    return Ask(table, np.array(keys, np.int64), names, draw(st.booleans()))


def same(one, other):
    assert one.table == other.table
    np.testing.assert_array_equal(one.keys, other.keys)
    assert (one.names is None) == (other.names is None)
    if one.names is not None:
        np.testing.assert_array_equal(one.names, other.names)
    assert one.wants_proof == other.wants_proof


@given(st.lists(asks(), max_size=4))
def test_a_query_arrives_as_it_was_asked(given_asks):
    found = decode_query(encode_query(given_asks), NUM_KEYS, max_keys=100)
    assert len(found) == len(given_asks)
    for one, other in zip(found, given_asks, strict=True):
        same(one, other)


def test_every_byte_of_a_query():
    body = encode_query(
        [
            Ask(1, np.array([5, 2, 5])),
            Ask(2, np.array([2**40]), np.array([7], np.uint64), wants_proof=False),
        ]
    )
    assert body == (
        b"KHQ2" + b"\2\0" + b"\0\0"
        # table 1, keys of 4 bytes, no names, a proof, 3 keys
        + b"\1\0" + b"\4" + b"\0" + b"\3\0\0\0" + b"\5\0\0\0\2\0\0\0\5\0\0\0"
        # table 2, keys of 8 bytes, names, no proof, 1 key
        + b"\2\0" + b"\x08" + b"\3" + b"\1\0\0\0" + b"\0\0\0\0\0\1\0\0" + b"\7\0\0\0\0\0\0\0"
    )  # fmt: skip


@pytest.mark.parametrize("key", [-1, 7, 2**31 - 1])
def test_keys_outside_their_table_are_counted_and_not_shown(key):
    body = bytearray(encode_query([Ask(0, np.array([3, 4, 5]))]))
    body[-4:] = struct.pack("<i", key)
    with pytest.raises(KeySpaceError, match=r"1 of 3 keys") as caught:
        decode_query(bytes(body), NUM_KEYS, 100)
    assert key == 7 or str(key) not in str(caught.value)


def test_more_keys_than_allowed_are_refused_before_they_are_read():
    body = encode_query([Ask(0, np.zeros(51, np.int64)), Ask(0, np.zeros(50, np.int64))])
    with pytest.raises(TooLargeError, match="got 101; expected 100"):
        decode_query(body, NUM_KEYS, max_keys=100)


def test_a_count_beyond_the_body_is_refused():
    body = bytearray(encode_query([Ask(0, np.array([3]))]))
    body[12:16] = b"\xff\xff\xff\xff"
    with pytest.raises(RequestError):
        decode_query(bytes(body), NUM_KEYS, max_keys=2**33)


def test_a_query_of_too_many_blocks_is_refused():
    body = encode_query([Ask(0, np.array([1]))] * (MAX_BLOCKS + 1))
    with pytest.raises(RequestError, match="its head"):
        decode_query(body, NUM_KEYS, 100)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_query_or_refused(body):
    try:
        found = decode_query(body, NUM_KEYS, max_keys=100)
    except RequestError:
        return
    except KeySpaceError:
        return
    assert len(encode_query(found)) <= len(body)


@given(st.lists(asks(), min_size=1, max_size=3), st.data())
def test_a_cut_or_lengthened_query_is_refused(given_asks, data):
    body = encode_query(given_asks)
    cut = data.draw(st.integers(0, len(body) - 1))
    for wrong in (body[:cut], body + b"\0"):
        with pytest.raises(RequestError):
            decode_query(wrong, NUM_KEYS, max_keys=100)


def test_an_answer_holds_what_the_device_does_not_hold():
    ask = Ask(0, np.array([4, 1, 4]), np.array([10, 11, 10], np.uint64))
    now = np.zeros((3, 32), np.uint8)
    now[:, 0] = [10, 99, 10]
    is_sent = ~unchanged(ask, now)
    body = bytes(64) + sent_mask(is_sent) + b"new"
    (answer,) = decode_answer(body, [ask], record_bytes=[3], nodes=[2])
    assert answer.proof.shape == (2, 32)
    assert answer.is_sent.tolist() == [False, True, False]
    assert answer.records.tobytes() == b"new"


def test_answers_of_several_tables_follow_each_other():
    both = [Ask(1, np.array([0, 1])), Ask(0, np.array([3]))]
    first, second = decode_answer(b"aabb" + bytes(32) + b"X", both, [1, 2], [0, 1])
    assert first.records.tobytes() == b"aabb"
    assert second.records.tobytes() == b"X"


@pytest.mark.parametrize("body", [b"", b"aabb", b"aabb" + bytes(32), b"aabb" + bytes(34)])
def test_an_answer_of_another_length_is_damage(body):
    both = [Ask(1, np.array([0, 1])), Ask(0, np.array([3]))]
    with pytest.raises(DamageError):
        decode_answer(body, both, [1, 2], [0, 1])


@given(st.data())
def test_of_a_cut_answer_what_is_whole_is_used_and_the_rest_can_be_asked_for(data):
    """Asked for piece by piece, an answer is the one that came at once."""
    lengths, left = [1, 3, 2], data.draw(st.lists(asks(), max_size=4))
    masks = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in map(count, left)]
    masks = [
        m if a.names is not None else [True] * count(a) for a, m in zip(left, masks, strict=True)
    ]
    nodes = [data.draw(st.integers(0, 2)) for _ in left]
    body = b"".join(
        bytes([n]) * 32 * n + block(a, m, lengths)
        for a, m, n in zip(left, masks, nodes, strict=True)
    )
    cut = data.draw(st.integers(0, len(body)))
    found = decode_answer(body[:cut], left, lengths, nodes, is_cut=True)
    assert len(found) <= len(left)
    for place, answer in enumerate(found):
        at = len(answer.is_sent)
        is_last = place == len(found) - 1
        assert at == count(left[place]) or is_last
        if answer.proof is None:
            assert is_last
            assert not at
        else:
            assert (answer.proof == nodes[place]).all()
            assert len(answer.proof) == nodes[place]
        assert answer.is_sent.tolist() == masks[place][:at]
        sent = left[place].keys[:at][answer.is_sent]
        np.testing.assert_array_equal(answer.records, records(sent, lengths[left[place].table]))
    if cut == len(body):
        assert all(answer.proof is not None for answer in found)
        assert [len(answer.is_sent) for answer in found] == [count(ask) for ask in left]


def count(ask):
    return len(ask.keys)


def records(keys, length):
    return np.repeat((keys % 256).astype(np.uint8)[:, None], length, axis=1)


def block(ask, mask, lengths):
    """What a service answers to one ask."""
    is_sent = np.array(mask, bool)
    head = b"" if ask.names is None else sent_mask(is_sent)
    return head + records(ask.keys[is_sent], lengths[ask.table]).tobytes()


def test_the_longest_answer_is_one_of_all_records_and_proofs():
    both = [Ask(1, np.arange(9), np.zeros(9, np.uint64)), Ask(0, np.array([3]))]
    assert max_answer_bytes(both, {0: 5, 1: 2}, [3, 0]) == 3 * 32 + 9 * 2 + 2 + 5


def test_a_record_is_named_by_the_first_eight_bytes_of_its_leaf():
    leaves = np.arange(64, dtype=np.uint8).reshape(2, 32)
    assert names_of(leaves).tolist() == [0x0706050403020100, 0x2726252423222120]


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_an_update_arrives_as_it_was_sent(name, data):
    layout = LAYOUTS[name]
    keys = data.draw(client_keys(layout))
    update = data.draw(model_of(layout, counts_of(keys)))
    by_name = layout.keys_by_space(keys)
    found, found_keys = decode_update(
        encode_update(layout, update, by_name, MADE_FROM), layout, 100, MADE_FROM
    )
    assert_trees_equal(found, update)
    assert {n: list(z) for n, z in found_keys.items()} == {n: list(z) for n, z in by_name.items()}


def example_update():
    layout = LAYOUTS["rows with a broadcast bias"]
    keys = {"row": layout.spaces[0].keys([6, 0])}
    update = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, "f4")}
    return layout, encode_update(layout, update, keys, MADE_FROM)


def test_every_byte_of_an_update():
    _, body = example_update()
    content = (
        b"KHU2" + b"\1\0" + b"\2\0" + MADE_FROM
        + b"\2\0\0\0" + struct.pack("<qq", 6, 0)
        + np.ones(3, "<f4").tobytes()  # what is not cut comes first
        + np.arange(6, dtype="<f4").tobytes()
    )  # fmt: skip
    assert body == content + struct.pack("<I", crc32(content))


def test_any_flipped_or_cut_byte_of_an_update_is_refused():
    layout, body = example_update()
    for place in range(len(body)):
        flipped = bytearray(body)
        flipped[place] ^= 0x40
        with pytest.raises(RequestError):
            decode_update(bytes(flipped), layout, 100, MADE_FROM)
        with pytest.raises(RequestError):
            decode_update(body[:place], layout, 100, MADE_FROM)


@given(st.binary(max_size=100))
def test_any_signed_bytes_are_an_update_or_refused(content):
    """Bytes whose checksum is right reach the checks behind it."""
    layout = LAYOUTS["rows with a broadcast bias"]
    content = struct.pack("<4sHH", b"KHU2", 1, 2) + MADE_FROM + content
    try:
        body = content + struct.pack("<I", crc32(content))
        _, keys = decode_update(body, layout, 3, MADE_FROM)
    except (RequestError, KeySpaceError):
        return
    assert len(keys["row"]) <= 3


def test_an_update_of_another_model_is_refused():
    _, body = example_update()
    with pytest.raises(RequestError, match="another model"):
        decode_update(body, LAYOUTS["two key spaces"], 100, MADE_FROM)


def test_an_update_made_from_another_manifest_is_refused():
    layout, body = example_update()
    with pytest.raises(StaleError, match="made for another manifest"):
        decode_update(body, layout, 100, bytes(32))


def test_an_update_with_too_many_or_wrong_keys_is_refused():
    layout, body = example_update()
    with pytest.raises(TooLargeError, match="got 2; expected 1"):
        decode_update(body, layout, 1, MADE_FROM)
    smaller = kh.Layout.of(
        {"kernel": np.zeros((6, 3), "f4"), "bias": np.zeros(3, "f4")},
        kh.Cut(kh.KeySpace("row", 6), {"kernel": 0}),
    )
    with pytest.raises(KeySpaceError, match=r"1 of 2 keys"):
        decode_update(body, smaller, 100, MADE_FROM)
