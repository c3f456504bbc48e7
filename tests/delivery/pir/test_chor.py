"""What is special to retrieval by random sets: two sets that differ in the key's row alone."""

import numpy as np
import pytest

from keyhole.crypto.prg import Prg
from keyhole.delivery.pir.messages import FRAME_BYTES, seal
from keyhole.delivery.pir.two_server import params_of
from keyhole.errors import MalformedError
from tests.delivery.pir.chor import ChorClient, chor_servers, query_bytes, reply_bytes
from tests.delivery.pir.mutations import rows_of
from tests.delivery.pir.schemes import database_of, records_of, seeded, table_of

HEAD_BYTES = FRAME_BYTES - 16
NONCE_BYTES = 16


def sets_of(message, params):
    """The sets that a server gets, (max_keys, K) bits; spare bits must be zero."""
    body = np.frombuffer(message[HEAD_BYTES + NONCE_BYTES : -16], np.uint8)
    bits = np.unpackbits(body.reshape(params.max_keys, -1), axis=1, bitorder="little")
    assert not bits[:, params.num_keys :].any()
    return bits[:, : params.num_keys]


@pytest.mark.parametrize("num_keys", [1, 7, 8, 9, 100])
def test_both_sets_of_a_query_differ_in_the_row_of_its_key_alone(num_keys):
    params = params_of(database_of(records_of(num_keys, 4), 5))
    keys = np.arange(params.max_keys)
    one, other = (sets_of(m, params) for m in ChorClient(params).query(keys).messages())
    np.testing.assert_array_equal(one ^ other, np.eye(num_keys, dtype=np.uint8)[keys])


def test_padding_looks_like_any_other_query():
    """Without keys, both sets of every query differ in one row, and over 300 questions in all."""
    params, prg = params_of(database_of(records_of(9, 4), 3)), seeded(1)
    differ = []
    for _ in range(300):
        question = ChorClient(params).query(np.empty(0, np.int64), prg)
        one, other = (sets_of(m, params) for m in question.messages())
        differ.append(one ^ other)
    differ = np.concatenate(differ)
    assert (differ.sum(axis=1) == 1).all()
    # 900 draws of 9 rows: 100 each, standard deviation 9.4; within five of them.
    assert np.abs(differ.sum(axis=0) - 100.0).max() < 47


@pytest.mark.parametrize("server", [0, 1])
def test_a_set_alone_is_uniform_whatever_the_key(server):
    """2,000 questions for key 0: every row is in half of the sets, within five standard
    deviations."""
    params, prg = params_of(database_of(records_of(9, 4), 1)), seeded(2)
    asker, counts = ChorClient(params), np.zeros(9)
    for _ in range(2000):
        counts += sets_of(asker.query(np.array([0]), prg).messages()[server], params)[0]
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(2000) / 2


@pytest.mark.parametrize(("num_keys", "max_keys"), [(1, 1), (9, 9), (1000, 3)])
def test_lengths_grow_with_the_table(num_keys, max_keys):
    params = params_of(database_of(records_of(num_keys, 4), max_keys))
    assert query_bytes(params) == FRAME_BYTES + 16 + max_keys * -(-num_keys // 8)
    assert reply_bytes(params) == FRAME_BYTES + 16 + max_keys * 4


@pytest.mark.parametrize("bit", [1, 7])
def test_a_set_with_rows_behind_the_last_is_refused(bit):
    database = database_of(records_of(9, 4), 1)
    params = params_of(database)
    body = bytes(NONCE_BYTES) + bytes([0, 1 << bit])
    with pytest.raises(MalformedError, match="spare bits"):
        chor_servers(database)[0].answer([seal("query", params, 0, body)])


def test_the_set_of_one_row_is_answered_with_that_row():
    """The definition by hand: server 0 gets the set {8}, server 1 the empty set."""
    database = database_of(records_of(9, 4), 1)
    params = params_of(database)
    replies = [
        server.answer([seal("query", params, i, bytes(17) + last)])[0]
        for i, (server, last) in enumerate(
            zip(chor_servers(database), [b"\x01", b"\x00"], strict=True)
        )
    ]
    rows = [rows_of(reply) for reply in replies]
    assert rows[0] == database.rows[8].tobytes()[:4]
    assert rows[1] == bytes(4)


def test_two_server_retrieval_finds_what_random_sets_find():
    """This scheme is what the other is tested against."""
    keys = Prg(bytes(16)).below(20_000, 12)
    table = table_of("two-server", 20_000, 6, 12)
    database = database_of(table.records, 12)
    question = ChorClient(params_of(database)).query(keys)
    replies = [
        server.answer([message])[0]
        for server, message in zip(chor_servers(database), question.messages(), strict=True)
    ]
    expected, found = table.open(question, keys, replies), table.retrieve(keys)
    np.testing.assert_array_equal(found.records, expected.records)
    np.testing.assert_array_equal(found.is_found, expected.is_found)
