"""`keyhole demo`: train the tag task with and without select, and compare."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from keyhole.cli.options import json_option, out_option, seed_option, start_jax
from keyhole.cli.screen import progress_bars
from keyhole.files import make_directory, storage_errors

if TYPE_CHECKING:
    from keyhole.experiments.experiment import Result
    from keyhole.rounds.record import RoundRecord


METRIC = "recall_at_5"
COLUMNS = ("client's keys", "recall@5", "numbers held", "share", "KB down", "KB up")


@click.command()
@click.option("--rounds", default=40, show_default=True, type=click.IntRange(1, 10_000))
@seed_option
@out_option("keyhole-demo", "Where the picture and the table are written.")
@json_option
def demo(rounds: int, seed: int, out: Path, as_json: bool) -> None:
    """Train a small model with and without select, and compare.

    Predicts the tags of a post from its words, on posts made on the spot from the seed. Each line
    of the table is one way to choose keys; all see the same clients in the same rounds. A picture
    of recall over rounds and the table are written to files.
    """
    start_jax()
    make_directory(out)
    results, curves = _train(rounds, seed)
    rows = _rows(results)
    written = [out / "demo.md", *_draw(curves, out / "demo")]
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
    Console().print(table)
    click.echo("written: " + ", ".join(map(str, written)))


def _train(rounds: int, seed: int) -> tuple[dict[str, Result], dict[str, list[RoundRecord]]]:
    """Result and records of each arm, in memory."""
    from keyhole.experiments.demo import demo_arms, demo_data
    from keyhole.experiments.experiment import Experiment
    from keyhole.rounds.cores import Cores
    from keyhole.rounds.threads import count_cores

    results: dict[str, Result] = {}
    records: dict[str, list[RoundRecord]] = {}
    cores = Cores(count_cores())
    with progress_bars() as bars:
        data = demo_data(seed)
        for label, arm in demo_arms(rounds, seed).items():
            bar, records[label] = bars.add_task(f"{label:14}", total=rounds, note=""), []

            def show(record: RoundRecord, bar: TaskID = bar, label: str = label) -> None:
                records[label].append(record)
                bars.advance(bar)

            result = Experiment(arm, data).run(0, execute=cores, on_round=show)
            assert result is not None
            bars.update(bar, note=f"recall@5 {result.metrics[METRIC]:.1%}")
            results[label] = result
    return results, records


def _draw(records: dict[str, list[RoundRecord]], stem: Path) -> list[Path]:
    """The picture: recall over rounds, one line for each way to choose."""
    from keyhole.experiments.report.curves import draw_curves
    from keyhole.experiments.report.results import curve_of
    from keyhole.experiments.report.spread import mean_curve
    from keyhole.experiments.report.style import save_figure

    lines = {label: mean_curve([curve_of(made, METRIC)]) for label, made in records.items()}
    return save_figure(draw_curves({"": lines}, METRIC, split="validation"), stem)


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
