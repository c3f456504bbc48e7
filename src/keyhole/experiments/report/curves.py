"""Draws a metric over rounds (Figures 2, 4, 5, 6), and its final value over a sweep (Figure 3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from keyhole.experiments.report.results import Series, SweepResults
from keyhole.experiments.report.spread import Curve, write_number
from keyhole.experiments.report.style import (
    SeriesStyle,
    add_legend,
    draw_points,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
    scale_x,
    series_styles,
    spans_decades,
)

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


def draw_sweep_curves(sweep: SweepResults) -> Figure:
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


def draw_final(sweep: SweepResults) -> Figure:
    """Draws one series for each panel of the sweep: left its sizes, right its test metric.

    Returns:
        A figure for `save_figure`. Lines without x stand side by side under their labels.
    """
    styles = series_styles(list(sweep.panels))
    places = _places(sweep)
    with drawing():
        figure = new_figure(height=3.9)
        left, right = figure.subplots(1, 2)
        handles: list[Artist] = []
        for panel, lines in sweep.panels.items():
            handles.append(_draw_sizes(left, lines, places, styles[panel]))
            spreads = [line.test for line in lines]
            draw_points(right, [places[line] for line in lines], spreads, styles[panel])
        _finish_sizes(left, sweep.lines)
        label_metric(right, sweep.metric, "test")
        for axes in (left, right):
            _finish_x(axes, sweep, places)
        _explain(figure, sweep, handles)
    return figure


def _places(sweep: SweepResults) -> dict[Series, float]:
    """Line -> where it stands: at its x, or at the rank of its label if some line has no x."""
    if _has_x(sweep):
        return {line: line.x for line in sweep.lines if line.x is not None}
    labels = list(dict.fromkeys(line.label for line in sweep.lines))
    return {line: float(labels.index(line.label)) for line in sweep.lines}


def _has_x(sweep: SweepResults) -> bool:
    """Whether every line has an x."""
    return all(line.x is not None for line in sweep.lines)


def _draw_sizes(
    axes: Axes, lines: Sequence[Series], places: dict[Series, float], style: SeriesStyle
) -> Artist:
    """Draws the relative sizes of one panel."""
    points = sorted((places[li], li.relative_size) for li in lines if li.relative_size)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return axes.plot(xs, ys, **style.line())[0]


def _finish_sizes(axes: Axes, lines: Sequence[Series]) -> None:
    """Labels the axis of sizes; log where they span decades, else from zero."""
    axes.set_ylabel("client size / server size")
    if spans_decades([line.relative_size for line in lines if line.relative_size]):
        axes.set_yscale("log")
        scale_sizes(axes.yaxis)
    else:
        axes.set_ylim(0, 1.05)


def _finish_x(axes: Axes, sweep: SweepResults, places: dict[Series, float]) -> None:
    """Labels the x axis with values, or with labels where lines have no x."""
    axes.set_xlabel(sweep.x_label)
    if _has_x(sweep):
        scale_x(axes, list(places.values()))
        return
    labels = list(dict.fromkeys(line.label for line in sweep.lines))
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(labels)))))
    axes.set_xticklabels(labels, rotation=20 if len(labels) > 3 else 0)
    axes.set_xlim(-0.4, len(labels) - 0.6)


def _explain(figure: Figure, sweep: SweepResults, handles: Sequence[Artist]) -> None:
    """Adds the legend, with stars at panels whose trials are not all there."""
    names = [
        panel if all(map(sweep.is_complete, lines)) else f"{panel} *"
        for panel, lines in sweep.panels.items()
    ]
    incomplete = not all(map(sweep.is_complete, sweep.lines))
    add_legend(figure, handles, names, INCOMPLETE if incomplete else "")
