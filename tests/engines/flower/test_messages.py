"""Control messages: what is written is read, what is not ours is refused, tokens are not shown."""

import pytest
from flwr.app import ConfigRecord, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from keyhole.engines.flower.messages import Here, NodeReport, RoundCall, read, write
from keyhole.errors import MalformedError
from tests.helpers import DIGEST

CALL = RoundCall(f"3-{DIGEST}", 3, 60.0, "http://127.0.0.1:1", (4, 9), ("secret-a", "secret-b"))


@given(
    clients=st.lists(st.integers(0, 2**40), max_size=5),
    seconds=st.floats(0.1, 1e6),
    words=st.text(max_size=50),
)
def test_what_is_written_is_read(clients, seconds, words):
    call = RoundCall("r", 1, seconds, words, tuple(clients), tuple(words for _ in clients))
    assert read(write(call), RoundCall) == call
    count = len(clients)
    told = [(words,) * count] * 2 + [(1,) * count] * 2
    report = NodeReport(tuple(clients), *told, (seconds,) * count)
    assert read(write(report), NodeReport) == report
    assert read(write(Here(count)), Here) == Here(count)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"number": "3"},
        {"number": True},
        {"clients": 4},
        {"clients": ["4"]},
        {"service": "x" * 5000},
        {"clients": [0] * 5000},
        {"more": 1},
    ],
    ids=str,
)
def test_what_is_not_a_call_is_refused(change):
    record = dict(write(CALL).config_records["keyhole"])
    with pytest.raises(MalformedError):
        read(RecordDict({"keyhole": ConfigRecord({**record, **change})}), RoundCall)


def test_a_message_of_others_or_with_a_field_missing_is_refused():
    record = dict(write(CALL).config_records["keyhole"])
    del record["tokens"]
    for content in (RecordDict(), RecordDict({"keyhole": ConfigRecord(record)})):
        with pytest.raises(MalformedError):
            read(content, RoundCall)


def test_lists_of_a_report_are_of_one_length():
    with pytest.raises(MalformedError):
        NodeReport((1, 2), ("sent",), ("",), (1,), (1,), (1.0,))


def test_a_call_does_not_show_its_tokens():
    assert "secret" not in repr(CALL)
