"""What is special to retrieval by point functions: buckets, the stash, and keys without a place."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.crypto.prg import Prg
from keyhole.delivery.base import Lengths
from keyhole.delivery.pir.database import params_of_load
from keyhole.delivery.pir.messages import FRAME_BYTES, check_of
from keyhole.delivery.pir.two_server import (
    Batch,
    TwoServerClient,
    TwoServerPir,
    params_of,
    servers_of,
)
from keyhole.errors import InputError, ReplayError
from keyhole.pricing import Workload
from tests.delivery.pir.mutations import rows_of, with_rows
from tests.delivery.pir.schemes import database_of, records_of, seeded, table_of

NUM_KEYS, MAX_KEYS = 40_000, 40  # a table with buckets
HEAD_BYTES = FRAME_BYTES - 16


@pytest.fixture(scope="module")
def table():
    return table_of("two-server", NUM_KEYS, 11, MAX_KEYS)


@pytest.fixture(scope="module")
def crowd(table):
    """40 keys that lie in the same few buckets: those that share the first key's bucket or the
    next one in all three sub-tables."""
    placement = Batch.of(table.params).placement
    buckets = placement.buckets_of(np.arange(NUM_KEYS))
    near = np.isin(buckets, [buckets[0], buckets[0] + 1])
    keys = np.flatnonzero(near.all(axis=1))[:MAX_KEYS]
    assert len(keys) == MAX_KEYS
    return keys


def room_for(table, keys):
    """How many of these keys can be placed at all: their buckets, and the stash."""
    batch = Batch.of(table.params)
    return len(np.unique(batch.placement.buckets_of(keys))) + batch.shape.stash


def test_keys_that_find_no_place_are_reported_and_the_others_come_back(table, crowd):
    found = table.retrieve(crowd)
    assert 0 < found.is_found.sum() == room_for(table, crowd) < MAX_KEYS
    np.testing.assert_array_equal(
        found.records[found.is_found], table.records[crowd[found.is_found]]
    )
    assert not found.records[~found.is_found].any()


def test_a_repeated_key_without_a_place_is_missing_wherever_it_stands(table, crowd):
    keys = np.concatenate([crowd[::-1], crowd])
    is_found = table.retrieve(keys, seeded(1)).is_found
    np.testing.assert_array_equal(is_found[:MAX_KEYS][::-1], is_found[MAX_KEYS:])
    assert not is_found.all()


def test_keys_without_a_place_do_not_change_the_messages_that_are_sent(table, crowd):
    crowded, spread = (table.query(keys).messages() for keys in (crowd, np.arange(MAX_KEYS)))
    assert [len(message) for message in crowded] == [len(message) for message in spread]
    assert [message[:HEAD_BYTES] for message in crowded] == [m[:HEAD_BYTES] for m in spread]
    for server, message in zip(table.servers, crowded, strict=True):
        assert len(server.answer([message])[0]) == table.reply_bytes


def test_the_stash_takes_keys_that_have_no_bucket(table, crowd):
    batch = Batch.of(table.params)
    points = batch.assign(crowd, seeded(2))
    in_stash = np.flatnonzero(points.slots >= batch.shape.num_buckets)
    assert len(in_stash) == batch.shape.stash
    np.testing.assert_array_equal(
        points.in_stash[points.slots[in_stash] - batch.shape.num_buckets], crowd[in_stash]
    )


def test_the_point_of_a_bucket_is_the_key_that_was_put_there(table):
    batch, keys = Batch.of(table.params), np.arange(0, NUM_KEYS, NUM_KEYS // MAX_KEYS)[:MAX_KEYS]
    points = batch.assign(keys, seeded(3))
    placed = points.slots < batch.shape.num_buckets
    assert placed.sum() > MAX_KEYS // 2
    buckets = points.slots[placed]
    members = batch.placement.members()
    np.testing.assert_array_equal(members[buckets, points.in_buckets[buckets]], keys[placed])
    assert len(np.unique(points.slots)) == len(keys)


def test_queries_that_are_left_get_points_from_the_whole_of_their_domain(table):
    """Of 400 questions for nothing: the mean of all points is the middle of the domain, within five
    standard deviations, and the ends are met."""
    batch, prg = Batch.of(table.params), seeded(4)
    drawn = [batch.assign(np.empty(0, np.int64), prg) for _ in range(400)]
    for points, domain in (
        (np.concatenate([p.in_buckets for p in drawn]), batch.bucket),
        (np.concatenate([p.in_stash for p in drawn]), batch.table),
    ):
        shares = points / domain.num_points
        assert abs(shares.mean() - 0.5) < 5 / np.sqrt(12 * len(shares)) + 1 / domain.num_points
        assert shares.min() < 0.02
        assert shares.max() > 0.98


def test_the_messages_of_one_question_differ_in_server_root_and_check_alone(table):
    one, other = (np.frombuffer(m, np.uint8) for m in table.query([5, 9]).messages())
    differ = np.flatnonzero(one != other)
    root = range(HEAD_BYTES + 16, HEAD_BYTES + 32)
    check = range(len(one) - 16, len(one))
    assert set(differ) <= {5, *root, *check}
    assert len(set(differ) & set(root)) > 8


@pytest.mark.parametrize(("num_keys", "max_keys"), [(1, 1), (7, 1), (7, 7), (400, 400)])
def test_all_keys_of_a_table_can_be_asked_for_at_once(num_keys, max_keys):
    table = table_of("two-server", num_keys, 5, max_keys)
    keys = np.arange(max_keys)[::-1]
    found = table.retrieve(keys)
    assert found.is_found.all()
    np.testing.assert_array_equal(found.records, table.records[keys])


@pytest.mark.parametrize(
    ("num_keys", "max_keys", "query", "reply"),
    [
        # 72 + 32 bytes of head, check, nonce and root; a reply has the check of its query instead
        # of these; a row is 2,048 bytes and a path of 0, 2 or 8 levels.
        (300, 3, 104 + 1 + 3 * (16 + 19), 88 + 3 * 2048),  # no buckets: depth 1, leaves of 19
        (10_000, 100, 104 + 129 * 30 + 2 + 6 * 16 + 20, 88 + 130 * (2048 + 64)),
        (
            1_000_000,
            1000,
            104 + 1156 + 1156 * (4 * 16 + 21) + 3 + 12 * 16 + 31,
            88 + 1157 * (2048 + 256),
        ),
    ],
)
def test_lengths_of_messages_are_as_documented(num_keys, max_keys, query, reply):
    params = params_of_load("two-server", Workload(num_keys, max_keys, 2048, cohort=1))
    assert lengths(params) == Lengths(query, reply)


def altered(reply, table, slot, change):
    """A reply of a lying server: whole, with one row XORed with `change`."""
    rows = np.frombuffer(rows_of(reply), np.uint8).copy()
    rows.reshape(-1, table.params.row_bytes)[slot] ^= change
    return with_rows(reply, rows.tobytes())


def ask_one(table, key):
    """A question for one key, the slot that it is in, and honest replies."""
    batch = Batch.of(table.params)
    question = table.query([key], seeded(6))
    slot = int(batch.assign(np.array([key]), seeded(6)).slots[0])
    return question, slot, table.replies(question.messages())


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("at", [0, 10, 11, 42, 43, 138])
def test_one_changed_bit_of_a_slice_or_its_path_leaves_it_out(server, at):
    table = table_of("two-server", NUM_KEYS, 11, MAX_KEYS)
    assert table.params.row_bytes == 11 + 4 * 32
    question, slot, replies = ask_one(table, 77)
    change = np.zeros(table.params.row_bytes, np.uint8)
    change[at] = 1
    replies[server] = altered(replies[server], table, slot, change)
    found = table.open(question, [77], replies)
    assert (found.is_found.tolist(), found.wrong) == ([False], 1)
    assert not found.records.any()
    assert "77" not in repr(found)


def test_a_server_that_answers_from_another_table_gives_nothing():
    """It states the root of the true table, and scans rows of its own making."""
    table = table_of("two-server", NUM_KEYS, 11, MAX_KEYS)
    true = database_of(table.records, MAX_KEYS)
    other = database_of(records_of(NUM_KEYS, 11, b"others"), MAX_KEYS)
    _, liar = servers_of(replace(true, rows=other.rows))
    assert liar.params == table.params.encode()
    question = table.query([1, 2, 3])
    first, second = question.messages()
    replies = [table.servers[0].answer([first])[0], liar.answer([second])[0]]
    found = table.open(question, [1, 2, 3], replies)
    assert not found.is_found.any()
    assert found.wrong == 3


@pytest.mark.parametrize("keys", [[], [77]], ids=["no key", "one key"])
def test_a_lie_about_a_row_never_raises_whether_it_is_wanted_or_padding(keys):
    table = table_of("two-server", NUM_KEYS, 11, MAX_KEYS)
    change = np.zeros(table.params.row_bytes, np.uint8)
    change[0] = 1
    honest = table.replies(table.query(keys, seeded(6)).messages())
    slots = Batch.of(table.params).assign(np.array(keys, np.int64), seeded(6)).slots
    for slot in range(Batch.of(table.params).num_queries):
        question = table.query(keys, seeded(6))  # made anew: it is for one use
        found = table.open(question, keys, [altered(honest[0], table, slot, change), honest[1]])
        np.testing.assert_array_equal(found.is_found, slots != slot)
    found = table.open(table.query(keys, seeded(6)), keys, honest)
    np.testing.assert_array_equal(found.records, table.records[keys])


def test_every_query_is_for_a_key_of_the_table_padding_included(table):
    """What padding is drawn from: all keys of its bucket, and no empty position."""
    batch, prg = Batch.of(table.params), seeded(5)
    members = batch.placement.members()
    buckets = np.arange(batch.shape.num_buckets)
    assert (members < 0).any()
    met = np.zeros(members.shape, bool)
    for _ in range(400):
        points = batch.assign(np.array([77, 3]), prg)
        drawn = points.keys[: len(buckets)]
        np.testing.assert_array_equal(members[buckets, points.in_buckets], drawn)
        assert ((points.keys >= 0) & (points.keys < NUM_KEYS)).all()
        np.testing.assert_array_equal(points.keys[points.slots], [77, 3])
        met[buckets, points.in_buckets] = True
    assert not met[members < 0].any()
    # 400 draws of some 1,800 keys meet 358 different ones on average; the last of a bucket, behind
    # which there may be an empty position, like the others.
    assert abs(met.sum() / len(buckets) - 358) < 10
    assert met[:, -3:].any(axis=0)[0]


@pytest.mark.parametrize("guess", [77, 78], ids=["right", "wrong"])
def test_a_server_that_guesses_the_key_of_a_query_cannot_forge_its_slice(guess):
    """It puts its own slice in place of the one it thinks is asked for, with the true path."""
    table = table_of("two-server", NUM_KEYS, 11, MAX_KEYS)
    question, slot, replies = ask_one(table, 77)
    rows = database_of(table.records, MAX_KEYS).rows.view(np.uint8)
    change = np.zeros(table.params.row_bytes, np.uint8)
    change[:11] = rows[guess, :11] ^ 66
    replies[1] = altered(replies[1], table, slot, change)
    found = table.open(question, [77], replies)
    assert (found.is_found.tolist(), found.wrong) == ([False], 1)


def test_one_server_alone_does_not_give_the_slice():
    """The XOR of one reply with zeros, or with itself, is no row of the table."""
    table = table_of("two-server", NUM_KEYS, 11, MAX_KEYS)
    question, slot, replies = ask_one(table, 77)
    row = np.frombuffer(rows_of(replies[0]), np.uint8).reshape(-1, table.params.row_bytes)
    assert not (table.records == row[slot, :11]).all(axis=1).any()
    assert repr(question).count("7") == 0


def test_both_servers_state_the_terms_of_their_own_table():
    database, other = (database_of(records_of(9, 4, name), 3) for name in (b"a", b"b"))
    stated = {server.params for server in servers_of(database)}
    assert stated == {params_of(database).encode()} != {params_of(other).encode()}


def test_a_question_needs_fresh_randomness_each_time():
    asker = TwoServerClient(params_of(database_of(records_of(9, 4), 3)))
    prg = Prg(bytes(16))
    seen = {check_of(m) for _ in range(5) for m in asker.query(np.array([1]), prg).messages()}
    assert len(seen) == 10


def lengths(params):
    return TwoServerPir().lengths(params.encode())


def test_a_table_that_is_too_large_for_buckets_is_refused_in_the_words_of_its_terms():
    params = params_of(database_of(records_of(40, 4), 40))
    large = replace(params, num_keys=2**31)
    for refuse in (TwoServerClient, lengths):
        with pytest.raises(InputError, match=r"2147483648 keys, 40 a query.*1\.\.2147483647 keys"):
            refuse(large)
    assert lengths(replace(large, num_keys=2**31 - 1)).query > 0
    assert lengths(replace(large, max_keys=32)).query > 0  # without buckets


def test_a_server_answers_as_many_queries_as_it_is_told():
    database = database_of(records_of(9, 4), 3)
    server, _ = servers_of(database, max_queries=2)
    asker, key = TwoServerClient(params_of(database)), np.array([1])
    server.answer([asker.query(key).messages()[0] for _ in range(2)])
    with pytest.raises(ReplayError, match="2 in all"):
        server.answer([asker.query(key).messages()[0]])
