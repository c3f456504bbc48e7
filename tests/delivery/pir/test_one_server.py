"""Retrieval from one server: everything that is not the contract of all schemes, which
`test_contract.py` and `test_bad_messages.py` hold."""

from dataclasses import replace
from hashlib import sha256
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.bits import pack_bits, unpack_bits
from keyhole.crypto.ntt import transform_of
from keyhole.crypto.prg import Prg
from keyhole.delivery.pir import lattice
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.messages import FRAME_BYTES, seal
from keyhole.delivery.pir.one_server import OneServerClient, OneServerPir, server_of
from keyhole.delivery.pir.shape import HINT_HEAD_BYTES, PRIMES, RingShape, shape_of
from keyhole.delivery.pir.slots import Slots
from keyhole.errors import MalformedError, ReplayError, StaleError
from tests.delivery.pir.mutations import bit_flips, body_of, flipped, rows_of, with_rows
from tests.delivery.pir.schemes import database_of, records_of, seeded, table_of

ONE_SLICE = (9, 4, 2)  # num_keys, record_bytes, max_keys
SEVERAL = (1003, 17, 200)  # three pieces a slice, in three buckets each


def drawn(num_keys, record_bytes, max_keys, name=b"slices"):
    """A database of random records: without paths, since its tables are small."""
    return database_of(records_of(num_keys, record_bytes, name), max_keys)


def parties(num_keys, record_bytes, max_keys):
    server = server_of(drawn(num_keys, record_bytes, max_keys))
    records = records_of(num_keys, record_bytes)
    return records, server, OneServerClient(terms_of(server), server.hint)


def terms_of(server):
    return PirParams.decode(server.params)


@pytest.fixture(scope="module")
def one_slice():
    return parties(*ONE_SLICE)


@pytest.fixture(scope="module")
def several():
    return parties(*SEVERAL)


def retrieve(server, asker, keys):
    question = asker.query(np.array(keys, np.int64))
    return question.decode(server.answer(question.messages())).records


# What is retrieved


@pytest.mark.parametrize(
    ("num_keys", "record_bytes", "max_keys"),
    [(1, 1, 1), (2, 3, 1), ONE_SLICE, (130, 5, 64), (2050, 1, 1700), (3001, 66, 300), SEVERAL],
)
def test_every_key_of_a_table_is_decoded(num_keys, record_bytes, max_keys):
    records, server, asker = parties(num_keys, record_bytes, max_keys)
    for start in range(0, num_keys, max_keys):
        keys = np.arange(start, min(start + max_keys, num_keys))
        np.testing.assert_array_equal(retrieve(server, asker, keys), records[keys])


def test_the_shapes_of_these_tests_have_all_that_shapes_can_have():
    shapes = [shape_of(*numbers) for numbers in ((1, 1, 1), (2050, 1, 1700), (3001, 66, 300))]
    assert [shape.hashes for shape in shapes] == [1, 1, 3]
    assert [shape.groups for shape in shapes] == [1, 2, 1]
    assert [shape.rank for shape in shapes] == [8, 1, 2]
    assert [shape.pieces for shape in shapes] == [1, 1, 2]


@given(st.lists(st.integers(0, SEVERAL[0] - 1), max_size=40))
def test_any_keys_in_any_order_with_repeats_are_the_rows_of_the_table(several, keys):
    records, server, asker = several
    np.testing.assert_array_equal(retrieve(server, asker, keys), records[keys])


def test_queries_of_many_clients_are_answered_together_as_alone(several):
    records, server, asker = several
    wanted = [np.array([1, 1002]), np.array([7]), np.array([], np.int64)]
    wanted += [np.array([key]) for key in range(4)]  # more keys than one pass takes
    questions = [asker.query(keys) for keys in wanted]
    replies = server.answer([question.messages()[0] for question in questions])
    for keys, question, reply in zip(wanted, questions, replies, strict=True):
        np.testing.assert_array_equal(question.decode([reply]).records, records[keys])
    assert server.answer([]) == []


