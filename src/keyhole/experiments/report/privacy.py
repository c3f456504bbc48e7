"""Computes what select saves against what hiding the keys costs, and draws it.

This is the evaluation that the paper leaves to future work (its section 6). It needs no runs: every
number follows from K, m and the length of a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf, log10
from types import MappingProxyType
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from keyhole.delivery.base import DeliveryAbout
from keyhole.delivery.clear import Broadcast, Pregenerated
from keyhole.errors import InputError
from keyhole.experiments.report.style import (
    SeriesStyle,
    add_legend,
    drawing,
    new_figure,
    series_styles,
)
from keyhole.experiments.report.writing import markdown_table
from keyhole.planner.prices import break_even, price_all, price_of
from keyhole.pricing import Workload

_WHOLE, _CLEAR = Broadcast().about.name, Pregenerated().about.name
_TYPICAL = Workload(num_keys=10_000, keys_per_client=100, slice_bytes=2_000, cohort=1)


def _compared() -> Iterator[DeliveryAbout]:
    """Slices in the clear, then private deliveries by the bytes that a client sends and receives.
    Slices on demand send what pregenerated ones do."""
    yield Pregenerated().about
    hiding = [price for price in price_all(_TYPICAL) if price.about.is_private]
    yield from (price.about for price in sorted(hiding, key=lambda price: price.bytes_total))


LABELS: Mapping[str, str] = MappingProxyType({about.name: about.title for about in _compared()})
"""What is compared with broadcast: the name of a delivery -> its title."""

_NUM_KEYS = (10_000, 100_000, 1_000_000)
_POINTS = 100  # of a line
_EXAMPLES = (100, 1_000, 10_000)


@dataclass(frozen=True)
class PriceTable:
    """One table of slices: K of them, and the bytes of one.

    >>> round(PriceTable(10_000, 2_000).kept("pir", 1_000), 1)
    0.8
    """

    num_keys: int
    slice_bytes: int

    @cached_property
    def break_even(self) -> Mapping[str, int]:
        """Way -> the max keys per client for which it sends no more than broadcast."""
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

    def bytes_of(self, way: str, keys_per_client: int) -> float:
        """Both directions, of one client; infinite beyond the limits of a way's messages."""
        load = Workload(self.num_keys, keys_per_client, self.slice_bytes, cohort=1)
        try:
            return price_of(way, load).bytes_total
        except InputError:
            return inf

    def share(self, way: str, keys_per_client: int) -> float:
        """Bytes over those of broadcast."""
        return self.bytes_of(way, keys_per_client) / self.bytes_of(_WHOLE, keys_per_client)

    def kept(self, way: str, keys_per_client: int) -> float:
        """How much of the bytes that select in the clear saves is still saved; below zero where a
        way sends more than broadcast."""
        whole, clear, sent = (
            self.bytes_of(name, keys_per_client) for name in (_WHOLE, _CLEAR, way)
        )
        # Naming nearly all keys costs more than it saves.
        return (whole - sent) / (whole - clear) if whole > clear else 0.0


def slice_tables(slice_bytes: int = 2_000) -> tuple[PriceTable, ...]:
    """Returns the tables that are compared, of ten thousand to a million slices; a slice has 500
    numbers, as in the paper's task of tags."""
    return tuple(PriceTable(num_keys, slice_bytes) for num_keys in _NUM_KEYS)


def to_markdown(tables: Sequence[PriceTable]) -> str:
    """Returns two tables: where each way stops saving, and what it sends before."""
    slice_bytes = f"{tables[0].slice_bytes:,}"
    ends = [("way", *(f"K = {table.num_keys:,}" for table in tables))]
    for way, label in LABELS.items():
        found = [(table.break_even[way], table.num_keys) for table in tables]
        ends.append((label, *(f"{end:,} ({write_percent(end / k)})" for end, k in found)))
    sent = [("K", "m", Broadcast().about.title, *LABELS.values())]
    sent += [
        (f"{table.num_keys:,}", f"{m:,}", *(_megabytes(table, way, m) for way in _all_ways()))
        for table in tables
        for m in table.examples
    ]
    return (
        "The max number of keys per client (m) for which a delivery sends no more than broadcast, "
        f"with slices of {slice_bytes} bytes:\n\n{markdown_table(ends, 1)}\n"
        "What a client sends and receives in a round, in MB, and in brackets how many times less "
        f"than broadcast:\n\n{markdown_table(sent, 0)}"
    )


def to_json(tables: Sequence[PriceTable]) -> list[dict[str, Any]]:
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


def _all_ways() -> list[str]:
    return [_WHOLE, *LABELS]


