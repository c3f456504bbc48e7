"""Runs `keyhole demo`: trains the tag task with and without select, and compares."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from keyhole.cli.options import json_option, option, out_option
from keyhole.cli.spec_options import seed_option
from keyhole.files import make_directory, storage_errors
from keyhole.logs import say

if TYPE_CHECKING:
    from rich.progress import TaskID

    from keyhole.experiments.trial import Result
    from keyhole.rounds.record import RoundRecord

METRIC = "recall_at_5"
COLUMNS = ("client's keys", "recall@5", "numbers held", "share", "KB down", "KB up")
NEXT = "train so_tag --m 100 --rounds 50"
LOG_EVERY = 10
"""Rounds between two lines of progress where there is no terminal."""


@click.command()
@option("--rounds", default=40, type=click.IntRange(1, 10_000), help="Rounds of training.")
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
    from keyhole.rounds.cores import start_jax

    make_directory(out)
    say("starting JAX, making posts, compiling the first round")
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
    table = Table(title="Tag prediction on synthetic posts, 30 clients per round")
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
    """Result and records of each line, in memory."""
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.sweeps import demo_arms, demo_data
    from keyhole.rounds.cores import Cores

    results: dict[str, Result] = {}
    records: dict[str, list[RoundRecord]] = {}
    cores = Cores()
    with _bars() as bars:
        data = demo_data(seed)
        for label, spec in demo_arms(rounds, seed).items():
            records[label] = []
            bar = bars.add_task(label, total=rounds, note="")

            def show(record: RoundRecord, label: str = label, bar: TaskID = bar) -> None:
                records[label].append(record)
                done = len(records[label])
                bars.update(bar, completed=done)
                if bars.disable and done < rounds and done % LOG_EVERY == 0:
                    say(f"{label:14} {done}/{rounds} rounds")

            result = Experiment(spec, data).run(0, execute=cores, on_round=show)
            assert result is not None
            reached = f"recall@5 {result.metrics[METRIC]:.1%}"
            bars.update(bar, note=reached)
            if bars.disable:
                say(f"{label:14} {rounds}/{rounds} rounds {reached}")
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


def _rows(results: dict[str, Result]) -> list[list[str]]:
    whole = next(iter(results.values())).client_size or 1.0
    return [
        [
            label,
            f"{result.metrics[METRIC]:.1%}",
            f"{result.client_size or 0.0:,.0f}",
            f"{(result.client_size or 0.0) / whole:.1%}",
            f"{(result.bytes_down or 0.0) / 1000:,.1f}",
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
        f"saved: with all its own words a client moves {_kilobytes(own):,.0f} KB per round, not "
        f"{_kilobytes(whole):,.0f} ({1 - _kilobytes(own) / _kilobytes(whole):.0%} less), and the "
        f"model reaches recall@5 {own.metrics[METRIC]:.1%} (no select: {whole.metrics[METRIC]:.1%})"
    )


def _kilobytes(result: Result) -> float:
    """What a client moves in a round, both directions."""
    return ((result.bytes_down or 0.0) + result.bytes_up) / 1000


def _command() -> str:
    """How to call keyhole from here: by its name if PATH has it, else as this call did."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "keyhole" and not shutil.which("keyhole") else "keyhole"


def _save_picture(
    results: dict[str, Result], records: dict[str, list[RoundRecord]], stem: Path
) -> list[Path]:
    from keyhole.experiments.report.frontier import draw_demo
    from keyhole.experiments.report.reading import curve_of
    from keyhole.experiments.report.style import save_figure

    curves = {label: curve_of(made, METRIC) for label, made in records.items()}
    points = {label: (_kilobytes(r), r.metrics[METRIC]) for label, r in results.items()}
    return save_figure(draw_demo(curves, points, METRIC), stem)
