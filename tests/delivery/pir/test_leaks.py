"""What a server sees does not tell keys apart, for every scheme.

Work is counted, never timed: the lines that a server executes and the shapes of what it works on
are the same for all keys. Messages are then put to a linear distinguisher, and so is what a server
expands them to. That finds bugs and proves nothing; planted leaks show that it would find one.
"""

import sys
from functools import cache, partial

import numpy as np
import pytest

from keyhole.delivery.pir import scan as xor_scan
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.two_server import Batch
from tests.delivery.pir.distinguisher import MAX_SD, bits_of, compare, work_of
from tests.delivery.pir.mutations import body_of
from tests.delivery.pir.schemes import BATCHED, PAIRS, SCHEMES, seeded, small_table_of, table_of

scheme = pytest.mark.parametrize("scheme", SCHEMES)

QUERIES = 400  # of each kind
SHAPE = (3, 2)  # bytes of a record, keys of a query
WORLDS = {
    "the first key or the last": ([0], [-1]),
    "no key or as many as there may be": ([], [3, 17]),
}
worlds = pytest.mark.parametrize("world", WORLDS)


# Counted


def work_of_server(server, message):
    """What a server does with a query."""
    return work_of(lambda: server.answer([message]), "crypto", "delivery")


@scheme
@pytest.mark.parametrize("shape", [(21, 3, 2), BATCHED], ids=str)
def test_a_server_does_the_same_work_in_the_same_order_for_all_keys(scheme, shape):
    table = table_of(scheme, *shape)
    num_keys, _, max_keys = shape
    table.retrieve([0])  # what is worked out once, on first use
    asked = [[], [0], [num_keys - 1], [5] * 9, range(max_keys), seeded(0).permutation(2)]
    questions = [table.query(keys).messages() for keys in asked]
    for number, server in enumerate(table.servers):
        work = [work_of_server(server, messages[number]) for messages in questions]
        assert len(work[0]) > 20
        assert all(lines == work[0] for lines in work)


def test_another_line_of_work_would_be_seen():
    """The counting above can fail: a server that has another shape to scan does other work."""
    tables = [table_of("two-server", 21, 3, max_keys) for max_keys in (2, 3)]
    for table in tables:
        table.retrieve([0])
    works = [work_of_server(table.servers[0], table.query([0]).messages()[0]) for table in tables]
    assert works[0] != works[1]


def visits_of(monkeypatch, scheme, server, queries):
    """How often each row is read while queries are answered together."""
    visits = np.zeros(PirParams.decode(server.params).num_keys, np.int64)
    module = sys.modules[type(SCHEMES[scheme].delivery).__module__]
    for name in ("scan_rows", "scan_buckets"):
        counting = partial(getattr(xor_scan, name), visits=visits)
        monkeypatch.setattr(xor_scan, name, counting)
        if hasattr(module, name):
            monkeypatch.setattr(module, name, counting)
    server.answer(queries)
    monkeypatch.undo()
    return visits


@pytest.mark.parametrize("scheme", PAIRS)
@pytest.mark.parametrize("shape", [(21, 3, 5), BATCHED], ids=str)
def test_a_pass_over_several_queries_reads_every_row_as_often_for_all_keys(
    scheme, shape, monkeypatch
):
    table = table_of(scheme, *shape)
    kinds = [], [0], [shape[0] - 1], range(shape[2])
    for number, server in enumerate(table.servers):
        seen = []
        for keys in kinds:
            queries = [table.query(keys).messages()[number] for _ in range(5)]
            seen.append(visits_of(monkeypatch, scheme, server, queries))
        assert seen[0].min() > 0
        for visits in seen:
            np.testing.assert_array_equal(visits, seen[0])


@pytest.mark.parametrize("scheme", PAIRS)
def test_a_pass_over_one_query_reads_what_its_share_selects_and_nothing_else(scheme, monkeypatch):
    """Half of the rows, as if a coin were thrown for each: 500 rows with a deviation of 16."""
    table = table_of(scheme, 1001, 3, 1)
    for seed, keys in enumerate(([], [0], [1000])):
        messages = table.query(keys, seeded(seed)).messages()
        both = [
            visits_of(monkeypatch, scheme, server, [message])
            for server, message in zip(table.servers, messages, strict=True)
        ]
        for visits in both:
            assert set(visits) == {0, 1}
            assert abs(visits.sum() - 500.5) < 4.5 * 15.9
        # The servers read the same rows, but for that of the key.
        (differs,) = np.flatnonzero(both[0] != both[1])
        assert [differs] == keys or not keys


# Told apart


def queries_of(table, keys, count, first_seed):
    """Many queries for the same keys, one list for each server."""
    asked = (table.query(keys, seeded(first_seed + i)).messages() for i in range(count))
    return [list(queries) for queries in zip(*asked, strict=True)]


@cache
def worlds_of(scheme, world, count):
    """The queries of two kinds of clients, for each server, and the bits that are always zero."""
    table = small_table_of(scheme, *SHAPE)
    # -1 is the last key of a table.
    kinds = [np.array(keys, np.int64) % table.params.num_keys for keys in WORLDS[world]]
    queries = [queries_of(table, keys, count, 10**6 * i) for i, keys in enumerate(kinds)]
    return list(zip(*queries, strict=True)), sorted(SCHEMES[scheme].zero_bits(table.params))