@pytest.mark.parametrize("fill", [0, 255])
def test_a_table_of_one_byte_is_decoded(fill):
    records = np.full((4096, 8), fill, np.uint8)
    server = server_of(database_of(records, 4))
    asker = OneServerClient(terms_of(server), server.hint)
    np.testing.assert_array_equal(retrieve(server, asker, [4095, 0, 17]), records[:3])


def test_a_key_that_found_no_place_is_left_out_and_its_like_are_not(monkeypatch):
    """It happens so rarely that it is made to happen."""
    table = table_of("one-server", 300, 9, 5)
    assign = Slots.assign

    def without_first(self, keys):
        buckets, positions = assign(self, keys)
        buckets[0] = -1
        return buckets, positions

    monkeypatch.setattr(Slots, "assign", without_first)
    found = table.retrieve([4, 299, 17])  # in a query keys are sorted: 4 is the first
    assert (found.is_found.tolist(), found.wrong) == ([False, True, True], 0)
    np.testing.assert_array_equal(found.records[1:], table.records[[299, 17]])


# What is sent


def test_lengths_follow_from_the_terms_alone(several):
    _, server, asker = several
    lengths = set()
    for keys in ([], [0], [1002] * 500, list(range(200)), list(range(803, 1003))):
        question = asker.query(np.array(keys, np.int64))
        (message,) = question.messages()
        (reply,) = server.answer([message])
        lengths.add((len(message), len(reply)))
    stated = OneServerPir().lengths(server.params)
    assert lengths == {(stated.query, stated.reply)}
    assert len(server.hint) == stated.hint


def test_lengths_are_those_of_the_formula():
    """72 + 54/8 P N, 88 + 23/8 C N and 40 + 31/8 C N for K = 10^5, rows of 2,208 bytes and 1,000
    keys."""
    shape = shape_of(100_000, 2208, 1000)
    assert (shape.degree, shape.positions, shape.chunks) == (2048, 147, 884)
    assert FRAME_BYTES == 72
    assert shape.query_bytes == 72 + 147 * 2048 * 54 // 8
    assert shape.reply_bytes == 72 + 16 + 884 * 2048 * 23 // 8
    assert shape.hint_bytes == 40 + 884 * 2048 * 31 // 8


def test_no_two_queries_share_a_number(several):
    """Each has a secret of its own, for the same key as well: numbers modulo 2^27 that two have in
    common are chance."""
    _, server, asker = several
    count = RingShape.of(terms_of(server)).question_numbers
    bodies = [memoryview(body_of(asker.query(np.array([5])).messages()[0])) for _ in range(2)]
    first, second = (unpack_bits(body, 2 * count, 27) for body in bodies)
    assert np.count_nonzero(first == second) <= 3


