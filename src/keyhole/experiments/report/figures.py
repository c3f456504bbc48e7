"""Draws every kind of figure that a sweep may ask for, by name.

A grid is a heat map over client and server learning rate, to tune them as section 5.1 does.

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
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from keyhole.errors import InputError
from keyhole.experiments.report.curves import INCOMPLETE, draw_final, draw_sweep_curves
from keyhole.experiments.report.frontier import draw_frontier
from keyhole.experiments.report.results import Series, SweepResults
from keyhole.experiments.report.spread import NOTHING, Spread, is_share, metric_name, write_number
from keyhole.experiments.report.style import WIDTH, drawing, new_figure

Cells: TypeAlias = Mapping[tuple[float, float], Series]
"""(server_lr, client_lr) -> the line that was run with them."""


def tuning_value(line: Series) -> Spread | None:
    """Returns what rates are chosen by: the end of the curve, or test if there is no curve.

    Runs that tune are evaluated on validation data while they train. The test data must not choose
    the rates; it stands in only for runs that were never evaluated before their end.
    """
    return line.last or line.test


def draw_grid(sweep: SweepResults) -> Figure:
    """Draws one map for each panel of the sweep, with a frame around the best cell.

    Raises:
        InputError: two lines of a panel have the same rates, or a run names no rates.
    """
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
        figure.suptitle(_explanation(sweep), fontsize=10)
    return figure


def _explanation(sweep: SweepResults) -> str:
    """What the numbers in the cells are."""
    split = sweep.split if any(line.last for line in sweep.lines) else "test"
    unit = " (%)" if is_share(sweep.metric) else ""
    text = f"{split} {metric_name(sweep.metric)}{unit}, best cell framed".strip()
    incomplete = not all(map(sweep.is_complete, sweep.lines))
    return f"{text}\n{INCOMPLETE}" if incomplete else text


def _cells(sweep: SweepResults, lines: Sequence[Series]) -> Cells:
    """The lines of a panel by their rates; lines without a trial have none and are left empty."""
    cells: dict[tuple[float, float], Series] = {}
    for line in lines:
        if not line.trials:
            continue
        settings = line.trials[0].settings
        rates = float(settings["server.lr"]), float(settings["client.lr"])
        if rates in cells:
            raise _refuse(sweep, line, f"the rates of {cells[rates].arm}")
        cells[rates] = line
    return cells


def _refuse(sweep: SweepResults, line: Series, got: str) -> InputError:
    return InputError(
        f"arm {line.arm} has no cell of its own in the grid of {sweep.name}",
        got=got,
        allowed="one line for each pair of rates in a panel",
        fix="put the lines into different panels, or drop `grid` from the sweep's figures",
    )


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
    star = "" if sweep.is_complete(line) else " *"
    value = values[y, x]
    low, high = np.nanmin(values, initial=np.inf), np.nanmax(values, initial=-np.inf)
    share = (value - low) / (high - low) if high > low else 0.0
    red, green, blue, _ = mpl.colormaps["cividis"](share if math.isfinite(share) else 1.0)
    is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.45 or not math.isfinite(value)
    size = 9 if values.shape[1] <= 5 else 7
    color = "black" if is_light else "white"
    text = _cell_text(value, sweep.metric, is_empty=tuning_value(line) is None) + star
    axes.text(x, y, text, ha="center", va="center", color=color, fontsize=size)


def _cell_text(value: float, metric: str, *, is_empty: bool) -> str:
    """A mean in as many digits as a cell has room for."""
    if not math.isfinite(value):
        return NOTHING if is_empty else "not\nfinite"
    return f"{100 * value:.2f}" if is_share(metric) else f"{value:.3g}"


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
        "grid": draw_grid,
    }
)
"""Kind -> how it is drawn; the names are `results.FIGURES`."""


def draw_sweep(sweep: SweepResults) -> dict[str, Figure]:
    """Returns kind -> figure, for the kinds that the sweep asks for."""
    return {kind: KINDS[kind](sweep) for kind in sweep.figures}