def write_percent(share: float) -> str:
    """Returns a share in percent, with two digits where it is small.

    >>> write_percent(0.996), write_percent(0.0051)
    ('99.6 %', '0.51 %')
    """
    return f"{100 * share:.3g} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _megabytes(table: PriceTable, way: str, keys_per_client: int) -> str:
    size = table.bytes_of(way, keys_per_client) / 1e6
    text = f"{size:,.0f}" if size >= 100 else f"{size:.3g}"
    if way == _WHOLE:
        return text
    times = 1 / table.share(way, keys_per_client)
    return f"{text} ({times:,.0f}x)" if times >= 10 else f"{text} ({times:.2g}x)"


_MARKS = 6  # on one line
_LOWEST = 5e-7  # a key of a million
_HIGHEST = 30.0  # times broadcast: beyond it there is nothing to choose
_NOTED: Mapping[str, str] = MappingProxyType(
    {
        about.name: {1: "one server", 2: "two servers"}[about.servers]
        for about in _compared()
        if about.route == "queries"
    }
)
_INK = "#333333"


def draw_privacy(tables: Sequence[PriceTable]) -> Figure:
    """Draws, for each table, bytes relative to broadcast over m, and what is left of the saving.

    Rings and numbers show the break-even points: from there on, broadcast sends less.
    """
    styles = series_styles(list(LABELS))
    with drawing():
        figure = new_figure(height=6.9)
        grid = figure.subplots(2, len(tables), sharex="col", sharey="row", squeeze=False)
        handles: list[Artist] = []
        for column, table in enumerate(tables):
            handles = _draw_bytes(grid[0][column], table, styles)
            _draw_kept(grid[1][column], table, styles)
        grid[0][0].set_ylabel("bytes of a client / broadcast")
        grid[1][0].set_ylabel("left of select's saving (%)")
        note = f"slices of {tables[0].slice_bytes:,} bytes; a ring is where broadcast gets cheaper"
        add_legend(figure, handles, list(LABELS.values()), note)
    return figure


def _draw_bytes(axes: Axes, table: PriceTable, styles: Mapping[str, SeriesStyle]) -> list[Artist]:
    """The upper panel; returns what a legend shows."""
    axes.set_title(f"K = {table.num_keys:,}")
    axes.axhline(1, color=_INK, linewidth=1)
    handles = []
    for place, way in enumerate(LABELS):
        shares = [table.share(way, m) for m in table.keys_per_client]
        handles.append(_draw_line(axes, table.keys_per_client, shares, styles[way], place))
    _mark_ends(axes, table, styles, height=1)
    ends = "\n".join(f"{table.break_even[way]:,}  {name}" for way, name in _NOTED.items())
    axes.text(
        0.98,
        0.03,
        f"saves up to m =\n{ends}",
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        fontsize=8,
        color=_INK,
        linespacing=1.35,
    )
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.yaxis.set_major_locator(LogLocator(numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_write_power))
    return handles


def _draw_kept(axes: Axes, table: PriceTable, styles: Mapping[str, SeriesStyle]) -> None:
    """The lower panel."""
    # Beyond that, naming keys costs more than select saves.
    limit = table.break_even[_CLEAR]
    places = [m for m in table.keys_per_client if m <= limit]
    for place, way in enumerate(LABELS):
        kept = [100 * table.kept(way, m) for m in places]
        _draw_line(axes, places, kept, styles[way], place)
    _mark_ends(axes, table, styles, height=0)
    axes.set_ylim(-4, 105)
    axes.set_xscale("log")
    axes.set_xlim(1, table.num_keys)
    axes.xaxis.set_major_locator(LogLocator(numticks=12))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(_write_power))
    axes.set_xlabel("keys per client (m)")


def _draw_line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], style: SeriesStyle, place: int
) -> Artist:
    """A line whose marks are shifted against those of the others."""
    every = max(1, len(xs) // _MARKS)
    marks = (place * every // len(LABELS), every)
    return axes.plot(xs, ys, markevery=marks, **{**style.line(), "markersize": 5})[0]


def _mark_ends(
    axes: Axes, table: PriceTable, styles: Mapping[str, SeriesStyle], height: float
) -> None:
    """A ring at each break-even point."""
    for way in _NOTED:
        axes.plot(
            table.break_even[way],
            height,
            marker="o",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=styles[way].color,
            markeredgewidth=1.6,
            zorder=5,
        )


def _write_power(value: float, _: object) -> str:
    """A power of ten, short enough for three panels: 1e-4, 0.01, 100, 10k."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}" if value >= 0.01 else f"1e{round(log10(value))}"