def bits_of_bodies(queries):
    return bits_of([body_of(query) for query in queries])


def assert_alike(first, second, zeros):
    found = compare(first, second)
    assert not found.tells_apart, f"{found.guessed:.1f} sd, bits {found.uneven}"
    assert found.biased == []
    # Every bit that never changes is one that the layout says is always zero.
    assert found.constant == zeros
    assert not first[:, zeros].any()


@scheme
@worlds
def test_no_server_can_tell_keys_apart_by_the_bits_of_a_query(scheme, world):
    queries, zeros = worlds_of(scheme, world, QUERIES)
    for first, second in queries:
        assert_alike(bits_of_bodies(first), bits_of_bodies(second), zeros)


def rows_visited(monkeypatch, server, queries):
    """The rows that a server of the two-server scheme visits for each query, as bits."""
    taken = []
    for name in ("scan_rows", "scan_buckets"):
        monkeypatch.setattr(xor_scan, name, taking(getattr(xor_scan, name), taken))
    server.answer(queries)
    monkeypatch.undo()
    shares = np.concatenate([bits.reshape(len(queries), -1) for bits in taken], axis=1)
    return np.unpackbits(shares, axis=1, bitorder="little")


def taking(scan, taken):
    """A scan that also keeps the bits which select its rows."""

    def scan_and_take(*args):
        taken.append(args[-1])
        return scan(*args)

    return scan_and_take


@worlds
def test_no_server_can_tell_keys_apart_by_the_rows_it_visits(monkeypatch, world):
    """The two-server scheme sends short keys for what is then scanned: each row is visited by half
    of all queries, whatever was asked for."""
    table = small_table_of("two-server", *SHAPE)
    spare = [at for at in range(2 * 1008) if at % 1008 >= 1001]  # behind the last row of each
    queries, _ = worlds_of("two-server", world, QUERIES)
    for server, both in zip(table.servers, queries, strict=True):
        first, second = (rows_visited(monkeypatch, server, some) for some in both)
        assert_alike(first, second, spare)


@pytest.mark.slow
@scheme
@worlds
def test_many_more_queries_do_not_help_to_tell_keys_apart(scheme, world):
    queries, zeros = worlds_of(scheme, world, 4000)
    worlds_of.cache_clear()
    for first, second in queries:
        assert_alike(bits_of_bodies(first), bits_of_bodies(second), zeros)


@pytest.mark.slow
def test_no_server_can_tell_keys_apart_by_the_buckets_of_a_query(monkeypatch):
    table = table_of("two-server", 14000, 1, 33)
    assert Batch.of(table.params).shape.num_buckets > 0
    zeros = sorted(SCHEMES["two-server"].zero_bits(table.params))
    kinds = [], range(16), range(13984, 14000)
    found = [queries_of(table, keys, 1000, 10**6 * i) for i, keys in enumerate(kinds)]
    for server, none, low, high in zip(table.servers, *found, strict=True):
        assert_alike(bits_of_bodies(none), bits_of_bodies(low), zeros)
        assert_alike(bits_of_bodies(low), bits_of_bodies(high), zeros)
        visited = [rows_visited(monkeypatch, server, some)[:, ::31] for some in (low, high)]
        assert not compare(*visited).tells_apart


# Planted leaks: the same function must find them


@pytest.fixture(scope="module")
def alike():
    """Bits of queries of two worlds, before anything is planted."""
    queries, _ = worlds_of("two-server", "the first key or the last", QUERIES)
    return tuple(bits_of_bodies(some) for some in queries[0])


@pytest.mark.parametrize("at", [0, 130, 600], ids=lambda at: f"bit {at}")
def test_one_planted_bit_is_caught(alike, at):
    first, second = (bits.copy() for bits in alike)
    second[:, at] = 1
    found = compare(first, second)
    assert found.guessed > MAX_SD
    assert found.uneven == [at]


def test_one_bit_that_follows_the_key_half_of_the_time_is_caught(alike):
    first, second = (bits.copy() for bits in alike)
    first[: len(first) // 2, 200], second[: len(first) // 2, 200] = 0, 1
    found = compare(first, second)
    assert found.guessed > MAX_SD
    assert found.uneven == [200]


def test_one_biased_byte_is_caught(alike):
    """A byte whose bits are set 3 times in 4 for one of the keys: 7 deviations of a frequency."""
    first, second = (bits.copy() for bits in alike)
    second[:, 64:72] |= second[:, 72:80]
    found = compare(first, second)
    assert found.guessed > MAX_SD
    assert found.uneven
    assert set(found.uneven) <= set(range(64, 72))


def test_a_byte_that_is_biased_for_all_keys_is_caught(alike):
    first, second = (bits.copy() for bits in alike)
    for bits in (first, second):
        bits[:, 64:72] |= bits[:, 72:80]
    found = compare(first, second)
    assert found.biased == list(range(64, 72))


def test_messages_that_are_alike_are_called_so(alike):
    found = compare(*alike)
    assert not found.tells_apart
    assert found.biased == []
