"""Draws every kind of figure that a sweep may ask for, and runs of `keyhole train`.

Curves show a metric over rounds (Figures 2, 4, 5, 6), final its last value over a sweep (Figure 3),
frontier the metric against size (Figure 7), bytes and epsilon against what a client moves
and what its privacy costs, share what is left of it against the share of the model that clients
hold, reached over what a sweep varies. A grid is a heat map over client and
server learning rate, to tune them as section 5.1 does. Runs show each metric over rounds, and
against bytes.

A figure is matplotlib's `Figure` without a window or a current state; `save_figure` writes it as
PNG and SVG with the same bytes for the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

import matplotlib as mpl
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from matplotlib.transforms import ScaledTranslation

from keyhole.errors import InputError
from keyhole.experiments.report.frontier import (
    draw_bytes,
    draw_epsilon,
    draw_frontier,
    draw_share,
)
from keyhole.experiments.report.results import (
    INCOMPLETE,
    INTERVALS,
    OVERVIEW,
    Curve,
    Series,
    SweepResults,
    join_notes,
)
from keyhole.experiments.report.style import (
    WIDTH,
    SeriesStyle,
    add_legend,
    draw_curve,
    draw_points,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
    scale_x,
    series_styles,
    spans_decades,
)
from keyhole.experiments.report.writing import (
    NOTHING,
    is_share,
    metric_name,
    shorten_names,
    write_number,
)
from keyhole.experiments.statistics import Spread

_PANELS_IN_A_ROW = 3
_NEAR = 6.0  # pixels within which points hide each other
_STEP = 8.0  # points between the marks of such points, side by side


def draw_curves(
    panels: Mapping[str, Mapping[str, Curve]],
    metric: str,
    *,
    split: str = "",
    incomplete: Sequence[str] = (),
    empty: str = "not evaluated yet",
) -> Figure:
    """Draws a line at the mean and a shade over its 95 % interval.

    Args:
        panels: title of a panel -> label -> curve; `mean_curve` makes curves from runs.
        metric: for the y axis; shares are drawn in percent.
        split: of the data, such as "validation", for the y axis.
        incomplete: labels that get a star, because trials are missing.
        empty: why a panel has no curve, written into it.
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
                place = labels.index(label)
                drawn = draw_curve(
                    axes, curve.rounds, curve.spreads, styles[label], place, len(labels)
                )
                handles.setdefault(label, drawn)
        _finish_axes(figure, list(grid.flat), len(panels), columns, metric, split)
        for axes, lines in zip(grid.flat, panels.values(), strict=False):
            if not any(curve.rounds for curve in lines.values()):
                _write_empty(axes, empty)
        names = [f"{label} *" if label in incomplete else label for label in labels]
        curves = [curve for lines in panels.values() for curve in lines.values()]
        has_band = any(spread.half_width for curve in curves for spread in curve.spreads)
        note = join_notes(INTERVALS if has_band else "", INCOMPLETE if incomplete else "")
        add_legend(figure, [handles[label] for label in labels], names, note)
    return figure


def draw_sweep_curves(sweep: SweepResults) -> Figure:
    """Draws the curves of a sweep; a line that has none yet is in the legend only. A panel whose
    runs ended without a curve is left out, or says why if no panel has one."""
    panels = {
        panel: {line.label: line.curve for line in lines}
        for panel, lines in sweep.panels.items()
        if any(line.curve.rounds or not sweep.is_complete(line) for line in lines)
    }
    incomplete = [line.label for line in sweep.lines if not sweep.is_complete(line)]
    if panels:
        return draw_curves(panels, sweep.metric, split=sweep.split, incomplete=incomplete)
    every = {"": {line.label: line.curve for line in sweep.lines}}
    return draw_curves(every, sweep.metric, split=sweep.split, empty=_no_curve(sweep.lines))


def _no_curve(lines: Sequence[Series]) -> str:
    """Says why runs have no curve."""
    trials = [trial for line in lines for trial in line.trials]
    done = max((trial.rounds_done for trial in trials), default=0)
    every = min((trial.spec.evaluate_every for trial in trials), default=1)
    return f"no evaluation within {done} rounds\n(evaluated every {every})"


