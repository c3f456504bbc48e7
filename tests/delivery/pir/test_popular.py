"""Popular keys beside a whole table, by every scheme: what is found, dropped and seen."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.crypto.prg import Prg
from keyhole.delivery.base import Lengths, PrivateTable
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.popular import PLACES_A_KEY, PopularKeys, popular_of, read_words
from keyhole.errors import InputError, KeySpaceError, MalformedError, ReplayError, StaleError
from keyhole.pricing import Speeds, Workload, measured
from keyhole.service.passes import answer_apart
from tests.delivery.pir.distinguisher import bits_of, compare
from tests.delivery.pir.golden import assert_golden
from tests.delivery.pir.mutations import body_of, flipped, with_body
from tests.delivery.pir.schemes import MODEL, Table, records_of, seeded, two_server_zero_bits
from tests.delivery.pir.test_leaks import work_of_server

WAYS = {"one-server": one_server.OneServerPir(), "two-server": two_server.TwoServerPir()}
way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)

K, WIDTH, M = 1500, 9, 110  # enough of them for buckets
POPULAR = PopularKeys.read("0-149+700-749", slots=80)  # 200 of them, and 30 of the whole table
ALONE = PopularKeys.read("0-149+700-749", slots=M)
COMMON = POPULAR.keys
RARE = np.setdiff1d(np.arange(K), COMMON)


def table_with(popular=POPULAR, name=b"slices", round_id="round-7", model=MODEL):
    return PrivateTable.of(round_id, model, records_of(K, WIDTH, name), M, popular)


def opened(way, table=None):
    """A table with its servers and a client."""
    table = table_with() if table is None else table
    servers = way.open(table)
    lengths, client = way.lengths(servers[0].params), way.client(servers[0].params, servers[0].hint)
    top = Top.of(table.num_keys, table.tree.root, top_of(table.tree))
    params = PirParams.decode(servers[0].params)
    return Table(table.records, top, params, servers, client, lengths.query, lengths.reply)


@pytest.fixture(scope="module")
def tables():
    return {name: opened(each) for name, each in WAYS.items()}


def of(tables, way):
    return next(tables[name] for name, each in WAYS.items() if each is way)


def assert_true(table, keys, found):
    """What is found are the records of the keys, and of the others nothing."""
    expected = np.where(found.is_found[:, None], table.records[np.array(keys, np.int64)], 0)
    np.testing.assert_array_equal(found.records, expected)
    assert found.wrong == 0


# What is found, and what is dropped


@way
@settings(max_examples=15)
@given(
    common=st.lists(st.sampled_from(COMMON.tolist()), unique=True, max_size=60),
    rare=st.lists(st.sampled_from(RARE.tolist()), unique=True, max_size=50),
)
def test_what_is_found_is_what_a_plain_lookup_gives(tables, way, common, rare):
    table, keys = of(tables, way), [*rare, *common, *rare[:3]]
    found = table.retrieve(keys)
    assert_true(table, keys, found)
    if common:  # as many as are popular have a place of their own, as in any query
        assert found.is_found[len(rare) : len(rare) + len(common)].all()
    assert found.is_found[: len(rare)].sum() <= 30
    if len(rare) == 1:
        assert found.is_found.all()


@way
def test_keys_beyond_the_share_are_dropped_and_no_others(tables, way):
    table = of(tables, way)
    keys = seeded(3).permutation(200)[:100]
    found = table.retrieve(COMMON[keys])  # 20 of them are asked of the whole table
    assert_true(table, COMMON[keys], found)
    assert 80 < found.is_found.sum() <= 100


@way
def test_a_share_of_one_asks_for_popular_keys_alone(way):
    table = opened(way, table_with(ALONE))
    keys = np.concatenate([COMMON[::3], RARE[:40]])
    found = table.retrieve(keys)
    assert_true(table, keys, found)
    np.testing.assert_array_equal(found.is_found, np.isin(keys, COMMON))
    assert len(table.params.tables) == 1
    assert way.held_bytes(K, table.params.row_bytes, M, ALONE) < way.held_bytes(
        K, table.params.row_bytes, M, POPULAR
    )


def test_which_of_two_keys_is_dropped_changes_with_the_round():
    """Two keys in one place of the whole table, always the same two: neither is always lost."""
    way, lost = WAYS["two-server"], set()
    for number in range(12):
        table = opened(way, table_with(model=number.to_bytes(32, "little")))
        batch = two_server.Batch.of(table.params.tables[1])
        assert batch.placement.num_hashes == 1
        buckets = batch.placement.buckets_of(RARE)[:, 0]
        pair = RARE[buckets == buckets[0]][:2]
        found = table.retrieve(pair)
        assert found.is_found.sum() == 1
        lost.add(int(pair[~found.is_found][0]))
    assert len(lost) == 2


def test_tables_of_one_round_drop_the_same_keys():
    keys = seeded(1).permutation(K)[:M]
    parts = [POPULAR.split(np.sort(keys), 30, seed=7) for _ in range(2)]
    for one, other in zip(*parts, strict=True):
        np.testing.assert_array_equal(one, other)
    popular, whole, at = parts[0]
    assert set(np.sort(keys)[popular]) <= set(COMMON)
    np.testing.assert_array_equal(COMMON[at], np.sort(keys)[popular])
    assert not set(popular) & set(whole)


@way
def test_more_keys_than_a_query_holds_are_refused(tables, way):
    with pytest.raises(KeySpaceError):
        of(tables, way).query(range(M + 1))


# What travels


KINDS = ([], [5], [RARE[0]], COMMON[:M], RARE[:M], np.concatenate([COMMON[:55], RARE[:55]]))


@way
@pytest.mark.parametrize("popular", [POPULAR, ALONE], ids=["both", "popular alone"])
def test_messages_have_one_length_for_everyone_which_the_planner_says(way, popular):
    table = opened(way, table_with(popular))
    queries, replies = set(), set()
    for keys in KINDS:
        messages = table.query(keys).messages()
        queries |= {len(message) for message in messages}
        replies |= {len(reply) for reply in table.replies(messages)}
    hint = len(table.servers[0].hint)
    assert (queries, replies) == ({table.query_bytes}, {table.reply_bytes})
    assert way.lengths(table.params.encode()) == Lengths(*queries, *replies, hint)
    load = Workload(K, M, WIDTH, cohort=1, popular=(popular.count, popular.slots))
    price = way.price(load, measured(Speeds))
    servers = way.about.servers
    assert price.bytes_up == servers * table.query_bytes
    assert price.bytes_down == servers * table.reply_bytes + hint + table.top.nodes.size
    assert price.server_memory == way.held_bytes(K, table.params.row_bytes, M, popular)


@way
def test_servers_do_the_same_work_in_the_same_order_for_all_keys(tables, way):
    table = of(tables, way)
    table.retrieve([0])  # what is worked out once
    asked = [table.query(keys).messages() for keys in KINDS]
    for number, server in enumerate(table.servers):
        first, *others = [work_of_server(server, messages[number]) for messages in asked]
        assert len(first) > 40
        assert all(lines == first for lines in others)


@way
def test_bits_of_queries_do_not_tell_popular_keys_from_rare_ones(tables, way):
    """No key is dropped on one side, nearly all are on the other."""
    popular = PopularKeys.read("0-9", slots=2)
    table = opened(way, PrivateTable.of("round-7", MODEL, records_of(40, 3), 3, popular))
    sampled = []
    for number, keys in enumerate(([1, 2], [20, 21, 22])):
        queries = (table.query(keys, seeded(1000 * number + i)).messages() for i in range(200))
        sampled.append(
            [bits_of([body_of(one) for one in some]) for some in zip(*queries, strict=True)]
        )
    for first, second in zip(*sampled, strict=True):
        assert not compare(first, second).tells_apart


# Who is refused


@way
def test_servers_of_other_popular_keys_refuse(tables, way):
    table = of(tables, way)
    for words in ("200", "0-149+701-750"):
        other = opened(way, table_with(PopularKeys.read(words, slots=80)))
        message = table.query([1]).messages()[0]
        with pytest.raises(StaleError):
            other.servers[0].answer([message])
    with pytest.raises((StaleError, MalformedError)):
        way.open(table_with(None))[0].answer([message])


@way
def test_messages_and_replies_are_for_one_use(tables, way):
    table = of(tables, way)
    question = table.query([1, RARE[4]])
    messages = question.messages()
    with pytest.raises(ReplayError):
        question.messages()
    replies = table.replies(messages)
    for server, message in zip(table.servers, messages, strict=True):
        with pytest.raises(ReplayError):
            server.answer([message])
    for damaged in (replies[0][:-1], replies[0] + b"x", replies[0][1:], b""):
        with pytest.raises(MalformedError):
            question.decode([damaged, *replies[1:]])
    assert question.decode(replies).is_found.all()  # what was no reply has not used it up
    with pytest.raises(ReplayError):
        question.decode(replies)


@way
@pytest.mark.parametrize("change", [lambda m: m[:-1], lambda m: m + b"x", lambda m: b"", "flip"])
def test_a_query_that_is_none_is_refused_before_a_row_is_read(tables, way, change):
    table = of(tables, way)
    message = table.query([1]).messages()[0]
    flipped = bytes([*message[:-1], message[-1] ^ 1])
    with pytest.raises(MalformedError):
        table.servers[0].answer([flipped if change == "flip" else change(message)])
    table.servers[0].answer([message])  # the first half was not used up


@way
@pytest.mark.parametrize("half", [0, 1], ids=["popular", "whole"])
def test_a_query_of_which_half_was_answered_spoils_no_other_of_its_pass(tables, way, half):
    table = of(tables, way)
    server = table.servers[0]
    cut = way.lengths(table.params.tables[0].encode()).query
    questions = [table.query([1, RARE[4]]) for _ in range(5)]
    honest = [question.messages() for question in questions]
    old, fresh = (table.query([1]).messages()[0] for _ in range(2))
    server.answer([old])
    bad = [old[:cut] + fresh[cut:], fresh[:cut] + old[cut:]][half]
    server.check(bad)
    first = [messages[0] for messages in honest]
    outcomes, passes = answer_apart(server, [*first[:3], bad, *first[3:]])
    assert isinstance(outcomes.pop(3), ReplayError)
    assert passes < len(honest)
    for question, messages, reply in zip(questions, honest, outcomes, strict=True):
        rest = [s.answer([m])[0] for s, m in zip(table.servers[1:], messages[1:], strict=True)]
        assert question.decode([reply, *rest]).is_found.all()
    assert len(server.answer([fresh])) == 1  # nor was its other half used up


def test_a_query_whose_second_half_says_nothing_is_refused_before_a_row_is_read(monkeypatch):
    """By two servers; for one every body says something."""
    way = WAYS["two-server"]
    table = opened(way)
    server, message = table.servers[0], table.query([1]).messages()[0]
    cut = way.lengths(table.params.tables[0].encode()).query
    whole, bits = message[cut:], two_server_zero_bits(table.params.tables[1])
    bad = message[:cut] + with_body(whole, flipped(body_of(whole), next(bits)))
    with monkeypatch.context() as patched:
        patched.setattr(two_server, "_scan", None)  # reading a row would fail
        with pytest.raises(MalformedError):
            server.answer([table.query([2]).messages()[0], bad])
    assert len(server.answer([message])) == 1


# A table of popular rows that are not those of their keys


def lies(rows):
    """Ways to be wrong: rows of other keys, altered rows, one row for all."""
    return {
        "of other keys": np.roll(rows, 1, axis=0),
        "altered": rows ^ np.uint64(1),
        "all one": np.broadcast_to(rows[0], rows.shape).copy(),
    }


@way
@pytest.mark.parametrize("lie", lies(np.zeros((2, 2), np.uint64)))
def test_a_wrong_table_of_popular_keys_becomes_no_slice(monkeypatch, way, lie):
    true = Database.all_of

    def lying(table, scheme):
        small, *others = true(table, scheme)
        return replace(small, rows=lies(small.rows)[lie]), *others

    monkeypatch.setattr(Database, "all_of", lying)
    table = opened(way)
    monkeypatch.undo()
    keys = np.concatenate([COMMON[1:50], RARE[:1]])
    found = table.retrieve(keys)
    assert found.is_found.tolist() == [False] * 49 + [True]
    np.testing.assert_array_equal(found.records[-1], table.records[RARE[0]])
    assert not found.records[:-1].any()
    assert found.wrong == 49


# Params


def test_params_say_popular_keys_and_come_back():
    for popular in (POPULAR, ALONE, PopularKeys.read("2", 1)):
        public = table_with(popular).public
        params = PirParams.of("one-server", public)
        assert PirParams.decode(params.encode()) == params
        assert params.public("one-server") == public
        for each in params.tables:
            assert PirParams.decode(each.encode()) == each
            same = public.model, public.root, public.row_bytes
            assert (each.model, each.root, each.row_bytes) == same
    whole = params.tables[-1]
    assert whole.single
    assert (whole.num_keys, whole.max_keys) == (K, M - 1)


@pytest.mark.parametrize("at", [0, 112, 120, 128], ids=str)
def test_damaged_params_are_refused(at):
    data = bytearray(PirParams.of("one-server", table_with().public).encode())
    data[at] ^= 0xFF
    with pytest.raises(MalformedError):
        PirParams.decode(bytes(data))
    with pytest.raises(MalformedError):
        PirParams.decode(bytes(data[:-3]))


def test_words_name_keys():
    meant = {"3": [0, 1, 2], "0": [], "5-5": [5], "1+0+2": [0, 1, 2], "9+4-5": [4, 5, 9]}
    for words, keys in meant.items():
        found = [k for first, last in read_words(words) for k in range(first, last + 1)]
        assert found == keys
    assert PopularKeys.read("4-5+0-3+9", 1).words == "0-5+9"


@pytest.mark.parametrize("words", ["", "a", "1-", "-1", "3-1+9", "1..2", "1,2", "0-2+1-5", "²"])
def test_words_that_name_no_keys_are_refused(words):
    with pytest.raises(InputError, match="popular keys"):
        PopularKeys.read(words, 1)


@pytest.mark.parametrize(
    ("words", "share", "m"), [("10", 1.0, 10), ("20", 1.0, 5), ("0-4+20", 0.5, 2), ("1", 1.0, 1)]
)
def test_popular_keys_that_do_not_fit_a_table_are_refused(words, share, m):
    with pytest.raises(InputError, match="popular keys"):
        popular_of({"row": (words, share)}, ["row"], num_keys=20, max_keys=m)


def test_a_table_without_use_for_popular_keys_has_none():
    shares = {"row": ("10", 1.0)}
    assert popular_of(shares, ["row"], 20, 20) is None  # clients take all of it
    assert popular_of(shares, ["other"], 20, 5) is None
    assert popular_of(shares, ["row", "other"], 20, 5) is None
    assert popular_of(shares, ["row"], 20, 5).slots == 5


def test_places_of_the_whole_table_are_those_that_the_planner_counts():
    public = table_with().public
    batch = two_server.Batch.of(PirParams.of("two-server", public).tables[1])
    assert batch.num_queries == PLACES_A_KEY * 30
    shape = one_server.RingShape.of(PirParams.of("one-server", public).tables[1])
    assert shape.kind_buckets >= PLACES_A_KEY * 30


@way
def test_bytes_of_a_small_retrieval_with_popular_keys_are_golden(way):
    table = PrivateTable.of("round-7", MODEL, records_of(7, 3), 3, PopularKeys.read("0-1+5", 2))
    servers = way.open(table)
    question = way.client(servers[0].params, servers[0].hint).query(
        np.array([5, 6]), Prg(b"keyhole golden !")
    )
    queries = question.messages()
    replies = [server.answer([one])[0] for server, one in zip(servers, queries, strict=True)]
    found = question.decode(replies)
    np.testing.assert_array_equal(found.records[:, :3], table.records[[5, 6]])
    named = {"params": servers[0].params, "records": table.records.tobytes()}
    named |= {f"query {server}": message for server, message in enumerate(queries)}
    named |= {f"reply {server}": message for server, message in enumerate(replies)}
    assert_golden(f"pir-{way.about.path_name}-popular", named)
