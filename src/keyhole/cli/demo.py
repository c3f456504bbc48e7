"""`keyhole demo`: train the tag task with and without select, and compare."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from keyhole.cli.inputs import json_option, out_option, seed_option, start_jax
from keyhole.server.files import make_directory, storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from keyhole.report.style import SeriesStyle
    from keyhole.tasks.trial_directory import Result
    from keyhole.training.record import RoundRecord

__all__ = ["demo"]

METRIC = "recall_at_5"
COLUMNS = ("client's keys", "recall@5", "numbers held", "share", "KB down", "KB up")
NEXT = "train so_tag --m 100 --rounds 50"
LOG_EVERY = 10
"""Rounds between two lines of progress where there is no terminal."""


@click.command()
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(1, 10_000))
@seed_option
@out_option("keyhole-demo", "Where the picture and the table are written.")
@json_option
def demo(rounds: int, seed: int, out: Path, as_json: bool) -> None:
    """Train a small model with and without select, and compare.

    Predicts the tags of a post from its words, on posts made on the spot from the seed. Each line
    of the table is one way to choose keys; all see the same clients in the same rounds. A picture
    (recall over rounds, and recall against the KB that a client moves) and the table are written
    to files.
    """
    make_directory(out)
    click.echo("starting JAX, making posts, compiling the first round", err=True)
    start_jax()
    results, records = _train(rounds, seed)
    rows = _rows(results)
    written = [out / "demo.md", *_save_picture(results, records, out / "demo")]
    with storage_errors(written[0], "write"):
        written[0].write_text(_markdown(rows))
    if as_json:
        described = [
            {"keys": label, **asdict(result), "seed": seed} for label, result in results.items()
        ]
        click.echo(json.dumps(described, indent=2))
        return
    table = Table(title="Tag prediction on synthetic posts, 30 clients a round")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == COLUMNS[0] else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    console.print("written: " + ", ".join(map(str, written)), soft_wrap=True)
    console.print(_saving(results))
    console.print(f"try next: {_command()} {NEXT}", soft_wrap=True)


def _train(rounds: int, seed: int) -> tuple[dict[str, Result], dict[str, list[RoundRecord]]]:
    """Result and records of each arm, in memory."""
    from keyhole.tasks.demo import demo_arms, demo_data  # these start JAX: not for --help
    from keyhole.tasks.experiment import Experiment
    from keyhole.training.cores import Cores
    from keyhole.training.threads import count_cores

    results: dict[str, Result] = {}
    records: dict[str, list[RoundRecord]] = {}
    cores = Cores(count_cores())
    with _bars() as bars:
        data = demo_data(seed)
        for label, arm in demo_arms(rounds, seed).items():
            records[label] = []
            note = _noter(bars, label, rounds)

            def show(
                record: RoundRecord, label: str = label, note: Callable[[int, str], None] = note
            ) -> None:
                records[label].append(record)
                note(len(records[label]), "")

            result = Experiment(arm, data).run(0, execute=cores, on_round=show)
            assert result is not None
            note(rounds, f"recall@5 {result.metrics[METRIC]:.1%}")
            results[label] = result
    return results, records


def _bars() -> Progress:
    """Bars that fit into 80 columns, on standard error; none where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description:14}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
    )


def _noter(bars: Progress, label: str, rounds: int) -> Callable[[int, str], None]:
    """Returns what shows the rounds done and a note: on a bar, or as lines of a log."""
    bar = bars.add_task(label, total=rounds, note="")

    def note(done: int, text: str) -> None:
        bars.update(bar, completed=done, note=text)
        if bars.disable and (text or (done < rounds and done % LOG_EVERY == 0)):
            click.echo(f"{label:14} {done}/{rounds} rounds {text}".rstrip(), err=True)

    return note


def _rows(results: dict[str, Result]) -> list[list[str]]:
    whole = next(iter(results.values())).client_size
    return [
        [
            label,
            f"{result.metrics[METRIC]:.1%}",
            f"{result.client_size:,.0f}",
            f"{result.client_size / whole:.1%}",
            f"{result.bytes_down / 1000:,.1f}",
            f"{result.bytes_up / 1000:,.1f}",
        ]
        for label, result in results.items()
    ]


