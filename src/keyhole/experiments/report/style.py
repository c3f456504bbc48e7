"""Sets what figures share: colours, dashes, lines with bands, axes, and how a figure becomes files.

Series are told apart three times: by lightness (one colour map from dark to light, so the order
survives grey-scale printing and colour blindness), by marker, and by dashes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.textpath import text_to_path
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from keyhole.experiments.report.writing import is_share, metric_name, write_number
from keyhole.experiments.statistics import Spread
from keyhole.files import storage_errors

WIDTH = 8.0
"""Inches; 1200 pixels at `DOTS`."""
DOTS = 150

_LEGEND_SIZE = 10
_HANDLE_WIDTH = 6.2  # of a legend's handle and the space around it, in units of its font size
_ROWS, _ROW_HEIGHT = 3, 0.21  # of a legend that a figure has room for; inches of each further row
_MAX_LABEL = 70  # characters on one line of a legend

_MARKS = 8  # on one line; more would hide it
_LINE = 1.8  # points
_BAND = 3.0  # points that the first of several lines is wider than the last

_SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "errorbar.capsize": 3,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "font.family": ["DejaVu Sans"],  # comes with matplotlib, so every machine draws the same
    "font.size": 10,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": _LEGEND_SIZE,
    "lines.linewidth": _LINE,
    "lines.markersize": 6.5,
    "svg.fonttype": "path",
    "svg.hashsalt": "keyhole",
    "text.parse_math": False,  # a $ in somebody's label is a dollar
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
# Viridis above this is too pale for a line on white paper.
_LIGHTEST = 0.76


@dataclass(frozen=True)
class SeriesStyle:
    """How one series is drawn: a colour as #rrggbb, matplotlib's marker and line style."""

    color: str
    marker: str
    dashes: Any

    def line(self) -> dict[str, Any]:
        """Returns the arguments of `Axes.plot`."""
        return {
            "color": self.color,
            "linestyle": self.dashes,
            "marker": self.marker,
            "markeredgecolor": "white",  # so that marks on top of each other can be told apart
            "markeredgewidth": 0.7,
        }


def series_styles(names: Sequence[str]) -> dict[str, SeriesStyle]:
    """Returns a style for each name, from dark to light in their order."""
    colors = mpl.colormaps["viridis"]
    step = _LIGHTEST / max(1, len(names) - 1)
    return {
        name: SeriesStyle(
            to_hex(colors(i * step)), _MARKERS[i % len(_MARKERS)], _DASHES[i % len(_DASHES)]
        )
        for i, name in enumerate(names)
    }


@contextmanager
def drawing() -> Iterator[None]:
    """Holds matplotlib's settings at ours, whatever the user's own are, and gives them back."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        yield


def new_figure(height: float, width: float = WIDTH) -> Figure:
    """Returns an empty figure of a size in inches, bound to no window and no global state."""
    return Figure(figsize=(width, height), dpi=DOTS, layout="constrained")


def line_width(place: int, count: int) -> float:
    """Returns the width of the line at a place among others, in points: the first is the widest, so
    that each of several lines that coincide shows at the rims of the next."""
    return _LINE + _BAND * (1 - (place + 1) / count)


def draw_curve(
    axes: Axes,
    at: Sequence[float],
    spreads: Sequence[Spread],
    style: SeriesStyle,
    place: int,
    count: int,
) -> Line2D:
    """Draws the means and a band over their 95 % intervals, one of several lines.

    Lines that coincide stay visible: each shows at the rims of the next, and their marks are
    shifted against each other.

    Args:
        at: where each mean stands on the x axis.
        place: of the line among `count` others.
    """
    every = max(1, math.ceil(len(at) / _MARKS))
    means = [spread.mean for spread in spreads]
    marks = (int(place / count * every), every)
    (line,) = axes.plot(at, means, markevery=marks, **style.line())
    line.set_linewidth(line_width(place, count))
    halves = [spread.half_width or 0.0 for spread in spreads]
    if any(halves):
        low = [mean - half for mean, half in zip(means, halves, strict=True)]
        high = [mean + half for mean, half in zip(means, halves, strict=True)]
        axes.fill_between(at, low, high, color=style.color, alpha=0.18, linewidth=0)
    return line


def draw_points(
    axes: Axes,
    places: Sequence[float],
    spreads: Sequence[Spread | None],
    style: SeriesStyle,
) -> Line2D:
    """Joins the means that are there, with bars over their 95 % intervals; returns what a legend
    shows."""
    points = sorted(
        (x, spread.mean, spread.half_width or 0.0)
        for x, spread in zip(places, spreads, strict=True)
        if spread is not None and math.isfinite(spread.mean)
    )
    xs, ys = [x for x, _, _ in points], [y for _, y, _ in points]
    bars = [bar for _, _, bar in points]
    if any(bars):
        axes.errorbar(xs, ys, yerr=bars, color=style.color, linestyle="none", zorder=1.9)
    return axes.plot(xs, ys, **style.line())[0]


def label_metric(axes: Axes, metric: str, split: str) -> None:
    """Labels the y axis with a metric and where it was measured, in percent if it is a share."""
    name = f"{split} {metric_name(metric)}".strip()
    if is_share(metric):
        axes.set_ylabel(f"{name} (%)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    else:
        axes.set_ylabel(name)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether a log axis shows these better than a linear one.

    >>> spans_decades([100, 1000]), spans_decades([0.2, 1.0]), spans_decades([0, 1000])
    (True, False, False)
    """
    return bool(values) and min(values) > 0 and max(values) / min(values) >= 10


