"""The trust table of a run: who learned what while slices were delivered and updates added up, and
what its models tell."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.table import Table

from keyhole.delivery.parties import PARTIES
from keyhole.training.record import RoundRecord, read_records

__all__ = ["last_record", "privacy_line", "trust_table"]


def last_record(directory: Path) -> RoundRecord | None:
    """The newest record of a trial; None where it made no round."""
    records = read_records(directory / "records.jsonl")
    return records[-1] if records else None


def trust_table(record: RoundRecord) -> Table:
    """One line for each party."""
    table = Table(title="who learned what", title_justify="left")
    for column in ("party", "of the keys, when slices were delivered", "when updates were added"):
        table.add_column(column)
    for party in _in_order({**record.seen_by, **record.seen_in_sum}):
        table.add_row(
            party, record.seen_by.get(party, "nothing"), record.seen_in_sum.get(party, "nothing")
        )
    return table


def privacy_line(record: RoundRecord) -> str:
    """What a run has spent, for whom; nothing where it promised nothing."""
    spent = record.privacy
    if not spent:
        return ""
    epsilon = "without bound" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"
    return (
        f"privacy spent: epsilon {epsilon} at delta {spent['delta']:g} after {spent['rounds']} "
        f"rounds, for one {spent['unit']} ({spent['neighbours']}, {spent['sampling']} cohorts)"
    )


def _in_order(parties: Iterable[str]) -> list[str]:
    """Those that a client meets first come first, as `PARTIES` has them; records sort by letter."""
    known = list(dict.fromkeys(party for way in PARTIES.values() for party in way.seen_by))
    return sorted(parties, key=lambda party: known.index(party) if party in known else len(known))