def _write_empty(axes: Axes, why: str) -> None:
    """Says in a panel why it has no curve; numbers at its axes would mean nothing."""
    axes.text(0.5, 0.5, why, ha="center", transform=axes.transAxes)
    axes.tick_params(labelbottom=False, labelleft=False, length=0)
    axes.grid(visible=False)


def _shape(panels: int) -> tuple[int, int]:
    """Rows and columns that leave the fewest places empty: four panels are two by two."""
    rows = max(1, math.ceil(panels / _PANELS_IN_A_ROW))
    return rows, max(1, math.ceil(panels / rows))


def _finish_axes(
    figure: Figure, axes: Sequence[Axes], used: int, columns: int, metric: str, split: str
) -> None:
    """Labels the outer axes and removes the places that no panel fills."""
    for i, ax in enumerate(axes):
        _scale_rounds(ax)
        if i % columns == 0:
            label_metric(ax, metric, split)
        if i + columns >= used:
            ax.set_xlabel("rounds")
            ax.tick_params(labelbottom=True)
        if i >= used:
            figure.delaxes(ax)


def _scale_rounds(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write_number(value)))


def draw_final(sweep: SweepResults) -> Figure:
    """Draws one series for each panel of the sweep: left its sizes, right its test metric. Lines
    without x stand side by side under their labels."""
    styles = series_styles(list(sweep.panels))
    places = _places(sweep)
    with drawing():
        figure = new_figure(height=3.9)
        left, right = figure.subplots(1, 2)
        handles: list[Artist] = []
        for panel, lines in sweep.panels.items():
            points = sorted((places[li], li.relative_size) for li in lines if li.relative_size)
            xs, ys = [x for x, _ in points], [y for _, y in points]
            handles += left.plot(xs, ys, **styles[panel].line())
            spreads = [line.test for line in lines]
            draw_points(right, [places[line] for line in lines], spreads, styles[panel])
        _finish_sizes(left, sweep.lines)
        label_metric(right, sweep.metric, sweep.tested_on)
        for axes in (left, right):
            _finish_x(axes, sweep, places)
        names = [sweep.starred(panel, *lines) for panel, lines in sweep.panels.items()]
        add_legend(figure, handles, names, sweep.note)
    return figure


def draw_reached(sweep: SweepResults) -> Figure:
    """Draws the test metric over what a sweep varies, a series for each panel."""
    styles = series_styles(list(sweep.panels))
    places = _places(sweep)
    with drawing():
        figure = new_figure(height=3.9)
        axes = figure.subplots()
        handles = [
            draw_points(axes, [places[li] for li in lines], [li.test for li in lines], style)
            for lines, style in zip(sweep.panels.values(), styles.values(), strict=True)
        ]
        label_metric(axes, sweep.metric, sweep.tested_on)
        _finish_x(axes, sweep, places)
        names = [sweep.starred(panel, *lines) for panel, lines in sweep.panels.items()]
        add_legend(figure, handles, names, sweep.note)
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
    given = (line.label.removeprefix(f"{sweep.x_label} = ") for line in sweep.lines)
    labels = list(dict.fromkeys(given))
    axes.xaxis.set_major_locator(FixedLocator(list(range(len(labels)))))
    axes.set_xticklabels(labels, rotation=20 if len(labels) > 3 else 0)
    axes.set_xlim(-0.4, len(labels) - 0.6)


def draw_runs(sweep: SweepResults) -> Figure:
    """Draws every metric over rounds, and the first against what a client moves in a round.

    Every delivery trains the same model, so lines often coincide: the first is the widest, and each
    shows at the rims of the next.
    """
    named = [name for line in sweep.lines for trial in line.trials for name in trial.curves]
    metrics = list(dict.fromkeys([sweep.metric, *named]))
    styles = list(series_styles([line.label for line in sweep.lines]).values())
    with drawing():
        figure = new_figure(height=3.9, width=WIDTH / 2 * (len(metrics) + 1))
        *left, right = figure.subplots(1, len(metrics) + 1)
        for axes, metric in zip(left, metrics, strict=True):
            for place, (line, style) in enumerate(zip(sweep.lines, styles, strict=True)):
                curve = line.curve_of(metric)
                draw_curve(axes, curve.rounds, curve.spreads, style, place, len(styles))
            _finish_rounds(axes, sweep)
            label_metric(axes, metric, "" if _is_own(sweep, metric) else sweep.split)
        points = [_draw_cost(right, *pair) for pair in zip(sweep.lines, styles, strict=True)]
        _finish_costs(right, sweep)
        short = shorten_names([line.label for line in sweep.lines])
        names = [sweep.starred(n, line) for n, line in zip(short, sweep.lines, strict=True)]
        add_legend(figure, points, names, sweep.note)
        _part_points(figure, right, points)
    return figure


