"""The trust table of a run: who learned what while slices were delivered and updates added up."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from keyhole.training.record import RoundRecord, read_records

__all__ = ["last_record", "trust_table"]


def last_record(directory: Path) -> RoundRecord | None:
    """The newest record of a trial; None where it made no round."""
    records = read_records(directory / "records.jsonl")
    return records[-1] if records else None


def trust_table(record: RoundRecord) -> Table:
    """One line for each party."""
    table = Table(title="who learned what", title_justify="left")
    for column in ("party", "of the keys, when slices were delivered", "when updates were added"):
        table.add_column(column)
    for party in {**record.seen_by, **record.seen_in_sum}:
        table.add_row(
            party, record.seen_by.get(party, "nothing"), record.seen_in_sum.get(party, "nothing")
        )
    return table
