"""The middle of the enclave program, in this process: what it refuses, and that it reads no row
for that."""

import socket
import struct
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from keyhole.delivery.enclave import program as inside_module
from keyhole.delivery.enclave.client import fresh_nonce
from keyhole.delivery.enclave.messages import (
    Channel,
    Kind,
    reply_bytes,
    request_bytes,
    seal_request,
)
from keyhole.delivery.enclave.program import Inside, serve
from keyhole.delivery.enclave.verifier import SimulatedAttester
from keyhole.delivery.paths import Top, top_of
from keyhole.errors import (
    IntegrityError,
    KeyholeError,
    MalformedError,
    ReplayError,
    StaleError,
    TooManyError,
)
from tests.delivery.enclave.tables import (
    NOW,
    PROGRAM,
    flipped,
    inside_with,
    params_of,
    private_table,
    question,
    table,
)
from tests.helpers import LONG

RECORDS = table()


@pytest.fixture
def loaded():
    return inside_with(RECORDS)


def test_records_come_back_in_order_and_with_repeats(loaded):
    inside, params = loaded
    keys = [5, 36, 5, 0, 5]
    asked = question(inside, params, keys)
    np.testing.assert_array_equal(
        asked.decode([inside.answer(*asked.messages())]).records, RECORDS[keys]
    )


def test_no_keys_are_a_request_like_any_other(loaded):
    inside, params = loaded
    asked = question(inside, params, [])
    message = asked.messages()[0]
    assert len(message) == request_bytes(params) == 88 + 32 + 8 * 8 + 16
    reply = inside.answer(message)
    assert len(reply) == reply_bytes(params) == 88 + 16 + 8 * 29 + 16
    assert asked.decode([reply]).records.shape == (0, 29)
    assert inside.rows_read == 8 * 37


def test_many_keys_are_read_in_buckets_whatever_they_are():
    """K = 4,000 and m = 40: 54 buckets of 223 rows at most, and two places of the stash."""
    records = np.random.default_rng(0).integers(0, 256, (4_000, 29), np.uint8)
    inside, params = inside_with(records, max_keys=40)
    assert (params.shape.num_buckets, params.shape.stash) == (54, 2)
    read = []
    for keys in (np.arange(40) * 99, np.array([3_999, 7, 7]), np.empty(0, np.int64)):
        asked, before = question(inside, params, keys), inside.rows_read
        (message,) = asked.messages()
        assert len(message) == request_bytes(params) == 88 + 32 + 8 * 56 + 16
        found = asked.decode([inside.answer(message)])
        np.testing.assert_array_equal(found.records, records[keys])
        assert found.is_found.all()
        read.append(inside.rows_read - before)
    assert read == [54 * params.placement.bucket_size + 2 * 4_000] * 3


def test_a_question_has_one_use(loaded):
    inside, params = loaded
    asked = question(inside, params, [3])
    reply = inside.answer(asked.messages()[0])
    with pytest.raises(ReplayError):
        asked.messages()[0]
    asked.decode([reply])
    with pytest.raises(ReplayError):
        asked.decode([reply])
    assert repr(asked) == "EnclaveQuery(simulated, ...)"


def test_a_replayed_request_is_refused_before_any_row_is_read(loaded):
    inside, params = loaded
    message = question(inside, params, [3]).messages()[0]
    inside.answer(message)
    read = inside.rows_read
    with pytest.raises(ReplayError):
        inside.answer(message)
    with pytest.raises(ReplayError):
        inside.evidence(message[56:88])
    assert inside.rows_read == read


def test_every_damaged_request_is_refused_before_any_row_is_read(loaded):
    inside, params = loaded
    asked = question(inside, params, [3])
    message = asked.messages()[0]
    damaged = [flipped(message, bit) for bit in range(8 * len(message))]
    damaged += [message[:end] for end in (0, 1, 87, 88, 120, len(message) - 1)]
    damaged += [message + b"\0", message * 2]
    for each in damaged:
        with pytest.raises(KeyholeError) as refused:
            inside.answer(each)
        assert isinstance(refused.value, MalformedError | StaleError)
    assert inside.rows_read == 0
    # None of them used up the nonce.
    np.testing.assert_array_equal(asked.decode([inside.answer(message)]).records, RECORDS[[3]])


def test_every_damaged_reply_is_refused(loaded):
    inside, params = loaded
    asked = question(inside, params, [3])
    reply = inside.answer(asked.messages()[0])
    damaged = [flipped(reply, bit) for bit in range(0, 8 * len(reply), 3)]
    for each in [*damaged, reply[:-1], reply + b"\0", b""]:
        with pytest.raises((MalformedError, StaleError, IntegrityError)):
            asked.decode([each])
    np.testing.assert_array_equal(asked.decode([reply]).records, RECORDS[[3]])


def test_a_reply_to_somebody_else_is_refused(loaded):
    inside, params = loaded
    mine, other = question(inside, params, [3]), question(inside, params, [3])
    inside.answer(mine.messages()[0])
    with pytest.raises(MalformedError):
        mine.decode([inside.answer(other.messages()[0])])


@pytest.mark.parametrize("bad", [37, -2, 2**62, -(2**63)])
def test_sealed_keys_outside_the_table_are_refused(loaded, bad):
    inside, params = loaded
    nonce = fresh_nonce()
    public = inside.evidence(nonce).public
    message, _ = seal_request(public, params, nonce, np.array([1, bad]))
    with pytest.raises(MalformedError) as refused:
        inside.answer(message)
    assert str(bad) not in refused.value.got
    assert inside.rows_read == 0


def test_a_request_without_evidence_before_it_is_refused(loaded):
    inside, params = loaded
    public = inside.evidence(fresh_nonce()).public
    message, _ = seal_request(public, params, fresh_nonce(), np.array([1]))
    with pytest.raises(StaleError, match="without evidence"):
        inside.answer(message)


