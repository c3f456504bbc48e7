"""Privacy: what select saves against what hiding the keys costs, the evaluation that the paper
leaves to future work (its section 6).

It needs no runs: every number follows from K, m and the length of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from keyhole.delivery.names import DeliveryName
from keyhole.delivery.plan.lengths import traffic_of
from keyhole.delivery.plan.need import Need
from keyhole.delivery.plan.planner import break_even

__all__ = ["LABELS", "SliceTable", "slice_tables", "to_json", "to_markdown", "write_percent"]

LABELS: Mapping[DeliveryName, str] = MappingProxyType(
    {
        "pregenerated": "in the clear",
        "enclave": "enclave",
        "relay": "relay",
        "pir": "PIR, two servers",
        "pir-chor": "PIR, two servers, Chor 1995",
        "pir-one-server": "PIR, one server",
    }
)
"""What is compared with broadcast. Slices on demand send what pregenerated ones do."""

_NUM_KEYS = (10_000, 100_000, 1_000_000)
_POINTS = 100  # of a line
_EXAMPLES = (100, 1_000, 10_000)


@dataclass(frozen=True)
class SliceTable:
    """One table of slices.

    Args:
        num_keys: K.
        slice_bytes: of one slice.

    >>> round(SliceTable(10_000, 2_000).kept("pir", 1_000), 1)
    0.8
    """

    num_keys: int
    slice_bytes: int

    @cached_property
    def break_even(self) -> Mapping[DeliveryName, int]:
        """Way -> the most keys a client for which it sends no more than broadcast."""
        return {way: break_even(self.num_keys, self.slice_bytes, way) for way in LABELS}

    @cached_property
    def keys_per_client(self) -> list[int]:
        """m from one to K, evenly on a log axis, with all break-even points among them."""
        places = np.geomspace(1, self.num_keys, _POINTS).round().astype(int)
        return sorted({*places.tolist(), *self.break_even.values()} - {0})

    @property
    def examples(self) -> list[int]:
        """m of the tables in words: fewer than K."""
        return [m for m in _EXAMPLES if m < self.num_keys]

    def bytes_of(self, way: DeliveryName, keys_per_client: int) -> int:
        """Both directions, of one client."""
        need = Need(self.num_keys, keys_per_client, self.slice_bytes, cohort=1)
        return traffic_of(way, need).total

    def share(self, way: DeliveryName, keys_per_client: int) -> float:
        """Bytes over those of broadcast."""
        return self.bytes_of(way, keys_per_client) / self.bytes_of("broadcast", keys_per_client)

    def kept(self, way: DeliveryName, keys_per_client: int) -> float:
        """How much of the bytes that select in the clear saves is still saved; below zero where a
        way sends more than broadcast."""
        whole, clear, sent = (
            self.bytes_of(name, keys_per_client) for name in ("broadcast", "pregenerated", way)
        )
        # Naming nearly all keys costs more than it saves.
        return (whole - sent) / (whole - clear) if whole > clear else 0.0


def slice_tables(slice_bytes: int = 2_000) -> tuple[SliceTable, ...]:
    """The tables that are compared: of ten thousand to a million slices.

    Args:
        slice_bytes: of one slice: 500 numbers, as in the paper's task of tags.
    """
    return tuple(SliceTable(num_keys, slice_bytes) for num_keys in _NUM_KEYS)


def to_markdown(tables: Sequence[SliceTable]) -> str:
    """Returns two tables: where each way stops saving, and what it sends before."""
    slice_bytes = f"{tables[0].slice_bytes:,}"
    ends = [("way", *(f"K = {table.num_keys:,}" for table in tables))]
    ends += [
        (label, *(_write_end(table, way) for table in tables)) for way, label in LABELS.items()
    ]
    sent = [("K", "m", "broadcast", *LABELS.values())]
    sent += [
        (f"{table.num_keys:,}", f"{m:,}", *(_megabytes(table, way, m) for way in _all_ways()))
        for table in tables
        for m in table.examples
    ]
    return (
        f"The most keys a client (m) for which a way sends no more than broadcast, with slices of "
        f"{slice_bytes} bytes:\n\n{_table(ends, 1)}\n"
        "What a client sends and receives in a round, in MB, and in brackets how many times less "
        f"than broadcast:\n\n{_table(sent, 0)}"
    )


def to_json(tables: Sequence[SliceTable]) -> list[dict[str, Any]]:
    """Returns the same as plain values."""
    return [
        {
            "num_keys": table.num_keys,
            "slice_bytes": table.slice_bytes,
            "break_even": dict(table.break_even),
            "bytes": {
                str(m): {way: table.bytes_of(way, m) for way in _all_ways()} for m in table.examples
            },
        }
        for table in tables
    ]


def _all_ways() -> list[DeliveryName]:
    return ["broadcast", *LABELS]


def _write_end(table: SliceTable, way: DeliveryName) -> str:
    end = table.break_even[way]
    return f"{end:,} ({write_percent(end / table.num_keys)})"


def write_percent(share: float) -> str:
    """Returns a share in percent, with two digits where it is small.

    >>> write_percent(0.996), write_percent(0.0051)
    ('99.6 %', '0.51 %')
    """
    return f"{100 * share:.3g} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _megabytes(table: SliceTable, way: DeliveryName, keys_per_client: int) -> str:
    size = table.bytes_of(way, keys_per_client) / 1e6
    text = f"{size:,.0f}" if size >= 100 else f"{size:.3g}"
    if way == "broadcast":
        return text
    times = 1 / table.share(way, keys_per_client)
    return f"{text} ({times:,.0f}x)" if times >= 10 else f"{text} ({times:.2g}x)"


def _table(rows: Sequence[Sequence[str]], names: int) -> str:
    """Rows as a Markdown table whose first columns hold names and the others numbers."""
    marks = ["---"] * names + ["---:"] * (len(rows[0]) - names)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (rows[0], marks, *rows[1:]))