def _is_own(sweep: SweepResults, metric: str) -> bool:
    """Whether a metric is of `--metrics`: it reads the model, and is measured on no split. Further
    metrics of a task have the name of the first in theirs."""
    has_own = any(trial.spec.metrics for line in sweep.lines for trial in line.trials)
    return has_own and sweep.metric not in metric


def _part_points(figure: Figure, axes: Axes, points: Sequence[Line2D]) -> None:
    """Puts points that coincide side by side around their place, and says how many there are."""
    figure.draw_without_rendering()  # settles the layout, so that points have their places
    groups: list[tuple[np.ndarray, list[Line2D]]] = []
    for point in points:
        if not np.size(point.get_xdata()):
            continue
        at = axes.transData.transform(_place_of(point))
        near = (group for place, group in groups if np.hypot(*(at - place)) < _NEAR)
        if (group := next(near, None)) is None:
            groups.append((at, [point]))
        else:
            group.append(point)
    for _, group in groups:
        if len(group) == 1:
            continue
        for place, point in enumerate(group):
            aside = _STEP * (place - (len(group) - 1) / 2) / 72
            moved = ScaledTranslation(aside, 0, figure.dpi_scale_trans)
            point.set(transform=axes.transData + moved, clip_on=False)
        text, xy = f"{len(group)} runs here", _place_of(group[0])
        label = axes.annotate(text, xy, (0, 7), textcoords="offset points", ha="center", fontsize=9)
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8})


def _place_of(point: Line2D) -> tuple[float, float]:
    x, y = np.asarray(point.get_xydata())[0]
    return float(x), float(y)


def _draw_cost(axes: Axes, line: Series, style: SeriesStyle) -> Line2D:
    """Draws a point at what a client moves and what the model has reached: the test metric, or
    while there is none the end of the curve."""
    costs = line.costs
    reached = (line.test or line.last) if costs else None
    return draw_points(axes, [costs.kilobytes if costs else 0.0], [reached], style)


def _finish_costs(axes: Axes, sweep: SweepResults) -> None:
    is_tested = all(line.test is not None for line in sweep.lines)
    label_metric(axes, sweep.metric, sweep.tested_on if is_tested else "last")
    axes.set_xlabel("KB per client and round, down and up")
    moved = [line.costs.kilobytes for line in sweep.lines if line.costs]
    if spans_decades(moved):
        axes.set_xscale("log")
        scale_sizes(axes.xaxis, (1.0, 3.0))
    else:
        axes.set_xlim(0, 1.15 * max(moved, default=1.0) or 1.0)
    axes.margins(y=0.2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))


def _finish_rounds(axes: Axes, sweep: SweepResults) -> None:
    """Scales and labels the axis of rounds; says why where there is no curve."""
    _scale_rounds(axes)
    axes.set_xlabel("rounds")
    if not any(np.size(line.get_xdata()) for line in axes.lines):
        _write_empty(axes, _no_curve(sweep.lines))


Cells: TypeAlias = Mapping[tuple[float, float], Series]
"""(server_lr, client_lr) -> the line that was run with them."""


def tuning_value(line: Series) -> Spread | None:
    """Returns what rates are chosen by: the end of the curve, or test if there is no curve.

    Runs that tune are evaluated on validation data while they train. The test data must not choose
    the rates; it stands in only for runs that were never evaluated before their end.
    """
    return line.last or line.test


