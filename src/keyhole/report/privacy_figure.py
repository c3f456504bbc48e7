"""The figure that the paper leaves to future work: select's saving against the cost of privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from types import MappingProxyType

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from keyhole.delivery.names import DeliveryName
from keyhole.report.privacy import LABELS, SliceTable
from keyhole.report.style import SeriesStyle, add_legend, drawing, new_figure, series_styles

__all__ = ["draw_privacy"]

_MARKS = 6  # on one line
_LOWEST = 5e-7  # a key of a million
_HIGHEST = 30.0  # times broadcast: beyond it there is nothing to choose
_NOTED: Mapping[DeliveryName, str] = MappingProxyType(
    {"pir": "two servers", "pir-chor": "Chor", "pir-one-server": "one server"}
)
_INK = "#333333"


def draw_privacy(tables: Sequence[SliceTable]) -> Figure:
    """Draws, for each table, bytes relative to broadcast over m, and what is left of the saving.

    Rings and numbers show the break-even points: from there on, broadcast sends less.

    Returns:
        A figure for `save_figure`.
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


def _draw_bytes(axes: Axes, table: SliceTable, styles: Mapping[str, SeriesStyle]) -> list[Artist]:
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


def _draw_kept(axes: Axes, table: SliceTable, styles: Mapping[str, SeriesStyle]) -> None:
    """The lower panel."""
    # Beyond that, naming keys costs more than select saves.
    most = table.break_even["pregenerated"]
    places = [m for m in table.keys_per_client if m <= most]
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
    axes.set_xlabel("keys a client (m)")


def _draw_line(
    axes: Axes, xs: Sequence[float], ys: Sequence[float], style: SeriesStyle, place: int
) -> Artist:
    """A line whose marks are shifted against those of the others."""
    every = max(1, len(xs) // _MARKS)
    marks = (place * every // len(LABELS), every)
    return axes.plot(xs, ys, markevery=marks, **{**style.line(), "markersize": 5})[0]


def _mark_ends(
    axes: Axes, table: SliceTable, styles: Mapping[str, SeriesStyle], height: float
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
