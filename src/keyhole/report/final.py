"""Final: relative client size and test metric over the sweep's x, as Figure 3."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from keyhole.report.curves import INCOMPLETE
from keyhole.report.results import Line, Sweep
from keyhole.report.style import (
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

__all__ = ["draw_final"]


def draw_final(sweep: Sweep) -> Figure:
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


def _places(sweep: Sweep) -> dict[Line, float]:
    """Line -> where it stands: at its x, or at the rank of its label if some line has no x."""
    if _has_x(sweep):
        return {line: line.x for line in sweep.lines if line.x is not None}
    labels = list(dict.fromkeys(line.label for line in sweep.lines))
    return {line: float(labels.index(line.label)) for line in sweep.lines}


def _has_x(sweep: Sweep) -> bool:
    """Whether every line has an x."""
    return all(line.x is not None for line in sweep.lines)


def _draw_sizes(
    axes: Axes, lines: Sequence[Line], places: dict[Line, float], style: SeriesStyle
) -> Artist:
    """Draws the relative sizes of one panel."""
    points = sorted((places[li], li.relative_size) for li in lines if li.relative_size)
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return axes.plot(xs, ys, **style.line())[0]


def _finish_sizes(axes: Axes, lines: Sequence[Line]) -> None:
    """Labels the axis of sizes; log where they span decades, else from zero."""
    axes.set_ylabel("client size / server size")
    if spans_decades([line.relative_size for line in lines if line.relative_size]):
        axes.set_yscale("log")
        scale_sizes(axes.yaxis)
    else:
        axes.set_ylim(0, 1.05)


def _finish_x(axes: Axes, sweep: Sweep, places: dict[Line, float]) -> None:
    """Labels the x axis with values, or with labels where lines have no x."""
    axes.set_xlabel(sweep.x_label)
    if _has_x(sweep):
        scale_x(axes, list(places.values()))
        return
    labels = list(dict.fromkeys(line.label for line in sweep.lines))
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(labels)))))
    axes.set_xticklabels(labels, rotation=20 if len(labels) > 3 else 0)
    axes.set_xlim(-0.4, len(labels) - 0.6)


def _explain(figure: Figure, sweep: Sweep, handles: Sequence[Artist]) -> None:
    """Adds the legend, with stars at panels whose trials are not all there."""
    names = [
        panel if all(map(sweep.is_complete, lines)) else f"{panel} *"
        for panel, lines in sweep.panels.items()
    ]
    incomplete = not all(map(sweep.is_complete, sweep.lines))
    add_legend(figure, handles, names, INCOMPLETE if incomplete else "")
