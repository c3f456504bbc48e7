"""Frontier: the test metric against the size that clients hold, as Figure 7."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from keyhole.report.curves import INCOMPLETE
from keyhole.report.placing import Point, place_labels
from keyhole.report.results import Line, Sweep
from keyhole.report.style import (
    add_legend,
    draw_points,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
    series_styles,
    spans_decades,
)

__all__ = ["draw_frontier"]


def draw_frontier(sweep: Sweep) -> Figure:
    """Draws one series for each panel of the sweep; points carry the labels of its lines.

    Returns:
        A figure for `save_figure`. A line without a finished trial has no point.
    """
    styles = series_styles(list(sweep.panels))
    shown = {panel: _shown(lines) for panel, lines in sweep.panels.items()}
    with drawing():
        figure = new_figure(height=5.0)
        axes = figure.subplots()
        handles = [
            draw_points(axes, [_point(li)[0] for li in lines], [li.test for li in lines], style)
            for lines, style in zip(shown.values(), styles.values(), strict=True)
        ]
        _finish_axes(axes, sweep)
        complete = {p: all(map(sweep.is_complete, lines)) for p, lines in sweep.panels.items()}
        names = [panel if complete[panel] else f"{panel} *" for panel in shown]
        named, labels = _short_labels([[line.label for line in li] for li in shown.values()])
        notes = [f"at the points: {named}"] * bool(named)
        notes += [INCOMPLETE] * (not all(complete.values()))
        add_legend(figure, handles, names, "\n".join(notes))
        points = [[_point(line) for line in lines] for lines in shown.values()]
        place_labels(axes, points, labels, "#333333")
    return figure


def _short_labels(labels: list[list[str]]) -> tuple[str, list[list[str]]]:
    """What all labels name and the values alone, so that a label stays close to its point.

    >>> _short_labels([["alpha = 0.1", "alpha = 1"], ["alpha = 1"]])
    ('alpha', [['0.1', '1'], ['1']])
    """
    names = {label.partition(" = ")[0] for series in labels for label in series}
    if len(names) != 1 or not all(" = " in label for series in labels for label in series):
        return "", labels
    return names.pop(), [[label.partition(" = ")[2] for label in series] for series in labels]


def _shown(lines: Sequence[Line]) -> list[Line]:
    """The lines that have a point, by size."""
    finite = [li for li in lines if li.test is not None and math.isfinite(li.test.mean)]
    return sorted(finite, key=_point)


def _point(line: Line) -> Point:
    """Relative size and mean of the test metric of a line that has both."""
    assert line.test is not None
    assert line.relative_size is not None
    return line.relative_size, line.test.mean


def _finish_axes(axes: Axes, sweep: Sweep) -> None:
    """Labels both axes and leaves room for the labels of the outermost points."""
    label_metric(axes, sweep.metric, "test")
    axes.set_xlabel("client size / server size")
    sizes = [line.relative_size for line in sweep.lines if line.relative_size]
    if spans_decades(sizes):
        axes.set_xscale("log")
        scale_sizes(axes.xaxis)
    axes.margins(x=0.08, y=0.14)
