"""Draws the figure of README.md: what select saves on three tasks of real data, beside broadcast of
the whole model and of smaller ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from keyhole.experiments.report.results import Series, SweepResults
from keyhole.experiments.report.style import (
    SeriesStyle,
    add_legend,
    draw_points,
    drawing,
    label_metric,
    new_figure,
    scale_sizes,
)

GREY = "#6b7280"
BROADCAST = "broadcast: smaller models, and the whole"
NAMED = "select: keys that the client's data name"
MIXED = "select: words of the client, random neurons"
SAME = "select: the same keys for all"
RANDOM = "select: keys drawn at random"
STYLES = {
    BROADCAST: SeriesStyle(GREY, "o", "-"),
    NAMED: SeriesStyle("#1d4ed8", "s", "-"),
    MIXED: SeriesStyle("#7c3aed", "D", "-"),
    SAME: SeriesStyle("#0f8a6d", "^", "-"),
    RANDOM: SeriesStyle("#d97706", "v", (0, (4, 1.5))),
}


@dataclass(frozen=True)
class Panel:
    """A task in the figure.

    Args:
        view: of its benchmark (`views.py`).
        title: of the panel: the task and its model.
        lines: panel of the view -> what it is called here; others are left out.
    """

    view: str
    title: str
    lines: Mapping[str, str]


_WHOLE = {"broadcast of a smaller model": BROADCAST, "broadcast": BROADCAST}
PANELS = (
    Panel(
        "suite-tags",
        "Tags of posts\nlogistic regression, 10,000 words",
        {**_WHOLE, "structured: Top": NAMED, "random (federated dropout)": RANDOM},
    ),
    Panel(
        "suite-word",
        "Next word\ntransformer, 2,000 words",
        {**_WHOLE, "structured words": NAMED, "mixed": MIXED, "random neurons": RANDOM},
    ),
    Panel(
        "suite-2nn",
        "Handwritten letters\n2NN, 200 neurons",
        {**_WHOLE, "nested (HeteroFL, all alike)": SAME, "random (federated dropout)": RANDOM},
    ),
)


def draw_headline(sweeps: Mapping[str, SweepResults]) -> Figure:
    """Draws a panel for each task, given the sweep of its view."""
    with drawing():
        figure = new_figure(height=4.5, width=10.2)
        handles: dict[str, Line2D] = {}
        for axes, panel in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
            _draw(axes, panel, sweeps[panel.view], handles)
        names = [name for name in STYLES if name in handles]
        add_legend(figure, [handles[name] for name in names], names, _note(sweeps.values()))
    return figure


def _note(sweeps: Sequence[SweepResults]) -> str:
    """Says over how many trials means are, and what bars are."""
    counts = {len(line.finished) for sweep in sweeps for line in sweep.lines if line.finished}
    told = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    bars = "; bars: 95 % interval of the mean" if max(counts) > 1 else ""
    return f"trials: {told}{bars}"


def _draw(axes: Axes, panel: Panel, sweep: SweepResults, handles: dict[str, Line2D]) -> None:
    """Draws a task: lines, the level of the whole model, and what the best selection saves."""
    found: dict[str, list[Series]] = {}
    for line in sweep.lines:
        name = panel.lines.get(line.panel)
        if name and line.test and line.costs:
            found.setdefault(name, []).append(line)
    for name in (name for name in STYLES if name in found):
        xs = [_megabytes(line) for line in found[name]]
        drawn = draw_points(axes, xs, [line.test for line in found[name]], STYLES[name])
        handles.setdefault(name, drawn)
    whole = max(found[BROADCAST], key=_megabytes)
    selected = [line for name, lines in found.items() if name != BROADCAST for line in lines]
    axes.set_title(panel.title)
    label_metric(axes, sweep.metric, "test")
    axes.set_xlabel("MB per client and round, down and up")
    axes.set_xscale("log")
    scale_sizes(axes.xaxis, (1.0, 3.0) if panel.view == "suite-tags" else (1.0, 2.0, 5.0))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.08, y=0.1)
    tops = [_top(line) for lines in found.values() for line in lines]
    _mark_saving(axes, whole, max(selected, key=_reached), max(tops))


def _mark_saving(axes: Axes, whole: Series, best: Series, top: float) -> None:
    """Draws the level of the whole model, and an arrow from its bytes to those of a selection; what
    that saves stands above all bars, which end at `top`."""
    level, low = _reached(whole), axes.get_ylim()[0]
    axes.axhline(level, color=GREY, linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    axes.set_ylim(low, top + 0.24 * (top - low))
    ends = (_megabytes(best), level), (_megabytes(whole), level)
    arrow = {"arrowstyle": "-|>", "color": "#111827", "linewidth": 1.6, "shrinkA": 6, "shrinkB": 0}
    axes.annotate("", *ends, arrowprops=arrow)
    times = ends[1][0] / ends[0][0]
    share = math.floor(100 * _reached(best) / level)
    axes.annotate(
        f"1/{times:.2g} of the bytes,\n{share} % of the whole model",
        (ends[1][0], top),
        (4, 7),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9.5,
        weight="bold",
        color="#111827",
    )


def _megabytes(line: Series) -> float:
    assert line.costs is not None
    return line.costs.kilobytes / 1000


def _reached(line: Series) -> float:
    assert line.test is not None
    return line.test.mean


def _top(line: Series) -> float:
    """The upper end of a line's bar."""
    assert line.test is not None
    return _reached(line) + (line.test.half_width or 0.0)
