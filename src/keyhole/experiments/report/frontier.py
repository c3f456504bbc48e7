"""Draws the test metric against the size that clients hold (Figure 7), and the demo: a metric over
rounds, beside the same metric against what a client moves.

Labels are placed where they hide neither a point nor a line nor another label.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from keyhole.experiments.report.results import Costs, Series, SweepResults
from keyhole.experiments.report.style import (
    SeriesStyle,
    add_legend,
    draw_points,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
    series_styles,
    spans_decades,
)

Point: TypeAlias = tuple[float, float]
"""x and y, in data units or in pixels."""

# Offsets in points with the side of the text that touches the point, best first.
_OFFSETS: tuple[tuple[int, int, str, str], ...] = (
    (0, 8, "center", "bottom"),
    (0, -8, "center", "top"),
    (8, 0, "left", "center"),
    (-8, 0, "right", "center"),
    (6, 6, "left", "bottom"),
    (-6, 6, "right", "bottom"),
    (6, -6, "left", "top"),
    (-6, -6, "right", "top"),
    (0, 20, "center", "bottom"),
    (0, -20, "center", "top"),
    (12, 16, "left", "bottom"),
    (-12, 16, "right", "bottom"),
    (12, -16, "left", "top"),
    (-12, -16, "right", "top"),
)
_POINT = 6.0  # half the side, in pixels, of the box that a marker and its error bar take
_NEAR = 12.0  # pixels within which two points with one label need it once


def place_labels(
    axes: Axes,
    series: Sequence[Sequence[Point]],
    labels: Sequence[Sequence[str]],
    color: str,
    bars: Sequence[Sequence[Point]] = (),
) -> None:
    """Writes a label beside each point of each series, greedily at the first free offset.

    Args:
        axes: with limits and scales set, in a figure that is otherwise complete.
        series: the points of each line, in data units, in the order in which they are joined.
        labels: one for each point; a point near another with the same label gets none.
        bars: both ends of each, which labels keep off, too.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    # Settles the layout, so that pixels mean what they will mean in the file.
    figure.draw_without_rendering()
    to_pixels = axes.transData.transform
    lines = [[(float(x), float(y)) for x, y in map(to_pixels, points)] for points in series]
    marks = [Bbox([[x, y], [x, y]]).padded(_POINT) for points in lines for x, y in points]
    drawn = [*lines, *([(float(x), float(y)) for x, y in map(to_pixels, bar)] for bar in bars)]
    taken: list[Bbox] = []
    done: list[tuple[str, Point]] = []
    for points, pixels, names in zip(series, lines, labels, strict=True):
        for point, pixel, name in zip(points, pixels, names, strict=True):
            if not any(name == other and _is_near(pixel, at) for other, at in done):
                done.append((name, pixel))
                taken.append(_place(axes, point, name, color, marks + taken, drawn))


def _place(
    axes: Axes,
    point: Point,
    name: str,
    color: str,
    boxes: Sequence[Bbox],
    lines: Sequence[Sequence[Point]],
) -> Bbox:
    """Writes one label where it hides least and returns the box it takes."""
    text = axes.annotate(name, point, (0, 0), textcoords="offset points", fontsize=9, color=color)
    text.set_in_layout(False)
    costs = []
    for offset in _OFFSETS:
        box = _move(text, offset)
        costs.append(_cost(box, axes.bbox, boxes, lines))
        if costs[-1] == 0:
            return box
    return _move(text, _OFFSETS[costs.index(min(costs))])


def _move(text: Annotation, offset: tuple[int, int, str, str]) -> Bbox:
    """Puts a label at an offset and returns its box in pixels."""
    text.set_position(offset[:2])
    text.set(ha=offset[2], va=offset[3])
    return text.get_window_extent()


def _cost(box: Bbox, frame: Bbox, boxes: Sequence[Bbox], lines: Sequence[Sequence[Point]]) -> int:
    """How much a label at this box would hide; text on text is worst."""
    hidden = sum(box.overlaps(other) for other in boxes)
    crossed = sum(_crosses(box, a, b) for points in lines for a, b in pairwise(points))
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 <= box.y1 <= frame.y1
    return 10 * hidden + 3 * crossed + 20 * (not inside)


def _crosses(box: Bbox, start: Point, end: Point) -> bool:
    """Whether a segment runs through a box, tried at steps shorter than a letter."""
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]))
    steps = max(1, int(length / 4))
    return any(
        box.contains(
            start[0] + (end[0] - start[0]) * i / steps, start[1] + (end[1] - start[1]) * i / steps
        )
        for i in range(steps + 1)
    )


def _is_near(one: Point, other: Point) -> bool:
    return abs(one[0] - other[0]) < _NEAR and abs(one[1] - other[1]) < _NEAR


def draw_frontier(sweep: SweepResults) -> Figure:
    """Draws one series for each panel of the sweep; points carry the labels of its lines. A line
    without a finished trial has no point."""
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
        names = [sweep.starred(panel, *lines) for panel, lines in sweep.panels.items()]
        named, labels = _short_labels([[line.label for line in li] for li in shown.values()])
        note = f"at the points: {named}\n{sweep.note}" if named else sweep.note
        add_legend(figure, handles, names, note.rstrip())
        points = [[_point(line) for line in lines] for lines in shown.values()]
        place_labels(axes, points, labels, "#333333", _bars(shown.values()))
    return figure


