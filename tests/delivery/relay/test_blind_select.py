"""Blind select: equal to indexing; what an observer sees depends on public numbers alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.delivery.relay import gateway as gateways
from keyhole.delivery.relay.binary_http import BinaryRequest, decode_request
from keyhole.delivery.relay.client import (
    BlindClient,
    TableShape,
    parse_slice_path,
    slice_handler,
    slice_path,
    slice_reply_bytes,
)
from keyhole.delivery.relay.gateway import Gateway, relay
from keyhole.delivery.relay.ohttp import GatewayKey, KeyConfig, open_request
from keyhole.errors import KeySpaceError, MalformedError, NotFoundError, ReplayError
from tests.helpers import DIGEST

ROUND = f"3-{DIGEST}"
KEY = GatewayKey.fresh(1)
RNG = np.random.default_rng(7)
TABLES = [
    RNG.integers(0, 256, (1200, 33), dtype=np.uint8),
    RNG.integers(0, 256, (5, 4), dtype=np.uint8),
]
SHAPES = [TableShape(0, 1200, 33, 12), TableShape(1, 5, 4, 3)]
EMPTY = np.empty(0, np.int64)


def served(**options):
    return Gateway([KEY], slice_handler(ROUND, TABLES), **options)


def client(shapes=SHAPES, config=KEY.config):
    return BlindClient(config, ROUND, shapes)


def keys_of(*wanted):
    return [np.array(keys, np.int64) for keys in wanted]


def asked_of(messages):
    """What the gateway reads: (table, key) of each message."""
    plains = [open_request({1: KEY.private}, message)[0] for message in messages]
    return [parse_slice_path(decode_request(plain))[1:] for plain in plains]


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.integers(0, 1199), max_size=12), st.lists(st.sampled_from([0, 1, 4]), max_size=9)
)
def test_any_multiset_of_keys_gives_what_indexing_gives(first, second):
    wanted = keys_of(first, second)
    question = client().query(wanted)
    found = question.decode(served().answer_many(question.messages()))
    for got, table, keys in zip(found, TABLES, wanted, strict=True):
        assert got.is_found.all()
        np.testing.assert_array_equal(got.records, table[keys])


def test_many_clients_through_one_relay_get_their_own_slices():
    wanted = [keys_of(RNG.integers(0, 1200, 10), RNG.integers(0, 5, 2)) for _ in range(4)]
    questions = [client().query(keys) for keys in wanted]
    replies = relay([question.messages() for question in questions], served().answer_many)
    for question, reply, keys in zip(questions, replies, wanted, strict=True):
        for got, table, z in zip(question.decode(reply), TABLES, keys, strict=True):
            np.testing.assert_array_equal(got.records, table[z])


@pytest.mark.parametrize(
    "wanted", [([], []), ([0], [0]), ([1199] * 9, [4]), (range(12), range(3))], ids=str
)
def test_number_and_lengths_of_messages_do_not_depend_on_keys(wanted):
    asking = client()
    question = asking.query(keys_of(*map(list, wanted)))
    messages = question.messages()
    assert len(messages) == asking.num_requests == 15
    assert {len(message) for message in messages} == {asking.request_bytes}
    replies = served().answer_many(messages)
    lengths = sorted(len(reply) for reply in replies)
    expected = sorted([asking.reply_bytes(0)] * 12 + [asking.reply_bytes(1)] * 3)
    assert lengths == expected
    assert asking.reply_bytes(0) == slice_reply_bytes(33) + 32


def test_different_keys_are_asked_once_each_and_padded_with_random_ones():
    asked = asked_of(client().query(keys_of([700, 3, 700], [2, 2])).messages())
    first = [key for table, key in asked if table == 0]
    assert len(first) == 12
    assert {3, 700} <= set(first)
    assert first.count(700) <= 2  # twice only if padding happens to hit it
    assert [table for table, _ in asked].count(1) == 3


def test_padding_covers_the_whole_table_and_order_is_shuffled():
    shapes = [TableShape(0, 4, 33, 200)]
    asked = [key for _, key in asked_of(client(shapes).query(keys_of([0])).messages())]
    counts = np.bincount(asked, minlength=4)
    # 199 uniform keys of 4: a count is 50 +- 6.1; 6 deviations.
    assert np.all(np.abs(counts - 50) < 38)
    firsts = {
        asked_of(client().query(keys_of(range(12), []), Prg(bytes([n] * 16))).messages()[:1])[0]
        for n in range(20)
    }
    assert len(firsts) > 5


def test_keys_outside_the_table_or_too_many_are_refused_without_naming_them():
    for wanted in ([1200], [-1], list(range(13))):
        with pytest.raises(KeySpaceError) as refused:
            client().query(keys_of(wanted, []))
        assert "keys cannot be queried" in str(refused.value)
        assert "1200" not in str(refused.value)
    with pytest.raises(KeySpaceError):
        client([TableShape(0, 1200, 33, 0)]).query(keys_of([1]))


def test_a_question_is_for_one_use():
    question = client().query([EMPTY, EMPTY])
    replies = served().answer_many(question.messages())
    with pytest.raises(ReplayError):
        question.messages()
    question.decode(replies)
    with pytest.raises(ReplayError):
        question.decode(replies)
    assert repr(question) == "BlindQuery(15 requests)"


def test_replayed_questions_are_refused():
    question = client().query([EMPTY, EMPTY])
    messages, answering = question.messages(), served()
    answering.answer_many(messages)
    assert_nothing_found(question.decode(answering.answer_many(messages)))


def assert_nothing_found(found):
    for got in found:
        assert not got.is_found.any()
        assert not got.records.any()
        assert got.wrong == len(got.records)


def test_a_batch_of_fewer_answers_than_requests_cannot_be_read():
    question = client().query(keys_of([1], [1]))
    replies = served().answer_many(question.messages())
    with pytest.raises(MalformedError):
        question.decode(replies[1:])
    assert question.decode(replies)[0].is_found.all()


@pytest.mark.parametrize(
    "spoil",
    [lambda r: b"", lambda r: r[:-1] + bytes([r[-1] ^ 1]), lambda r: r + b"\0", lambda r: r[:40]],
    ids=["none", "damaged", "longer", "shorter"],
)
def test_an_answer_that_does_not_open_is_left_out_and_nothing_else_is(spoil):
    """Whoever spoiled it sees a device that goes on as if nothing was wrong with it."""
    wanted = keys_of([7, 1], [1])
    for place in range(15):
        question = client().query(wanted, Prg(bytes(16)))
        messages = question.messages()
        replies = served().answer_many(messages)
        replies[place] = spoil(replies[place])
        table, key = asked_of(messages)[place]
        for at, (got, records, keys) in enumerate(
            zip(question.decode(replies), TABLES, wanted, strict=True)
        ):
            left = got.is_found
            assert set(keys[~left]) <= ({key} if at == table else set())
            assert got.wrong == (~left).sum()
            np.testing.assert_array_equal(got.records[left], records[keys[left]])


def test_swapped_answers_are_left_out():
    question = client().query(keys_of(range(12), range(3)))
    replies = served().answer_many(question.messages())
    found = question.decode([replies[1], replies[0], *replies[2:]])
    assert sum(got.wrong for got in found) == 2


def test_a_slice_of_another_length_is_left_out():
    question = client([TableShape(0, 1200, 32, 2)]).query(keys_of([1]))
    assert_nothing_found(question.decode(served().answer_many(question.messages())))


def test_a_gateway_of_another_round_refuses_inside():
    question = BlindClient(KEY.config, f"4-{DIGEST}", SHAPES).query(keys_of([1], [1]))
    replies = served().answer_many(question.messages())
    assert {len(reply) for reply in replies} == {gateways.ERROR_BYTES + 32}
    assert_nothing_found(question.decode(replies))


@pytest.mark.parametrize(
    "request_",
    [
        BinaryRequest(b"POST", slice_path(ROUND, 0, 1)),
        BinaryRequest(b"GET", b"/metrics"),
        BinaryRequest(b"GET", slice_path(ROUND, 0, 1) + b"/"),
        BinaryRequest(b"GET", slice_path(ROUND, 0, 1) + b"?x"),
        BinaryRequest(b"GET", slice_path("../..", 0, 1)),
        BinaryRequest(b"GET", b"/v1/rounds/" + ROUND.encode() + b"/tables/0/slices/01"),
        BinaryRequest(b"GET", b"/v1/rounds/" + ROUND.encode() + b"/tables/0/slices/-1"),
    ],
    ids=str,
)
def test_only_slices_are_answered(request_):
    with pytest.raises(NotFoundError):
        parse_slice_path(request_)


def test_the_second_cipher_works_as_well():
    config = KeyConfig(1, KEY.private.public, ((1, 3),))
    asking = client(config=config)
    question = asking.query(keys_of([5], []))
    replies = served().answer_many(question.messages())
    assert max(len(reply) for reply in replies) == slice_reply_bytes(33) + 48
    np.testing.assert_array_equal(question.decode(replies)[0].records, TABLES[0][[5]])
