"""The contract of private retrieval, for every scheme: what comes out is what a plain lookup gives,
and what can be seen from outside is fixed by the params.

Renew the golden bytes with KEYHOLE_RENEW_GOLDEN=1.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.two_server import Batch
from keyhole.errors import InputError, KeySpaceError, ReplayError, StaleError
from tests.delivery.pir.golden import assert_golden
from tests.delivery.pir.schemes import BATCHED, SCHEMES, seeded, table_of

scheme = pytest.mark.parametrize("scheme", SCHEMES)


class NoPrg:
    """A generator that must not be asked."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was asked of a generator")


def assert_retrieves(table, keys, prg=None):
    found = table.retrieve(keys, prg)
    assert found.is_found.dtype == bool
    assert found.records.dtype == np.uint8
    assert found.is_found.all()
    np.testing.assert_array_equal(found.records, table.records[np.array(keys, np.int64)])


@st.composite
def tables_and_keys(draw):
    """A small table of any shape, and any keys that may be asked of it at once."""
    num_keys = draw(st.integers(1, 70))
    max_keys = draw(st.integers(1, min(num_keys, 12)))
    record_bytes = draw(st.integers(1, 70))
    some = st.lists(st.integers(0, num_keys - 1), unique=True, max_size=max_keys)
    distinct = draw(some)
    keys = draw(st.lists(st.sampled_from(distinct), max_size=20)) if distinct else []
    return (num_keys, record_bytes, max_keys), draw(st.permutations(distinct + keys))


# What is retrieved


@scheme
@settings(max_examples=40)
@given(case=tables_and_keys(), seed=st.integers(0, 2**64))
def test_any_keys_give_what_a_plain_lookup_gives(scheme, case, seed):
    shape, keys = case
    assert_retrieves(table_of(scheme, *shape), keys, seeded(seed))


@scheme
@pytest.mark.parametrize("record_bytes", range(1, 71, 3))
def test_records_of_any_length_come_back(scheme, record_bytes):
    table = table_of(scheme, 11, record_bytes, 4)
    assert_retrieves(table, [10, 0, 10, 3], seeded(record_bytes))


@scheme
@pytest.mark.parametrize("num_keys", [1, 2, 3, 7, 8, 9, 63, 64, 65, 127, 200])
def test_every_key_of_a_table_can_be_retrieved(scheme, num_keys):
    table = table_of(scheme, num_keys, 5, min(num_keys, 8))
    for first in range(0, num_keys, 8):
        assert_retrieves(table, range(first, min(first + 8, num_keys)))


@scheme
def test_one_key_at_a_time_finds_each(scheme):
    table = table_of(scheme, 13, 6, 1)
    for key in range(13):
        assert_retrieves(table, [key, key])


@scheme
def test_all_keys_at_once_come_back_in_their_order(scheme):
    table = table_of(scheme, 33, 9, 33)
    assert_retrieves(table, [*range(32, -1, -1), 5, 5])


@scheme
def test_a_table_of_one_slice_of_one_byte_can_be_asked(scheme):
    table = table_of(scheme, 1, 1, 1)
    assert_retrieves(table, [0, 0, 0])
    assert_retrieves(table, [])


@scheme
def test_a_batch_that_is_placed_in_buckets_comes_back(scheme):
    """Above a few keys the two-server scheme uses buckets; a key without a place may be missing,
    one in 10^5 such questions by its own tests, and none in these."""
    table = table_of(scheme, *BATCHED)
    drawn = seeded(1).permutation(1500)
    for start in (0, 110, 220):
        assert_retrieves(table, drawn[start : start + 110], seeded(start))
    assert_retrieves(table, range(110), seeded(1))
    assert_retrieves(table, range(1390, 1500), seeded(2))


def test_the_batch_of_these_tests_has_buckets():
    params = table_of("two-server", *BATCHED).params
    assert Batch.of(params).shape.num_buckets > 0


@scheme
def test_nothing_asked_is_nothing_found(scheme):
    table = table_of(scheme, 9, 4, 3)
    found = table.retrieve([])
    assert found.records.shape == (0, 4)
    assert found.is_found.shape == (0,)