def deviation(numbers, prime):
    """By how many standard deviations the chi-square of 256 bins is off for uniform residues."""
    counts = np.bincount((numbers.reshape(-1) * np.uint64(256) // np.uint64(prime)).astype(int))
    edges = -(-np.arange(257) * prime // 256)
    expected = numbers.size * np.diff(edges) / prime
    square = ((np.pad(counts, (0, 256 - len(counts))) - expected) ** 2 / expected).sum()
    return (square - 255) / sqrt(2 * 255)


def deviations(asker, keys, seeds):
    """Of the values that a query holds modulo each prime, and of their coefficients."""
    shape, found = RingShape.of(asker.params), []
    bodies = [body_of(asker.query(np.array(keys), seeded(n)).messages()[0]) for n in seeds]
    sent = np.stack([unpack_bits(each, shape.question_numbers, 54) for each in bodies])
    for at, prime in enumerate(PRIMES):
        values = (sent >> np.uint64(27 * at)) & np.uint64((1 << 27) - 1)
        assert values.max() < prime
        columns = values.astype(np.uint32).reshape(-1, shape.degree, 1)
        coefficients = transform_of(shape.degree, prime).inverse(columns).astype(np.uint64)
        found += [deviation(values, prime), deviation(coefficients, prime)]
    return found


@pytest.fixture(scope="module")
def sparse():
    """A client whose plaintexts are zero at nearly all positions: only secrets hide that."""
    return parties(3000, 5, 2)[2]


@pytest.mark.parametrize("keys", [[], [0], [5, 2999]], ids=["none", "one", "all"])
def test_what_a_query_holds_is_uniform_by_chi_square(sparse, keys):
    assert all(abs(each) < 5 for each in deviations(sparse, keys, range(20)))


@pytest.mark.parametrize("planted", ["no secret", "no secret and no errors", "one in a hundred"])
def test_what_is_not_uniform_is_found_by_chi_square(sparse, monkeypatch, planted):
    draw, pack = lattice.draw_gaussian, lattice.pack_bits

    def draw_some(prg, sigma, shape):
        is_error = len(shape) > 2  # a secret is (rank, N)
        return draw(prg, sigma, shape) * (is_error and planted == "no secret")

    def pack_others(numbers, bits):
        return pack(np.where(np.arange(len(numbers)) % 100, numbers, 7), bits)

    if planted == "one in a hundred":
        monkeypatch.setattr(lattice, "pack_bits", pack_others)
    else:
        monkeypatch.setattr(lattice, "draw_gaussian", draw_some)
    assert max(map(abs, deviations(sparse, [1, 2], range(20)))) > 20


def test_a_source_of_secrets_that_is_used_twice_would_be_seen(several):
    """What shows that the test above can fail: two queries with one secret and one error have all
    but what depends on keys in common, and their difference, no noise in it, shows keys."""
    _, server, asker = several
    shape, bodies = RingShape.of(terms_of(server)), []
    for key in (5, 900):
        (message,) = asker.query(np.array([key]), Prg(bytes(16))).messages()
        bodies.append(memoryview(body_of(message)))
    first, second = (unpack_bits(body, 2 * shape.question_numbers, 27) for body in bodies)
    assert np.count_nonzero(first == second) > shape.question_numbers // 4


def test_a_question_is_for_one_use(one_slice):
    _, server, asker = one_slice
    question = asker.query(np.array([3]))
    replies = server.answer(question.messages())
    with pytest.raises(ReplayError):
        question.messages()
    question.decode(replies)
    with pytest.raises(ReplayError):
        question.decode(replies)


def test_nothing_that_is_printed_shows_a_key(one_slice):
    _, _, asker = one_slice
    question = asker.query(np.array([7]))
    assert repr(question) == "PirQuery(max_keys=2, servers=1)"
    assert "7" not in repr(vars(question)["_wanted"])


# The hint


def test_a_hint_says_what_it_is_and_of_what(one_slice):
    _, server, _ = one_slice
    assert server.hint[:8] == b"KHH3\0\0\0\0"
    covered = sha256(server.params + server.hint[HINT_HEAD_BYTES:]).digest()
    assert server.hint[8:HINT_HEAD_BYTES] == covered


def test_a_hint_with_one_flipped_bit_is_refused(one_slice):
    _, server, _ = one_slice
    length = 8 * len(server.hint)
    for at in [*range(8 * HINT_HEAD_BYTES), *range(8 * HINT_HEAD_BYTES, length, 9973), length - 1]:
        with pytest.raises(MalformedError if at < 64 else StaleError):
            OneServerClient(terms_of(server), flipped(server.hint, at))


def test_a_hint_of_another_length_is_refused(one_slice):
    _, server, _ = one_slice
    for hint in (b"", server.hint[:-1], server.hint[4:], server.hint + b"\0", server.hint * 2):
        with pytest.raises(MalformedError):
            OneServerClient(terms_of(server), hint)


def test_a_hint_of_other_slices_is_refused(one_slice):
    _, server, _ = one_slice
    other = server_of(drawn(*ONE_SLICE, name=b"others"))
    with pytest.raises(StaleError):
        OneServerClient(terms_of(server), other.hint)
    assert terms_of(other) != terms_of(server)


def test_terms_and_hint_follow_from_the_table(one_slice):
    _, server, _ = one_slice
    again = server_of(drawn(*ONE_SLICE))
    assert (again.params, again.hint) == (server.params, server.hint)
    assert terms_of(server_of(drawn(*ONE_SLICE[:2], 1000))).max_keys == ONE_SLICE[0]


def test_terms_of_another_scheme_are_refused(one_slice):
    _, server, _ = one_slice
    params = replace(terms_of(server), scheme="two-server")
    with pytest.raises(StaleError):
        OneServerClient(params, server.hint)


# Bad messages


def test_a_truncated_extended_or_changed_query_is_refused_and_not_remembered(one_slice):
    records, server, asker = one_slice
    question = asker.query(np.array([8]))
    (message,) = question.messages()
    shorter = [message[:length] for length in range(len(message))]
    for bad in [*shorter, message + b"\0", message * 2, *bit_flips(message)]:
        with pytest.raises(MalformedError):
            server.answer([bad])
    replies = server.answer([message])
    with pytest.raises(ReplayError):
        server.answer([message])
    np.testing.assert_array_equal(question.decode(replies).records, records[[8]])


def test_a_truncated_extended_or_changed_reply_is_refused_and_the_good_one_opens(one_slice):
    records, server, asker = one_slice
    question = asker.query(np.array([8]))
    (reply,) = server.answer(question.messages())
    bad = [[], [reply, reply], [reply[:-1]], [reply + b"\0"], *([one] for one in bit_flips(reply))]
    for replies in bad:
        with pytest.raises(MalformedError):
            question.decode(replies)
    stale = seal("reply", replace(terms_of(server), root=bytes(32)), 0, body_of(reply))
    with pytest.raises(StaleError):
        question.decode([stale])
    np.testing.assert_array_equal(question.decode([reply]).records, records[[8]])


def altered(reply, shape, bucket):
    """A reply of a server that adds to the first chunk in one bucket: the polynomial that has the
    change in this slot alone, scaled up as the reply is."""
    slots = np.zeros((shape.degree, 1), np.uint32)
    slots[bucket] = 1
    plain = transform_of(shape.degree, shape.modulus).inverse(slots)[:, 0].astype(np.uint64)
    added = plain * np.uint64(1 << shape.reply_bits) // np.uint64(shape.modulus)
    numbers = unpack_bits(memoryview(rows_of(reply)), shape.reply_numbers, shape.reply_bits)
    form = numbers.reshape(shape.degree, shape.chunks)
    form[:, 0] = (form[:, 0] + added) & np.uint64((1 << shape.reply_bits) - 1)
    return with_rows(reply, pack_bits(numbers, shape.reply_bits))


def test_a_slice_that_a_server_changes_is_left_out_and_no_other():
    """In each bucket in turn: those that hold a piece of the two keys spoil one slice, all others
    nothing, and the client goes on alike."""
    table = table_of("one-server", 300, 9, 5)
    shape = RingShape.of(table.params)
    (reply,) = table.replies(table.query([4, 299], seeded(0)).messages())
    spoiled = []
    for bucket in range(shape.buckets):
        question = table.query([4, 299], seeded(0))
        found = table.open(question, [4, 299], [altered(reply, shape, bucket)])
        spoiled.append(found.wrong)
    assert (max(spoiled), sum(spoiled)) == (1, 2 * shape.pieces)


def test_rows_with_paths_come_back_and_lead_to_the_root():
    table = table_of("one-server", 5000, 3, 2)
    assert table.params.row_bytes == 3 + 32
    found = table.retrieve([4999, 7])
    assert found.is_found.all()
    np.testing.assert_array_equal(found.records, table.records[[4999, 7]])