def _markdown(rows: list[list[str]]) -> str:
    lines = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _saving(results: dict[str, Result]) -> str:
    """The sentence on what select saved: the second line of the table against the first."""
    whole, own = list(results.values())[:2]
    return (
        f"saved: with all its own words a client moves {_kilobytes(own):,.0f} KB a round, not "
        f"{_kilobytes(whole):,.0f} ({1 - _kilobytes(own) / _kilobytes(whole):.0%} less), and the "
        f"model reaches recall@5 {own.metrics[METRIC]:.1%} (no select: {whole.metrics[METRIC]:.1%})"
    )


def _kilobytes(result: Result) -> float:
    """What a client moves in a round, both directions."""
    return (result.bytes_down + result.bytes_up) / 1000


def _command() -> str:
    """How to call keyhole from here: by its name if PATH has it, else as this call did."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "keyhole" and not shutil.which("keyhole") else "keyhole"


def _save_picture(
    results: dict[str, Result], records: dict[str, list[RoundRecord]], stem: Path
) -> list[Path]:
    from keyhole.report.results import curve_of
    from keyhole.report.style import save_figure

    curves = {label: curve_of(made, METRIC) for label, made in records.items()}
    return save_figure(draw_demo(results, curves), stem)


def draw_demo(results: dict[str, Result], curves: dict[str, dict[int, float]]) -> Figure:
    """Draws recall over rounds, beside recall against the KB that a client moves.

    Args:
        results: label -> what the arm reached and cost; no select comes first.
        curves: label -> rounds done -> recall on validation data, one or more.

    Returns:
        A figure for `save_figure`, in which no line or label hides another.
    """
    from keyhole.report.style import drawing, new_figure, series_styles

    styles = series_styles(list(results))
    with drawing():
        figure = new_figure(height=4.0, width=10.5)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_rounds(left, curves, styles)
        _draw_saving(right, results, styles)
        _label_ends(figure, left, curves, styles)
        _label_points(right, results)
    return figure


def _draw_rounds(
    axes: Axes, curves: dict[str, dict[int, float]], styles: dict[str, SeriesStyle]
) -> None:
    """Draws a line for each arm; the first is a pale band, so that one equal to it shows."""
    from matplotlib.ticker import MaxNLocator

    from keyhole.report.style import label_metric

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
    label_metric(axes, METRIC, "validation")


def _draw_saving(axes: Axes, results: dict[str, Result], styles: dict[str, SeriesStyle]) -> None:
    """Draws a point for each arm at what a client moves and what the model reaches."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    from keyhole.report.style import label_metric

    points = [_point(result) for result in results.values()]
    axes.plot(*zip(*points, strict=True), color="#bbbbbb", linewidth=1.0, zorder=1)
    for (label, _), (x, y) in zip(results.items(), points, strict=True):
        axes.plot([x], [y], **styles[label].line() | {"markersize": 10})
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.25, y=0.12)
    axes.set_title("recall against what a client moves")
    axes.set_xlabel("KB per client and round, down and up")
    label_metric(axes, METRIC, "test")
    axes.tick_params(labelleft=True)  # sharing the axis took it away


def _label_ends(
    figure: Figure,
    axes: Axes,
    curves: dict[str, dict[int, float]],
    styles: dict[str, SeriesStyle],
) -> None:
    """Writes the name of each line at its end; names of lines that meet stand one above another."""
    figure.draw_without_rendering()  # settles the layout, so that points have their places
    ends = {label: list(curve.items())[-1] for label, curve in curves.items()}
    ranked = sorted(ends, key=lambda label: ends[label][1])
    heights = [axes.transData.transform(ends[label])[1] * 72 / figure.dpi for label in ranked]
    for label, at, height in zip(ranked, spread_out(heights, 13.0), heights, strict=True):
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


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Returns ascending places moved apart to a least gap, by nothing on average.

    >>> spread_out([10.0, 50.0, 50.0], 12.0)
    [6.0, 46.0, 58.0]
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    shift = (sum(moved) - sum(places)) / len(moved)
    return [place - shift for place in moved]


def _label_points(axes: Axes, results: dict[str, Result]) -> None:
    """Writes name, KB and saving beside each point, where they hide nothing."""
    from keyhole.report.placing import place_labels

    whole = _kilobytes(next(iter(results.values())))
    labels = [f"{label}\n{_kilobytes(result):,.0f} KB" for label, result in results.items()]
    for i, result in enumerate(list(results.values())[1:], 1):
        labels[i] += f", {1 - _kilobytes(result) / whole:.0%} less"
    place_labels(axes, [[_point(result) for result in results.values()]], [labels], "#333333")


def _point(result: Result) -> tuple[float, float]:
    return _kilobytes(result), result.metrics[METRIC]
