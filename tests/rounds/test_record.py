"""Records: JSON lines that come back, and a torn last line that does not."""

import pytest

from keyhole.errors import InputError
from keyhole.rounds.record import RoundRecord, decode_records, encode_records, read_records

RECORDS = [
    RoundRecord(round=0, step=1, clients=[3, 1], staleness=[0, 0], metrics={"accuracy": 0.5}),
    RoundRecord(round=1, step=1, clients=[2], lost_before=[2]),
]


def test_records_come_back():
    assert decode_records(encode_records(RECORDS)) == RECORDS


def test_an_unfinished_last_line_is_left_out():
    assert decode_records(encode_records(RECORDS)[:-5]) == RECORDS[:1]


def test_a_round_is_skipped_if_nobody_was_added_up():
    assert [r.is_skipped for r in RECORDS] == [False, True]


def test_no_file_holds_no_records(tmp_path):
    assert read_records(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("line", [b"[]\n", b"{}\n", b"nonsense\n", b'{"round": 1, "colour": 2}\n'])
def test_a_line_that_is_no_record_is_refused(line):
    with pytest.raises(InputError, match="not the record of a round"):
        decode_records(line)
