"""Retrieval from one server: everything that is not the contract of all schemes, which
`test_contract.py` and `test_bad_messages.py` hold."""

from dataclasses import replace
from hashlib import blake2b, sha256

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.lwe import DIMENSION, HINT_HEAD_BYTES, LweShape
from keyhole.delivery.pir.messages import FRAME_BYTES, seal
from keyhole.delivery.pir.one_server import OneServerClient, OneServerPir, server_of
from keyhole.errors import MalformedError, ReplayError, StaleError
from tests.delivery.pir.mutations import bit_flips, body_of, flipped, rows_of, with_rows
from tests.delivery.pir.schemes import ROUND, database_of, records_of, table_of

ONE_SLICE = (9, 4, 2)  # num_keys, record_bytes, max_keys
SEVERAL = (1003, 17, 200)  # three slices a column, and one that is left


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
    [(1, 1, 1), (2, 3, 1), ONE_SLICE, (130, 5, 64), (2050, 1, 400), (3001, 2, 300), SEVERAL],
)
def test_every_key_of_a_table_is_decoded(num_keys, record_bytes, max_keys):
    records, server, asker = parties(num_keys, record_bytes, max_keys)
    for start in range(0, num_keys, max_keys):
        keys = np.arange(start, min(start + max_keys, num_keys))
        np.testing.assert_array_equal(retrieve(server, asker, keys), records[keys])


def test_the_shapes_of_these_tests_have_one_slice_a_column_and_several_that_do_not_divide():
    one, several = LweShape(*ONE_SLICE), LweShape(*SEVERAL)
    assert (one.slices_per_column, one.columns) == (1, 9)
    assert (several.slices_per_column, several.columns) == (3, 335)
    assert several.num_keys % several.slices_per_column == 1


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
def test_a_table_of_the_largest_noise_is_decoded(fill):
    """Every byte is as far from 128 as it can be."""
    records = np.full((4096, 8), fill, np.uint8)
    server = server_of(database_of(records, 4))
    asker = OneServerClient(terms_of(server), server.hint)
    np.testing.assert_array_equal(retrieve(server, asker, [4095, 0, 17]), records[:3])


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
    """72 + 4 m ceil(K / r), 88 + 4 m r n and 40 + 4096 r n."""
    shape = LweShape(num_keys=100_000, row_bytes=2016, max_keys=1000)
    assert shape.slices_per_column == 5
    assert FRAME_BYTES == 72
    assert shape.query_bytes == 72 + 4 * 1000 * 20_000
    assert shape.reply_bytes == 72 + 16 + 4 * 1000 * 5 * 2016
    assert shape.hint_bytes == 40 + 4096 * 5 * 2016


def words_of(message, shape):
    return np.frombuffer(body_of(message), "<u4").reshape(shape.max_keys, shape.columns)


def is_near(one, other):
    """Whether two numbers modulo 2^32 differ by less than errors do: 2^10 is 110 sigma. A pair of
    unrelated numbers does with probability 2^-21."""
    return np.abs((one - other).view(np.int32)) < 2**10


def test_no_two_queries_share_a_secret(several):
    """Queries with one secret differ by errors, and by 2^24 in two columns."""
    _, server, asker = several
    shape = LweShape.of(terms_of(server))
    first, second = (words_of(asker.query(np.array([5])).messages()[0], shape) for _ in range(2))
    for rows in (first[:40], second[:40]):
        for at, row in enumerate(rows):
            assert np.count_nonzero(is_near(rows[at + 1 :], row)) <= 2
    # The same key twice: not a word in common but by chance (200 * 335 words of 32 bits).
    assert np.count_nonzero(first == second) <= 1
    assert np.count_nonzero(is_near(first, second)) <= 3


def test_a_secret_that_is_used_twice_would_be_seen(several):
    """What shows that the test above can fail: two clients with the same source of secrets."""
    _, server, asker = several
    shape = LweShape.of(terms_of(server))
    first, second = (
        words_of(asker.query(np.array([key]), Prg(bytes(16))).messages()[0], shape)
        for key in (5, 900)
    )
    assert np.count_nonzero(is_near(first, second)) == first.size - 2


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


def test_the_hint_is_the_product_of_table_and_public_matrix_in_whole_numbers(one_slice):
    """Python's own integers; the public matrix is expanded here from what the wire format says."""
    _, server, _ = one_slice
    facts = b"".join(number.to_bytes(8, "little") for number in ONE_SLICE)  # K, row, m
    seed = blake2b(ROUND + facts, digest_size=16, person=b"keyhole-lwe").digest()
    stream = Cipher(AES(seed), CTR(bytes(16))).encryptor().update(bytes(4 * DIMENSION * 9))
    words = [int.from_bytes(stream[at : at + 4], "little") for at in range(0, len(stream), 4)]
    rows = drawn(*ONE_SLICE).rows.view(np.uint8)[:, :4].tolist()
    expected = [
        sum(words[9 * n + key] * rows[key][at] for key in range(9)) % 2**32
        for n in range(DIMENSION)
        for at in range(4)
    ]
    assert server.hint[:8] == b"KHH2\0\0\0\0"
    covered = sha256(server.params + server.hint[HINT_HEAD_BYTES:]).digest()
    assert server.hint[8:HINT_HEAD_BYTES] == covered
    assert np.frombuffer(server.hint, "<u4", offset=HINT_HEAD_BYTES).tolist() == expected


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


def altered(reply, shape, at, change):
    """A reply of a server that adds to one number: that of a query, a slice and a byte."""
    words = np.frombuffer(rows_of(reply), "<u4").reshape(shape.max_keys, 3, -1).copy()
    words[at] += np.uint32(change)
    return with_rows(reply, words.tobytes())


@pytest.mark.parametrize(("change", "wrong"), [(1 << 24, 1), (1 << 22, 0)])
def test_a_slice_that_a_server_changes_is_left_out(change, wrong):
    """2^24 more is another byte; what is less than half of that, noise swallows."""
    table = table_of("one-server", *SEVERAL)
    question = table.query([4, 9])
    (reply,) = table.replies(question.messages())
    lie = altered(reply, LweShape.of(table.params), (0, 1, 0), change)  # 4 is slice 1 of its column
    found = table.open(question, [4, 9], [lie])
    assert (found.is_found.tolist(), found.wrong) == ([not wrong, True], wrong)


def test_rows_with_paths_come_back_and_lead_to_the_root():
    table = table_of("one-server", 5000, 3, 2)
    assert table.params.row_bytes == 3 + 32
    found = table.retrieve([4999, 7])
    assert found.is_found.all()
    np.testing.assert_array_equal(found.records, table.records[[4999, 7]])