def scale_x(axes: Axes, values: Sequence[float]) -> None:
    """Puts ticks at the values themselves, on a log axis where they span decades."""
    places = sorted(set(values))
    if spans_decades(places):
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_thin(places, log=spans_decades(places))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_number(round(value, 9))))


def scale_sizes(axis: Axis, digits: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Puts ticks at these digits of each decade of a log axis, in plain numbers."""
    axis.set_major_locator(LogLocator(subs=digits, numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def _thin(places: Sequence[float], *, log: bool) -> list[float]:
    """Leaves out places whose labels would run into one another; the last one always stays."""
    room = (places[-1] / places[0]) ** 0.09 if log else (places[-1] - places[0]) * 0.09
    kept = [places[-1]]
    for place in reversed(places[:-1]):
        gap = kept[-1] / place if log else kept[-1] - place
        if gap >= room:
            kept.append(place)
    return kept[::-1]


def add_legend(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], note: str = ""
) -> None:
    """Puts the legend under the axes, where no line can run through it; a note, such as what a star
    means, stands above the series. The figure's constrained layout makes the room."""
    if not any(labels):
        if not note:
            return
        handles, labels = (), ()  # one series without a name: the note alone
    room = 72 * figure.get_figwidth() - 2 * _LEGEND_SIZE  # points
    names = [textwrap.fill(label, _MAX_LABEL) for label in labels]
    widest = max(map(_text_width, names), default=0.0) + _HANDLE_WIDTH * _LEGEND_SIZE
    columns = max(1, min(len(names), int(room // widest)))
    rows = math.ceil(len(names) / columns)
    figure.set_figheight(figure.get_figheight() + _ROW_HEIGHT * max(0, rows - _ROWS))
    figure.legend(
        handles,
        names,
        loc="outside lower center",
        ncols=columns,
        title=note or None,
        title_fontsize=9,
        handlelength=3.2,
    )


def _text_width(text: str) -> float:
    """Points that the widest line of a text takes in a legend."""
    font = FontProperties(family="DejaVu Sans", size=_LEGEND_SIZE)
    sizes = [text_to_path.get_text_width_height_descent(t, font, False) for t in text.split("\n")]
    return max((width for width, _, _ in sizes), default=0.0)


def save_figure(figure: Figure, path_stem: Path | str) -> list[Path]:
    """Writes a figure as PNG and SVG and returns the two paths; the same figure gives the same
    bytes. `path_stem` is the path without its ending."""
    stem = Path(path_stem)
    png, svg = stem.with_name(stem.name + ".png"), stem.with_name(stem.name + ".svg")
    with drawing(), storage_errors(png, "write"):
        figure.savefig(png, format="png", metadata={"Software": None})
    return [png, save_svg(figure, svg)]


def save_svg(figure: Figure, path: Path) -> Path:
    """Writes a figure as SVG, the same figure as the same bytes, and returns its path."""
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with drawing(), storage_errors(path, "write"):
        figure.savefig(path, format="svg", metadata=nothing)
    return path
