"""Draws the demo: a metric over rounds, beside the same metric against what a client moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from keyhole.experiments.report.frontier import Point, place_labels
from keyhole.experiments.report.style import (
    SeriesStyle,
    drawing,
    label_metric,
    new_figure,
    series_styles,
)


def draw_demo(
    curves: Mapping[str, Mapping[int, float]], points: Mapping[str, Point], metric: str
) -> Figure:
    """Draws two panels in which no line or label hides another.

    Args:
        curves: label -> rounds done -> value on validation data, one or more; no select is first.
        points: label -> KB that a client moves in a round and value on test data, in that order.
        metric: for the y axes.

    Returns:
        A figure for `save_figure`.
    """
    styles = series_styles(list(curves))
    with drawing():
        figure = new_figure(height=4.0, width=10.5)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_rounds(left, curves, styles)
        label_metric(left, metric, "validation")
        _draw_saving(right, points, styles)
        label_metric(right, metric, "test")
        _label_ends(figure, left, curves, styles)
        place_labels(right, [list(points.values())], [_savings(points)], "#333333")
    return figure


def _draw_rounds(
    axes: Axes, curves: Mapping[str, Mapping[int, float]], styles: Mapping[str, SeriesStyle]
) -> None:
    """Draws a line for each arm; the first is a pale band, so that one equal to it shows."""
    for i, (label, curve) in enumerate(curves.items()):
        look = {**styles[label].line(), "markevery": (min(i, len(curve) - 1), 4)}
        if i == 0:
            look |= {"linewidth": 8.0, "markersize": 13.0, "alpha": 0.3}
        axes.plot(list(curve), list(curve.values()), **look)
    axes.set_title("recall over rounds")
    axes.set_xlabel("rounds")
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))


def _draw_saving(
    axes: Axes, points: Mapping[str, Point], styles: Mapping[str, SeriesStyle]
) -> None:
    """Draws a point for each arm at what a client moves and what the model reaches."""
    axes.plot(*zip(*points.values(), strict=True), color="#bbbbbb", linewidth=1.0, zorder=1)
    for label, (x, y) in points.items():
        axes.plot([x], [y], **styles[label].line() | {"markersize": 10})
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.25, y=0.12)
    axes.set_title("recall against what a client moves")
    axes.set_xlabel("KB per client and round, down and up")
    axes.tick_params(labelleft=True)  # sharing the axis took it away


def _savings(points: Mapping[str, Point]) -> list[str]:
    """Name, KB, and how much less that is than the first.

    >>> _savings({"no select": (3200.0, 0.9), "own": (800.0, 0.9)})
    ['no select\\n3,200 KB', 'own\\n800 KB, 75% less']
    """
    whole = next(iter(points.values()))[0]
    less = {
        label: f", {1 - x / whole:.0%} less" if x < whole else ""
        for label, (x, _) in points.items()
    }
    return [f"{label}\n{x:,.0f} KB{less[label]}" for label, (x, _) in points.items()]


def _label_ends(
    figure: Figure,
    axes: Axes,
    curves: Mapping[str, Mapping[int, float]],
    styles: Mapping[str, SeriesStyle],
) -> None:
    """Writes the name of each line at its end; names of lines that meet stand one above another."""
    figure.draw_without_rendering()  # settles the layout, so that points have their places
    ends = {label: list(curve.items())[-1] for label, curve in curves.items()}
    ranked = sorted(ends, key=lambda label: ends[label][1])
    heights = [axes.transData.transform(ends[label])[1] * 72 / figure.dpi for label in ranked]
    for label, at, height in zip(ranked, _spread_out(heights, 13.0), heights, strict=True):
        axes.annotate(
            f"{label} (band)" if label == next(iter(curves)) else label,
            ends[label],
            (10, at - height),
            textcoords="offset points",
            va="center",
            color=styles[label].color,
            weight="bold",
            annotation_clip=False,
        )


def _spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Ascending places moved apart to a min gap, by nothing on average.

    >>> _spread_out([10.0, 50.0, 50.0], 12.0)
    [6.0, 46.0, 58.0]
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    shift = (sum(moved) - sum(places)) / len(moved)
    return [place - shift for place in moved]
