"""Curves: a metric over rounds, one panel beside the other, as Figures 2, 4, 5 and 6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from keyhole.report.results import Sweep
from keyhole.report.spread import Curve
from keyhole.report.style import (
    SeriesStyle,
    add_legend,
    drawing,
    label_metric,
    new_figure,
    series_styles,
)
from keyhole.report.wording import write_number

__all__ = ["INCOMPLETE", "draw_curves", "draw_sweep_curves"]

INCOMPLETE = "* some trials are missing or unfinished: see the table"
_PANELS_IN_A_ROW = 3
_MARKS = 8  # on one line; more would hide it


def draw_curves(
    panels: Mapping[str, Mapping[str, Curve]],
    metric: str,
    *,
    split: str = "",
    incomplete: Sequence[str] = (),
) -> Figure:
    """Draws a dark line at the mean and a shade of one deviation to each side.

    Args:
        panels: title of a panel -> label -> curve; `mean_curve` makes curves from runs.
        metric: for the y axis; shares are drawn in percent.
        split: of the data, such as "validation", for the y axis.
        incomplete: labels that get a star, because trials are missing.

    Returns:
        A figure for `save_figure`.
    """
    labels = list(dict.fromkeys(label for lines in panels.values() for label in lines))
    styles = series_styles(labels)
    with drawing():
        rows, columns = _shape(len(panels))
        figure = new_figure(height=0.9 + (3.4 if columns == 1 else 2.9) * rows)
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        handles: dict[str, Artist] = {}
        for axes, (title, lines) in zip(grid.flat, panels.items(), strict=False):
            axes.set_title(title)
            for label, curve in lines.items():
                shift = labels.index(label) / len(labels)
                handles.setdefault(label, _draw_curve(axes, curve, styles[label], shift))
            if not any(curve.rounds for curve in lines.values()):
                axes.text(0.5, 0.5, "not evaluated yet", ha="center", transform=axes.transAxes)
        _finish_axes(figure, list(grid.flat), len(panels), columns, metric, split)
        names = [f"{label} *" if label in incomplete else label for label in labels]
        note = INCOMPLETE if incomplete else ""
        add_legend(figure, [handles[label] for label in labels], names, note)
    return figure


def draw_sweep_curves(sweep: Sweep) -> Figure:
    """Draws the curves of a sweep; a line that has none yet is in the legend only."""
    panels = {
        panel: {line.label: line.curve for line in lines} for panel, lines in sweep.panels.items()
    }
    incomplete = [line.label for line in sweep.lines if not sweep.is_complete(line)]
    return draw_curves(panels, sweep.metric, split=sweep.split, incomplete=incomplete)


def _shape(panels: int) -> tuple[int, int]:
    """Rows and columns that leave the fewest places empty: four panels are two by two."""
    rows = max(1, ceil(panels / _PANELS_IN_A_ROW))
    return rows, max(1, ceil(panels / rows))


def _draw_curve(axes: Axes, curve: Curve, style: SeriesStyle, shift: float) -> Artist:
    """Draws one line and its shade; marks of different lines are shifted against each other."""
    every = max(1, ceil(len(curve.rounds) / _MARKS))
    marks = (int(shift * every), every)
    line = axes.plot(curve.rounds, curve.mean, markevery=marks, **style.line())[0]
    low = [m - d for m, d in zip(curve.mean, curve.deviation, strict=True)]
    high = [m + d for m, d in zip(curve.mean, curve.deviation, strict=True)]
    axes.fill_between(curve.rounds, low, high, color=style.color, alpha=0.18, linewidth=0)
    return line


def _finish_axes(
    figure: Figure, axes: Sequence[Axes], used: int, columns: int, metric: str, split: str
) -> None:
    """Labels the outer axes and removes the places that no panel fills."""
    for i, ax in enumerate(axes):
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_number(value)))
        if i % columns == 0:
            label_metric(ax, metric, split)
        if i + columns >= used:
            ax.set_xlabel("rounds")
            ax.tick_params(labelbottom=True)
        if i >= used:
            figure.delaxes(ax)
