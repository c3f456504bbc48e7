"""Figures: every kind that a sweep may ask for, by name.

A figure is matplotlib's `Figure` without a window or a current state; `save_figure` writes it as
PNG and SVG with the same bytes for the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from matplotlib.figure import Figure

from keyhole.report.curves import draw_curves, draw_sweep_curves
from keyhole.report.final import draw_final
from keyhole.report.frontier import draw_frontier
from keyhole.report.grid import draw_grid
from keyhole.report.results import Sweep
from keyhole.report.style import save_figure

__all__ = ["KINDS", "draw_curves", "draw_sweep", "save_figure"]

KINDS: Mapping[str, Callable[[Sweep], Figure]] = MappingProxyType(
    {
        "curves": draw_sweep_curves,
        "final": draw_final,
        "frontier": draw_frontier,
        "grid": draw_grid,
    }
)
"""Kind -> how it is drawn; the names are `results.FIGURES`."""


def draw_sweep(sweep: Sweep) -> dict[str, Figure]:
    """Returns kind -> figure, for the kinds that the sweep asks for."""
    return {kind: KINDS[kind](sweep) for kind in sweep.figures}