def test_a_request_of_the_table_before_is_refused(loaded):
    inside, params = loaded
    message = question(inside, params, [3]).messages()[0]
    inside.load(params)
    with pytest.raises(StaleError):
        inside.answer(message)
    inside.add_rows(RECORDS.reshape(-1))
    with pytest.raises(StaleError):  # the same table, under a new key
        inside.answer(message)
    inside.load(replace(params, round=bytes(16)))
    inside.add_rows(RECORDS.reshape(-1))
    with pytest.raises(StaleError):
        inside.answer(message)


def test_a_new_key_comes_with_every_table(loaded):
    inside, params = loaded
    before = inside.evidence(fresh_nonce()).public
    inside.load(params)
    inside.add_rows(RECORDS.reshape(-1))
    assert inside.evidence(fresh_nonce()).public != before


def test_rows_arrive_in_any_pieces_of_whole_rows():
    inside = Inside(SimulatedAttester(PROGRAM), clock=lambda: 0)
    params = params_of(RECORDS, 4)
    with pytest.raises(MalformedError):
        inside.add_rows(RECORDS[:1].reshape(-1))
    inside.load(params)
    for start, end in [(0, 1), (1, 30), (30, 37)]:
        with pytest.raises(StaleError):
            inside.evidence(fresh_nonce())
        inside.add_rows(RECORDS[start:end].reshape(-1))
    inside.evidence(fresh_nonce())
    with pytest.raises(MalformedError):
        inside.add_rows(RECORDS[:1].reshape(-1))


@pytest.mark.parametrize("count", [0, 28, 30, 38 * 29])
def test_rows_that_do_not_fit_are_refused(count):
    inside = Inside(SimulatedAttester(PROGRAM))
    inside.load(params_of(RECORDS, 4))
    with pytest.raises(MalformedError):
        inside.add_rows(np.zeros(count, np.uint8))


def test_a_row_that_the_host_changed_is_left_out_by_the_client():
    """The program takes any rows: what they are compared with is the root in its evidence."""
    table = private_table(RECORDS, 4)
    inside, params = Inside(SimulatedAttester(PROGRAM), clock=lambda: NOW), params_of(RECORDS, 4)
    inside.load(params)
    changed = RECORDS.copy()
    changed[20, 20] ^= 1
    inside.add_rows(changed.reshape(-1))
    keys = np.array([19, 20])
    asked = question(inside, params, keys)
    top = Top.of(len(RECORDS), params.root, top_of(table.tree))
    found = asked.decode([inside.answer(asked.messages()[0])]).checked(top, keys)
    assert (found.is_found.tolist(), found.wrong) == ([True, False], 1)
    np.testing.assert_array_equal(found.records, [RECORDS[19], np.zeros_like(RECORDS[20])])


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_nonce_has_one_length(loaded, length):
    with pytest.raises(MalformedError):
        loaded[0].evidence(bytes(length))


def test_a_table_has_a_most_of_clients(loaded, monkeypatch):
    monkeypatch.setattr(inside_module, "_MAX_NONCES", 2)
    inside, _ = loaded
    first = fresh_nonce()
    inside.evidence(first)
    inside.evidence(fresh_nonce())
    with pytest.raises(TooManyError):
        inside.evidence(fresh_nonce())


@contextmanager
def serving(inside, watch=None):
    """The host's end of a conversation with the program's loop, in a thread."""
    near, far = socket.socketpair()
    served = threading.Thread(target=serve, args=(Channel(far, watch), inside))
    served.start()
    with near, far:
        channel = Channel(near)
        assert channel.receive(LONG) == (Kind.READY, b"")
        yield channel
        served.join(60.0)
    assert not served.is_alive()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (0, b""),
        (99, b""),
        (Kind.READY, b""),
        (Kind.REFUSED, b""),
        (Kind.LOAD, b""),
        (Kind.LOAD, bytes(80)),
        (Kind.ROWS, b"x"),
        (Kind.EVIDENCE, bytes(31)),
        (Kind.ANSWER, b""),
        (Kind.ROWS_READ, b"x"),
        (Kind.STOP, b"x"),
    ],
)
def test_a_command_that_is_none_is_refused_and_the_next_one_answered(loaded, kind, body):
    with serving(loaded[0]) as channel:
        channel.send(kind, body)
        assert channel.receive(LONG) == (Kind.REFUSED, b"")
        channel.send(Kind.ROWS_READ)
        assert channel.receive(LONG) == (Kind.ROWS_READ, bytes(8))
        channel.send(Kind.STOP)
        assert channel.receive(LONG) == (Kind.STOP, b"")


def test_a_frame_too_long_to_be_one_is_refused_and_ends_the_program(loaded):
    with serving(loaded[0]) as channel:
        channel._end.sendall(struct.pack("<II", Kind.ROWS, 2**32 - 1))
        assert channel.receive(LONG) == (Kind.REFUSED, b"")


def test_the_private_key_does_not_pass_the_host(loaded):
    """All bytes of a conversation, held against the key itself and its parts."""
    inside, _ = loaded
    secret, seen = inside._table.private.secret, []
    commands = [(Kind.EVIDENCE, fresh_nonce()), (Kind.ANSWER, b"damaged"), (Kind.ROWS_READ, b"")]
    with serving(inside, seen.append) as channel:
        for kind, body in [*commands, (99, b"unknown"), (Kind.STOP, b"not bare"), (Kind.STOP, b"")]:
            channel.send(kind, body)
            channel.receive()
    transcript = b"".join(seen)
    assert inside._table.private.public in transcript
    assert not any(secret[i : i + 8] in transcript for i in range(25))
