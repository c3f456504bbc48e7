"""Messages that cannot be used, for every scheme: refused with a typed error, before any row is
read, without a word about what they held. And servers that lie."""

import re
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from keyhole.delivery.pir import messages as frames
from keyhole.delivery.pir.messages import FRAME_BYTES, seal
from keyhole.errors import MalformedError, ProtocolError, ReplayError, StaleError
from keyhole.wire.http import REFUSAL
from tests.delivery.pir.bad_queries import bad_queries, replayed
from tests.delivery.pir.mutations import (
    bit_flips,
    body_of,
    extensions,
    flipped,
    rows_of,
    truncations,
    with_body,
    with_rows,
)
from tests.delivery.pir.schemes import (
    PAIRS,
    SCHEMES,
    database_of,
    records_of,
    seeded,
    small_table_of,
)
from tests.helpers import ROOT

scheme = pytest.mark.parametrize("scheme", SCHEMES)
SHAPE = (4, 2)  # bytes of a record, keys of a query
KEYS = [7, 3]  # as many as a query holds, so that every row of a reply matters


# At a server


@pytest.fixture(scope="module")
def without_rows():
    """What `forbidden_rows.py` saw, where a single read of a row is the end of a process."""
    program = [sys.executable, "-m", "tests.delivery.pir.forbidden_rows"]
    ended = subprocess.run(
        program, cwd=ROOT, check=False, capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = (line.split() for line in ended.stdout.splitlines())
    return {(scheme, send): (int(code), int(count)) for scheme, send, code, count in lines}


@scheme
def test_every_bad_query_is_refused_before_any_row_is_read(scheme, without_rows):
    code, refused = without_rows[scheme, "send_bad"]
    assert code == 0
    assert refused > 8 * FRAME_BYTES  # each bit of the frames, and more


@scheme
def test_a_good_query_does_read_rows(scheme, without_rows):
    """What shows that the test above can fail."""
    assert without_rows[scheme, "send_good"] == (-signal.SIGSEGV, 0)


@scheme
def test_a_refusal_tells_the_cause_in_counts_and_nothing_of_the_message(scheme):
    """Thousands of bad queries, a handful of texts: they cannot hold anything of a message. What
    travels is `REFUSAL`, whatever the text."""
    table = small_table_of(scheme, *SHAPE)
    texts = {}
    for server, queries, error in [*bad_queries(scheme, table), *replayed(table)]:
        with pytest.raises(error) as refused:
            table.servers[server].answer(queries)
        texts.setdefault(error, set()).add(
            re.sub(r"(\d+ bytes|party [01])", "n", str(refused.value))
        )
        assert refused.value.http_status == ProtocolError.http_status
    # Length, check, head, spare bits; a replay tells how many of how many.
    limit = {MalformedError: 4, StaleError: 1, ReplayError: 2}
    assert texts.keys() == limit.keys()
    assert all(len(some) <= limit[error] for error, some in texts.items()), texts


@scheme
def test_a_bad_query_takes_the_others_of_its_pass_with_it(scheme):
    table = small_table_of(scheme, *SHAPE)
    question = table.query(KEYS)
    messages = question.messages()
    replies = []
    for server, message in zip(table.servers, messages, strict=True):
        with pytest.raises(MalformedError):
            server.answer([message, flipped(message, 99)])
        # What was not answered is no replay.
        replies += server.answer([message])
    np.testing.assert_array_equal(question.decode(replies).records, table.records[KEYS])


@scheme
def test_a_query_is_answered_once(scheme):
    table = small_table_of(scheme, *SHAPE)
    for number, (server, message) in enumerate(
        zip(table.servers, table.query(KEYS).messages(), strict=True)
    ):
        server.answer([message])
        for batch in ([message], [table.query(KEYS).messages()[number], message]):
            with pytest.raises(ReplayError):
                server.answer(batch)


@scheme
def test_a_query_twice_in_one_pass_is_a_replay(scheme):
    table = small_table_of(scheme, *SHAPE)
    message = table.query(KEYS).messages()[0]
    with pytest.raises(ReplayError):
        table.servers[0].answer([message, message])
    assert len(table.servers[0].answer([message])) == 1


@scheme
def test_whatever_stands_in_a_well_formed_body_is_answered_at_full_length_or_refused(scheme):
    """A client that cheats harms itself alone: no other error, no other length."""
    table = small_table_of(scheme, *SHAPE)
    answered = 0
    for server, message in enumerate(table.query(KEYS, seeded(0)).messages()):
        body = body_of(message)
        bodies = [bytes(len(body)), b"\xff" * len(body), *list(bit_flips(body))[::3]]
        for forged in bodies:
            try:
                (reply,) = table.servers[server].answer([with_body(message, forged)])
            except MalformedError:
                continue
            assert len(reply) == table.reply_bytes
            answered += 1
    assert answered > 50


# At a client


def replies_to(table, keys=KEYS, number=4):
    """The replies to the question that `number` seeds."""
    return table.replies(table.query(keys, seeded(number)).messages())


def opened(table, replies, keys=KEYS, number=4):
    """Opens replies with that same question, made anew: it is for one use."""
    question = table.query(keys, seeded(number))
    question.messages()
    return table.open(question, keys, replies)


def with_reply(replies, server, reply):
    return [*replies[:server], reply, *replies[server + 1 :]]


@scheme
def test_a_question_made_anew_opens_the_replies_to_the_first(scheme):
    """What shows that the tests below fail for the reason they name."""
    table = small_table_of(scheme, *SHAPE)
    found = opened(table, replies_to(table))
    np.testing.assert_array_equal(found.records, table.records[KEYS])


@scheme
def test_every_damaged_reply_is_malformed_and_does_not_use_the_question_up(scheme):
    table = small_table_of(scheme, *SHAPE)
    question = table.query(KEYS)
    replies = table.replies(question.messages())
    for server, reply in enumerate(replies):
        for bad in [*bit_flips(reply), *truncations(reply), *extensions(reply), REFUSAL]:
            with pytest.raises(MalformedError):
                question.decode(with_reply(replies, server, bad))
    np.testing.assert_array_equal(question.decode(replies).records, table.records[KEYS])


@scheme
def test_a_reply_that_belongs_elsewhere_is_refused_though_it_is_whole(scheme):
    table = small_table_of(scheme, *SHAPE)
    replies = replies_to(table)
    for server, reply in enumerate(replies):
        body = body_of(reply)
        cases = [
            (seal("query", table.params, server, body), MalformedError),
            (seal("reply", table.params, 1 - server, body), MalformedError),
            (seal("reply", table.params, server, body + b"\0"), MalformedError),
            (seal("reply", replace(table.params, model=bytes(32)), server, body), StaleError),
            (seal("reply", replace(table.params, root=bytes(32)), server, body), StaleError),
            (seal("reply", replace(table.params, round=bytes(16)), server, body), StaleError),
        ]
        for bad, error in cases:
            with pytest.raises(error):
                opened(table, with_reply(replies, server, bad))


@scheme
def test_replies_of_too_many_or_too_few_servers_are_malformed(scheme):
    table = small_table_of(scheme, *SHAPE)
    replies = replies_to(table)
    for bad in ([], replies[1:], [*replies, replies[0]], replies * 2):
        with pytest.raises(MalformedError):
            opened(table, bad)


@pytest.mark.parametrize("scheme", PAIRS)
def test_the_reply_of_one_server_does_not_pass_for_that_of_the_other(scheme):
    table = small_table_of(scheme, *SHAPE)
    first, second = replies_to(table)
    for bad in ([second, first], [first, first], [second, second]):
        with pytest.raises(MalformedError):
            opened(table, bad)
    renamed = seal("reply", table.params, 1, body_of(first))
    with pytest.raises(MalformedError, match="another query"):
        opened(table, [first, renamed])


@scheme
@pytest.mark.parametrize("keys", [[1, 8], KEYS], ids=["other keys", "the same keys"])
def test_the_reply_to_another_question_is_malformed_and_does_not_use_this_one_up(scheme, keys):
    """Both replies to an earlier question for the same keys would open this one: what was said
    then is no answer now."""
    table = small_table_of(scheme, *SHAPE)
    others = replies_to(table, keys, number=5)
    question = table.query(KEYS)
    mine = table.replies(question.messages())
    mixed = [with_reply(mine, server, others[server]) for server in range(len(mine))]
    for bad in [others, *mixed]:
        with pytest.raises(MalformedError, match="another query"):
            question.decode(bad)
    np.testing.assert_array_equal(question.decode(mine).records, table.records[KEYS])


@scheme
def test_a_question_for_nothing_does_not_open_replies_to_another(scheme):
    table = small_table_of(scheme, *SHAPE)
    question = table.query([])
    question.messages()
    with pytest.raises(MalformedError):
        question.decode(replies_to(table))


@scheme
def test_a_query_whose_answer_failed_can_be_sent_again(scheme, monkeypatch):
    """Memory ran out, say: nothing was answered, so nothing is a replay."""
    table = small_table_of(scheme, *SHAPE)
    question = table.query(KEYS)
    messages = question.messages()

    def fail(*_, **__):
        raise MemoryError

    for server, message in zip(table.servers, messages, strict=True):
        monkeypatch.setattr(frames, "seal_reply", fail)
        with pytest.raises(MemoryError):
            server.answer([message])
        monkeypatch.undo()
    np.testing.assert_array_equal(
        question.decode(table.replies(messages)).records, table.records[KEYS]
    )


# Servers that lie


def lies_about(replies, server):
    """Replies with one byte of a row changed, and the check made anew; of long ones a hundred."""
    rows = rows_of(replies[server])
    for at in range(0, len(rows), max(1, len(rows) // 100)):
        for change in (0x01, 0x80, 0xFF):
            changed = bytearray(rows)
            changed[at] ^= change
            yield with_reply(replies, server, with_rows(replies[server], bytes(changed)))


def is_left_out(table, found, keys, wrong):
    """Whether the rows of `wrong` keys are missing, and nothing else is."""
    is_wrong = np.isin(keys, wrong)
    np.testing.assert_array_equal(found.is_found, ~is_wrong)
    expected = np.where(is_wrong[:, None], 0, table.records[keys])
    np.testing.assert_array_equal(found.records, expected)
    return found.wrong == is_wrong.sum()


@scheme
def test_a_lie_never_becomes_a_slice_and_spoils_no_other(scheme):
    """Where replies carry noise a small change is harmless, and a coefficient is part of all rows;
    a wrong slice never comes out."""
    table = small_table_of(scheme, *SHAPE)
    replies = replies_to(table)
    left_out = []
    for server in range(len(replies)):
        for lie in lies_about(replies, server):
            found = opened(table, lie)
            wrong = np.array(KEYS)[~found.is_found]
            assert is_left_out(table, found, KEYS, wrong)
            left_out.append(len(wrong))
    assert len(left_out) > 20
    spoiled = 1 if scheme in PAIRS else len(KEYS)
    assert set(left_out) | {0} == {0, spoiled}


@pytest.mark.parametrize("scheme", PAIRS)
def test_every_changed_byte_of_an_xor_of_rows_leaves_out_its_row(scheme):
    table = small_table_of(scheme, *SHAPE)
    replies = replies_to(table)
    for server in (0, 1):
        for lie in lies_about(replies, server):
            assert opened(table, lie).wrong == 1


@scheme
@pytest.mark.parametrize("keys", [[], [7]], ids=["no key", "one key"])
def test_a_lie_about_padding_changes_nothing(scheme, keys):
    """Nor does it show: a server that changes one row cannot learn whether it was padding."""
    table = small_table_of(scheme, *SHAPE)
    replies = replies_to(table, keys)
    for server in range(len(replies)):
        for lie in lies_about(replies, server):
            found = opened(table, lie, keys)
            assert is_left_out(table, found, keys, np.array(keys)[~found.is_found])


def swapped(rows):
    rows[[3, 4]] = rows[[4, 3]]


def changed_bit(rows):
    rows[3, 0] ^= 1


def emptied(rows):
    rows[3] = 0


def forge(scheme, change):
    """A table whose servers agree on a lie: they state the params of the true one."""
    true = database_of(records_of(SCHEMES[scheme].small, SHAPE[0]), SHAPE[1])
    rows = true.rows.copy()
    change(rows)
    return small_table_of(scheme, *SHAPE, database=replace(true, rows=rows))


@scheme
@pytest.mark.parametrize("change", [swapped, changed_bit, emptied], ids=lambda how: how.__name__)
@pytest.mark.parametrize("keys", [[3], [0, 3], [3, 8]], ids=str)
def test_a_slice_that_does_not_belong_to_its_key_is_left_out(scheme, change, keys):
    table = forge(scheme, change)
    found = table.retrieve(keys)
    assert is_left_out(table, found, keys, [3])


@scheme
def test_a_question_that_met_a_lie_is_used_up(scheme):
    """Nothing is asked or opened again on account of it."""
    table = small_table_of(scheme, *SHAPE)
    question = table.query(KEYS)
    replies = table.replies(question.messages())
    lie = with_reply(replies, 0, with_rows(replies[0], bytes(len(rows_of(replies[0])))))
    table.open(question, KEYS, lie)
    for again in (lie, replies):
        with pytest.raises(ReplayError):
            question.decode(again)