def _bars(panels: Iterable[Sequence[Series]]) -> list[list[Point]]:
    """Both ends of the 95 % interval of each point that has one."""
    lines = [line for lines in panels for line in lines]
    ends = [(_point(line)[0], line.test.interval) for line in lines if line.test]
    return [[(x, interval[0]), (x, interval[1])] for x, interval in ends if interval]


def _short_labels(labels: list[list[str]]) -> tuple[str, list[list[str]]]:
    """What all labels name and the values alone, so that a label stays close to its point.

    >>> _short_labels([["alpha = 0.1", "alpha = 1"], ["alpha = 1"]])
    ('alpha', [['0.1', '1'], ['1']])
    """
    names = {label.partition(" = ")[0] for series in labels for label in series}
    if len(names) != 1 or not all(" = " in label for series in labels for label in series):
        return "", labels
    return names.pop(), [[label.partition(" = ")[2] for label in series] for series in labels]


def _shown(lines: Sequence[Series]) -> list[Series]:
    """The lines that have a point, by size."""
    finite = [li for li in lines if li.test is not None and math.isfinite(li.test.mean)]
    return sorted(finite, key=_point)


def _point(line: Series) -> Point:
    """Relative size and mean of the test metric of a line that has both."""
    assert line.test is not None
    assert line.relative_size is not None
    return line.relative_size, line.test.mean


def _finish_axes(axes: Axes, sweep: SweepResults) -> None:
    """Labels both axes and leaves room for the labels of the outermost points."""
    label_metric(axes, sweep.metric, "test")
    axes.set_xlabel("client size / server size")
    sizes = [line.relative_size for line in sweep.lines if line.relative_size]
    if spans_decades(sizes):
        axes.set_xscale("log")
        scale_sizes(axes.xaxis)
    axes.margins(x=0.08, y=0.14)


def draw_share(sweep: SweepResults) -> Figure:
    """Draws what is left of the test metric of each panel's largest model against the share of that
    model that clients hold, so that panels of different tasks and metrics stand in one figure."""
    styles = series_styles(list(sweep.panels))
    with drawing():
        figure = new_figure(height=5.0)
        axes = figure.subplots()
        handles = []
        for panel, lines in sweep.panels.items():
            left = [(line, sweep.share_left(line)) for line in lines if line.relative_size]
            xs = [line.relative_size or 0.0 for line, _ in left]
            handles.append(draw_points(axes, xs, [spread for _, spread in left], styles[panel]))
        axes.set_xlabel("client size / server size")
        axes.set_ylabel("test metric, of that of the whole model (%)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
        axes.margins(x=0.08, y=0.1)
        names = [sweep.starred(panel, *lines) for panel, lines in sweep.panels.items()]
        add_legend(figure, handles, names, sweep.note)
    return figure


def draw_bytes(sweep: SweepResults) -> Figure:
    """Draws the test metric against what a client moves in a round, a series for each panel of the
    sweep. A line without a finished trial has no point."""
    return _draw_against(
        sweep, lambda costs: costs.kilobytes, "KB per client and round, down and up"
    )


def draw_epsilon(sweep: SweepResults) -> Figure:
    """Draws the same against the epsilon that was spent; what has no bound has no point."""
    return _draw_against(sweep, lambda costs: costs.epsilon or math.inf, "epsilon spent")


def _draw_against(sweep: SweepResults, of: Callable[[Costs], float], x_label: str) -> Figure:
    styles = series_styles(list(sweep.panels))
    with drawing():
        figure = new_figure(height=4.4)
        axes = figure.subplots()
        handles = []
        for panel, lines in sweep.panels.items():
            points = [(of(line.costs), line.test) for line in lines if line.costs]
            finite = [(x, spread) for x, spread in points if math.isfinite(x)]
            xs, spreads = [x for x, _ in finite], [spread for _, spread in finite]
            handles.append(draw_points(axes, xs, spreads, styles[panel]))
        costs = [of(line.costs) for line in sweep.lines if line.costs]
        _finish_against(axes, sweep, list(filter(math.isfinite, costs)), x_label)
        names = [sweep.starred(panel, *lines) for panel, lines in sweep.panels.items()]
        add_legend(figure, handles, names, sweep.note)
    return figure


def _finish_against(axes: Axes, sweep: SweepResults, costs: list[float], x_label: str) -> None:
    axes.set_title(sweep.title)
    label_metric(axes, sweep.metric, "test")
    axes.set_xlabel(x_label)
    if spans_decades(costs):
        axes.set_xscale("log")
        scale_sizes(axes.xaxis, (1.0, 3.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.margins(x=0.08, y=0.1)


def draw_demo(
    curves: Mapping[str, Mapping[int, float]], points: Mapping[str, Point], metric: str
) -> Figure:
    """Draws two panels in which no line or label hides another.

    Args:
        curves: label -> rounds done -> value on validation data, one or more; no select is first.
        points: label -> KB that a client moves in a round and value on test data, in that order.
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
