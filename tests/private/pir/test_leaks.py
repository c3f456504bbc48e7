"""What a server sees does not tell keys apart, for every scheme.

Work is counted, never timed: the lines that a server executes and the shapes of what it works on
are the same for all keys. Messages are then put to a linear distinguisher, and so is what a server
expands them to. That finds bugs and proves nothing; planted leaks show that it would find one.
"""

import sys

import numpy as np
import pytest

from keyhole.private.pir import two_server
from keyhole.private.pir.batch import Batch
from tests.helpers import ROOT
from tests.private.pir.distinguisher import bits_of, compare
from tests.private.pir.mutations import body_of
from tests.private.pir.schemes import SCHEMES, seeded, table_of

scheme = pytest.mark.parametrize("scheme", SCHEMES)
PRIVATE = str(ROOT / "src" / "keyhole" / "private")

SHAPE = (21, 3, 2)
WORLDS = {
    "the first key or the last": ([0], [20]),
    "no key or as many as there may be": ([], [3, 17]),
}
worlds = pytest.mark.parametrize("world", WORLDS)


# Counted


def work_of(server, message):
    """Every line of `private/` that a server executes for a query, in order, and the shape of every
    array that one function hands to the next."""
    lines = []

    def watch(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(PRIVATE):
            return None
        held = frame.f_locals if event == "call" else {}
        shapes = [value.shape for value in held.values() if isinstance(value, np.ndarray)]
        lines.append((event, code.co_filename, frame.f_lineno, *shapes))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        server.answer_many([message])
    finally:
        sys.settrace(before)
    return lines


@scheme
@pytest.mark.parametrize("shape", [SHAPE, (1500, 3, 110)], ids=str)
def test_a_server_does_the_same_work_in_the_same_order_for_all_keys(scheme, shape):
    table = table_of(scheme, *shape)
    num_keys, _, most_keys = shape
    table.retrieve([0])  # what is worked out once, on first use
    asked = [[], [0], [num_keys - 1], [5] * 9, range(most_keys), seeded(0).permutation(2)]
    questions = [table.ask(keys).messages() for keys in asked]
    for number, server in enumerate(table.servers):
        work = [work_of(server, messages[number]) for messages in questions]
        assert len(work[0]) > 20
        assert all(lines == work[0] for lines in work)


def test_another_line_of_work_would_be_seen():
    """The counting above can fail: a server that has another shape to scan does other work."""
    tables = [table_of("two-server", 21, 3, most_keys) for most_keys in (2, 3)]
    for table in tables:
        table.retrieve([0])
    works = [work_of(table.servers[0], table.ask([0]).messages()[0]) for table in tables]
    assert works[0] != works[1]


# Told apart


def bodies_of(table, keys, count, first_seed):
    """The bodies of many queries for the same keys, one list for each server."""
    asked = (table.ask(keys, seeded(first_seed + i)).messages() for i in range(count))
    return [[body_of(message) for message in many] for many in zip(*asked, strict=True)]


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
    table = table_of(scheme, *SHAPE)
    zeros = sorted(SCHEMES[scheme].zero_bits(table.terms))
    one, other = WORLDS[world]
    for first, second in zip(
        bodies_of(table, one, 700, 0), bodies_of(table, other, 700, 10**6), strict=True
    ):
        assert_alike(bits_of(first), bits_of(second), zeros)


def shares_of(monkeypatch, table, keys, count, first_seed):
    """The rows that each of two servers visits, as bits, for many queries for the same keys."""
    taken = []

    def take(scan):
        def taking(*args):
            taken.append(args[-1].reshape(1, -1))
            return scan(*args)

        return taking

    monkeypatch.setattr(two_server, "scan_rows", take(two_server.scan_rows))
    monkeypatch.setattr(two_server, "scan_buckets", take(two_server.scan_buckets))
    by_server = []
    asked = [table.ask(keys, seeded(first_seed + i)).messages() for i in range(count)]
    for number, server in enumerate(table.servers):
        taken.clear()
        for messages in asked:
            server.answer_many([messages[number]])
        whole = np.concatenate(taken, axis=1).reshape(count, -1)
        by_server.append(np.unpackbits(whole, axis=1, bitorder="little"))
    monkeypatch.undo()
    return by_server


@worlds
def test_no_server_can_tell_keys_apart_by_the_rows_it_visits(monkeypatch, world):
    """The two-server scheme sends short keys for what is then scanned: each row is visited by half
    of all queries, whatever was asked for."""
    table = table_of("two-server", *SHAPE)
    spare = [at for at in range(2 * 24) if at % 24 >= 21]  # behind row 20, in the last byte
    one, other = WORLDS[world]
    both = (
        shares_of(monkeypatch, table, one, 700, 0),
        shares_of(monkeypatch, table, other, 700, 10**6),
    )
    for first, second in zip(*both, strict=True):
        assert_alike(first, second, spare)


@pytest.mark.slow
@scheme
@worlds
def test_many_more_queries_do_not_help_to_tell_keys_apart(scheme, world):
    table = table_of(scheme, *SHAPE)
    zeros = sorted(SCHEMES[scheme].zero_bits(table.terms))
    one, other = WORLDS[world]
    for first, second in zip(
        bodies_of(table, one, 6000, 0), bodies_of(table, other, 6000, 10**6), strict=True
    ):
        assert_alike(bits_of(first), bits_of(second), zeros)


@pytest.mark.slow
def test_no_server_can_tell_keys_apart_by_the_buckets_of_a_query():
    table = table_of("two-server", 14000, 1, 16)
    assert Batch.of(table.terms).shape.num_buckets > 0
    zeros = sorted(SCHEMES["two-server"].zero_bits(table.terms))
    asked = [], range(16), range(13984, 14000)
    found = [bodies_of(table, keys, 1000, 10**6 * i) for i, keys in enumerate(asked)]
    for none, low, high in zip(*found, strict=True):
        assert_alike(bits_of(none), bits_of(low), zeros)
        assert_alike(bits_of(low), bits_of(high), zeros)


# Planted leaks: the same function must find them


@pytest.fixture(scope="module")
def alike():
    """Bits of queries of two worlds, before anything is planted."""
    table = table_of("two-server", *SHAPE)
    return tuple(
        bits_of(bodies_of(table, keys, 700, seed)[0]) for keys, seed in (([0], 0), ([20], 10**6))
    )


@pytest.mark.parametrize("at", [0, 130, 300], ids=lambda at: f"bit {at}")
def test_one_planted_bit_is_caught(alike, at):
    first, second = (bits.copy() for bits in alike)
    second[:, at] = 1
    found = compare(first, second)
    assert found.guessed > 10
    assert found.uneven == [at]


def test_one_bit_that_follows_the_key_half_of_the_time_is_caught(alike):
    first, second = (bits.copy() for bits in alike)
    first[::2, 200], second[::2, 200] = 0, 1
    found = compare(first, second)
    assert found.guessed > 6
    assert found.uneven == [200]


def test_one_biased_byte_is_caught(alike):
    """A byte whose bits are set 5 times in 8 for one of the keys."""
    first, second = (bits.copy() for bits in alike)
    second[:, 64:72] |= second[:, 72:80] & second[:, 80:88]
    found = compare(first, second)
    assert found.tells_apart
    assert found.uneven
    assert set(found.uneven) <= set(range(64, 72))


def test_a_byte_that_is_biased_for_all_keys_is_caught(alike):
    first, second = (bits.copy() for bits in alike)
    for bits in (first, second):
        bits[:, 64:72] |= bits[:, 72:80] & bits[:, 80:88]
    found = compare(first, second)
    assert found.biased == list(range(64, 72))


def test_messages_that_are_alike_are_called_so(alike):
    found = compare(*alike)
    assert not found.tells_apart
    assert found.biased == []
