"""Draws one metric of several runs over rounds or bytes, with 95 % intervals over trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from keyhole.errors import InputError
from keyhole.experiments.report.results import INTERVALS
from keyhole.experiments.report.style import (
    WIDTH,
    add_legend,
    draw_curve,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
    series_styles,
    spans_decades,
)
from keyhole.experiments.report.writing import write_number
from keyhole.experiments.statistics import Spread
from keyhole.files import make_directory, storage_errors

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "KB"), (1.0, "bytes"))
Drawing: TypeAlias = Figure
"""What drawing functions return: matplotlib's figure, bound to no window."""
ENDINGS = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class PlacedCurve:
    """A metric of a run, wherever it was measured.

    Args:
        at: rounds done, or bytes moved, ascending.
        spreads: the metric over trials at each of them.
    """

    at: tuple[float, ...]
    spreads: tuple[Spread, ...]


def draw_comparison(curves: Mapping[str, PlacedCurve], metric: str, against: str) -> Drawing:
    """Draws a line at the mean of each run and a shade over the 95 % interval of that mean.

    Args:
        curves: label -> curve.
        metric: for the y axis.
        against: "rounds" or "bytes".
    """
    styles = series_styles(list(curves))
    unit, name = _unit(curves) if against == "bytes" else (1.0, "rounds")
    with drawing():
        figure = new_figure(height=4.4, width=0.8 * WIDTH)
        axes = figure.subplots()
        handles = [
            draw_curve(
                axes,
                [x / unit for x in curve.at],
                curve.spreads,
                styles[label],
                place,
                len(curves),
            )
            for place, (label, curve) in enumerate(curves.items())
        ]
        label_metric(axes, metric, "")
        if against == "bytes":
            axes.set_xlabel(f"{name} that a client has received and sent")
            _scale_bytes(axes, [curve.at[-1] / unit for curve in curves.values()])
        else:
            axes.set_xlabel(name)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_number(value)))
        has_band = any(spread.half_width for curve in curves.values() for spread in curve.spreads)
        note = INTERVALS if has_band else ""
        if note or len(curves) > 1:
            add_legend(figure, handles, list(curves), note)
    return figure


def _unit(curves: Mapping[str, PlacedCurve]) -> tuple[float, str]:
    """The largest unit of bytes in which the shortest line ends at 1 or more."""
    end = min(curve.at[-1] for curve in curves.values())
    return next((unit for unit in _UNITS if end >= unit[0]), _UNITS[-1])


def _scale_bytes(axes: Axes, ends: list[float]) -> None:
    """A log axis where the runs end at very different costs, else from zero."""
    if spans_decades(ends):
        axes.set_xscale("log")
        scale_sizes(axes.xaxis, (1.0, 3.0))
    else:
        axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def write_figure(figure: Figure, path: Path | str) -> Path:
    """Writes a figure as its ending says; the same figure gives the same bytes.

    Raises:
        InputError: the ending is unknown.
    """
    path = Path(path)
    if path.suffix not in ENDINGS:
        raise InputError(
            f"a figure cannot be written as that: got {path.name}; expected a name that ends in "
            f"{', '.join(ENDINGS)}; choose one of them"
        )
    make_directory(path.parent)
    nothing = {
        ".png": ("Software",),
        ".svg": ("Creator", "Date", "Format", "Type"),
        ".pdf": ("Creator", "Producer", "CreationDate"),
    }
    with drawing(), storage_errors(path, "write"):
        figure.savefig(path, metadata=dict.fromkeys(nothing[path.suffix]))
    return path