@scheme
def test_more_keys_a_query_than_there_are_is_all_of_them(scheme):
    table = table_of(scheme, 5, 4, 50)
    assert table.params.max_keys == 5
    assert_retrieves(table, [4, 3, 2, 1, 0])


# What is refused at the client


@scheme
@pytest.mark.parametrize(
    "keys",
    [[-1], [9], [0, 77777], [-66666] * 9, [2**62], [0, 1, 2, 3]],
    ids=["below", "above", "one of two", "repeats", "far above", "too many"],
)
def test_keys_that_cannot_be_asked_are_refused_before_anything_is_made(scheme, keys):
    table = table_of(scheme, 9, 4, 3)
    with pytest.raises(KeySpaceError) as refused:
        table.query(keys, NoPrg())
    # Keys are private, and the text may be logged: it holds counts and bounds.
    assert not any(text in str(refused.value) for text in ("77777", "66666", str(2**62), "-1"))


@scheme
@pytest.mark.parametrize(
    "keys",
    [np.array([0.0, 1.0]), np.array([True, False]), np.array([[0, 1]]), np.array(1)],
    ids=["floats", "booleans", "two axes", "no axis"],
)
def test_what_is_no_list_of_keys_is_refused(scheme, keys):
    table = table_of(scheme, 9, 4, 3)
    with pytest.raises(InputError):
        table.asker.query(keys, NoPrg())


@scheme
def test_repeats_do_not_count_towards_the_most(scheme):
    assert_retrieves(table_of(scheme, 9, 4, 3), [8, 0, 4] * 50)


@scheme
def test_the_keys_that_were_given_can_change_afterwards(scheme):
    table = table_of(scheme, 9, 4, 3)
    keys = np.array([8, 2, 8])
    question = table.asker.query(keys)
    keys[:] = 0
    found = question.decode(table.replies(question.messages()))
    np.testing.assert_array_equal(found.records, table.records[[8, 2, 8]])


# What travels


@scheme
@pytest.mark.parametrize("shape", [(1, 1, 1), (9, 4, 3), (65, 70, 12), BATCHED], ids=str)
def test_messages_have_exactly_the_lengths_that_the_terms_fix(scheme, shape):
    table = table_of(scheme, *shape)
    num_keys, _, max_keys = shape
    for keys in ([], [0], [num_keys - 1] * 5, range(max_keys)):
        messages = table.query(keys).messages()
        assert len(messages) == len(table.servers)
        assert {len(message) for message in messages} == {table.query_bytes}
        assert {len(reply) for reply in table.replies(messages)} == {table.reply_bytes}


@scheme
def test_one_seed_gives_one_question_and_a_fresh_one_gives_another(scheme):
    table = table_of(scheme, 20, 4, 3)
    keys = [3, 19]
    seeds = [bytes(16), bytes(16), b"another seed 16b"]
    first, again, other = [table.query(keys, Prg(seed)).messages() for seed in seeds]
    assert first == again
    fresh = [table.query(keys).messages() for _ in range(3)]
    for many in zip(first, other, *fresh, strict=True):
        assert len(set(many)) == 5


@scheme
def test_the_servers_of_one_question_get_different_messages(scheme):
    messages = table_of(scheme, 20, 4, 3).query([3]).messages()
    assert len(set(messages)) == len(messages)


@scheme
def test_a_reply_depends_on_the_query_alone(scheme):
    """Two servers of one kind and one table, asked the same, say the same."""
    one, two = table_of(scheme, 20, 4, 3), table_of(scheme, 20, 4, 3)
    messages = one.query([3, 4]).messages()
    assert one.replies(messages) == two.replies(messages)