def draw_grid(sweep: SweepResults) -> Figure:
    """Draws one map for each panel of the sweep, with a frame around the best cell. Raises
    InputError where two lines of a panel have the same rates."""
    maps = {panel: _cells(sweep, lines) for panel, lines in sweep.panels.items()}
    columns = min(2, len(maps))
    rows = math.ceil(len(maps) / columns)
    with drawing():
        figure = new_figure(height=(5.2 if columns == 1 else 4.2) * rows, width=WIDTH)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(maps) :]:
            figure.delaxes(axes)
        for axes, (panel, cells) in zip(grid.flat, maps.items(), strict=False):
            _draw_map(axes, cells, sweep)
            axes.set_title(panel)
        split = sweep.split if any(line.last for line in sweep.lines) else sweep.tested_on
        unit = " (%)" if is_share(sweep.metric) else ""
        text = f"{split} {metric_name(sweep.metric)}{unit}, best cell framed".strip()
        figure.suptitle(f"{text}\n{sweep.star_note}".rstrip(), fontsize=10)
    return figure


def _cells(sweep: SweepResults, lines: Sequence[Series]) -> Cells:
    """The lines of a panel by their rates; lines without a trial have none and are left empty."""
    cells: dict[tuple[float, float], Series] = {}
    for line in lines:
        if not line.trials:
            continue
        settings = line.trials[0].settings
        rates = float(settings["server.lr"]), float(settings["client.lr"])
        if rates in cells:
            raise InputError(
                f"arm {line.arm} has no cell of its own in the grid of {sweep.name}: got the rates "
                f"of {cells[rates].arm}; expected one line for each pair of rates in a panel; put "
                "the lines into different panels, or drop `grid` from the sweep's figures"
            )
        cells[rates] = line
    return cells


def _draw_map(axes: Axes, cells: Cells, sweep: SweepResults) -> None:
    """Draws one map: server rates upward, client rates to the right."""
    servers, clients = sorted({s for s, _ in cells}), sorted({c for _, c in cells})
    values = np.full((len(servers), len(clients)), np.nan)
    for (server, client), line in cells.items():
        value = tuning_value(line)
        values[servers.index(server), clients.index(client)] = value.mean if value else np.nan
    if cells:
        axes.imshow(values, origin="lower", cmap="cividis", aspect="auto")
    axes.grid(visible=False)
    axes.set_facecolor("#eeeeee")  # of cells without a number
    axes.set_xticks(range(len(clients)), [write_number(rate) for rate in clients])
    axes.set_yticks(range(len(servers)), [write_number(rate) for rate in servers])
    axes.set_xlabel("client learning rate")
    axes.set_ylabel("server learning rate")
    for (server, client), line in cells.items():
        _write_cell(axes, clients.index(client), servers.index(server), line, sweep, values)
    _frame_best(axes, values)


def _write_cell(
    axes: Axes, x: int, y: int, line: Series, sweep: SweepResults, values: np.ndarray
) -> None:
    """Prints the mean in a cell, dark on light and light on dark."""
    value = values[y, x]
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    share = (value - low) / (high - low) if high > low else 0.0
    red, green, blue, _ = mpl.colormaps["cividis"](share if math.isfinite(share) else 1.0)
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 or not math.isfinite(value)
    size = 9 if values.shape[1] <= 5 else 7
    color = "black" if is_light else "white"
    text = f"{100 * value:.2f}" if is_share(sweep.metric) else f"{value:.3g}"
    if not math.isfinite(value):
        text = NOTHING if tuning_value(line) is None else "not\nfinite"
    text = sweep.starred(text, line)
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=size)


def _frame_best(axes: Axes, values: np.ndarray) -> None:
    """Draws a frame around the largest value."""
    if not np.isfinite(values).any():
        return
    y, x = np.unravel_index(np.nanargmax(values), values.shape)
    corner = (float(x) - 0.48, float(y) - 0.48)
    axes.add_patch(Rectangle(corner, 0.96, 0.96, fill=False, edgecolor="#d62728", linewidth=2.5))


KINDS: Mapping[str, Callable[[SweepResults], Figure]] = MappingProxyType(
    {
        "curves": draw_sweep_curves,
        "final": draw_final,
        "frontier": draw_frontier,
        "bytes": draw_bytes,
        "epsilon": draw_epsilon,
        "reached": draw_reached,
        "share": draw_share,
        "grid": draw_grid,
        OVERVIEW: draw_runs,
    }
)
"""Kind -> how it is drawn; the names are `results.FIGURES` and `OVERVIEW`."""


def draw_sweep(sweep: SweepResults) -> dict[str, Figure]:
    """Returns kind -> figure, for the kinds that the sweep asks for."""
    return {kind: KINDS[kind](sweep) for kind in sweep.figures}