@scheme
@pytest.mark.parametrize("shape", [(20, 4, 3), BATCHED], ids=str)
def test_many_answers_in_one_pass_are_those_of_one_by_one(scheme, shape):
    together, alone = table_of(scheme, *shape), table_of(scheme, *shape)
    questions = [together.query([key, 0], seeded(key)) for key in range(5)]
    by_server = zip(*(question.messages() for question in questions), strict=True)
    replies = []
    for queries, one, other in zip(by_server, together.servers, alone.servers, strict=True):
        replies.append(one.answer(queries))
        assert replies[-1] == [other.answer([query])[0] for query in queries]
    for key, question in enumerate(questions):
        found = question.decode([many[key] for many in replies])
        np.testing.assert_array_equal(found.records, together.records[[key, 0]])


@scheme
def test_no_queries_are_no_replies(scheme):
    for server in table_of(scheme, 9, 4, 3).servers:
        assert server.answer([]) == []


@scheme
def test_both_sides_hold_the_same_terms(scheme):
    table = table_of(scheme, 9, 4, 3)
    assert table.params.scheme == scheme
    stated = {PirParams.decode(server.params) for server in table.servers}
    assert stated == {table.asker.params} == {table.params}
    assert PirParams.decode(table.params.encode()) == table.params


@scheme
def test_nothing_that_is_printed_holds_a_key(scheme):
    table = table_of(scheme, 7920, 2, 3)
    question = table.query([7919])
    found = table.open(question, [7919], table.replies(question.messages()))
    for shown in (question, found, table.asker, *table.servers):
        assert "7919" not in repr(shown) + str(shown)


# One use


@scheme
def test_the_messages_of_a_question_are_taken_once(scheme):
    question = table_of(scheme, 9, 4, 3).query([1])
    question.messages()
    with pytest.raises(ReplayError):
        question.messages()


@scheme
def test_the_replies_to_a_question_are_opened_once(scheme):
    table = table_of(scheme, 9, 4, 3)
    question = table.query([1])
    replies = table.replies(question.messages())
    question.decode(replies)
    with pytest.raises(ReplayError):
        question.decode(replies)


# Versions of a table


@scheme
def test_tables_that_differ_have_terms_that_differ(scheme):
    table = table_of(scheme, 9, 4, 3)
    others = [
        table_of(scheme, 9, 4, 3, name=b"others"),
        table_of(scheme, 9, 4, 3, round_id="round-8"),
        table_of(scheme, 9, 4, 2),
        table_of(scheme, 10, 4, 3),
        table_of(scheme, 9, 5, 3),
    ]
    assert table_of(scheme, 9, 4, 3).params == table.params
    assert len({other.params.digest for other in [table, *others]}) == 6


@scheme
def test_a_server_of_another_version_refuses_and_is_refused(scheme):
    """Whichever of the servers lags behind."""
    new, old = table_of(scheme, 9, 4, 3), table_of(scheme, 9, 4, 3, name=b"old slices")
    for lagging in range(len(new.servers)):
        question = new.query([1, 8])
        messages = question.messages()
        with pytest.raises(StaleError):
            old.servers[lagging].answer([messages[lagging]])
        replies = new.replies(messages)
        old_messages = old.query([1, 8]).messages()
        replies[lagging] = old.replies(old_messages)[lagging]
        with pytest.raises(StaleError):
            question.decode(replies)


@scheme
def test_terms_of_another_scheme_are_not_taken_up(scheme):
    table = table_of(scheme, 9, 4, 3)
    foreign = next(table_of(name, 9, 4, 3) for name in SCHEMES if name != scheme)
    with pytest.raises(StaleError):
        SCHEMES[scheme].asker(foreign.params, table.servers)


# Bytes that others read


@scheme
def test_bytes_of_a_small_retrieval_are_golden(scheme):
    table = table_of(scheme, 5, 3, 2)
    question = table.query([4, 1], Prg(b"keyhole golden !"))
    queries = question.messages()
    replies = table.replies(queries)
    np.testing.assert_array_equal(question.decode(replies).records, table.records[[4, 1]])
    named = {"params": table.params.encode(), "records": table.records.tobytes()}
    named |= {f"query {server}": message for server, message in enumerate(queries)}
    named |= {f"reply {server}": message for server, message in enumerate(replies)}
    assert_golden(f"pir-{scheme}", named)
