"""`keyhole demo`: train a small model with and without select, and compare."""

from __future__ import annotations

import json
from functools import partial

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from keyhole.tasks.demo import ARMS, Arm, Outcome, make_users, run_arm

__all__ = ["demo"]


@click.command()
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**32 - 1))
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def demo(rounds: int, seed: int, as_json: bool) -> None:
    """Train a small model with and without select, and compare.

    Predicts the topic of a post from its words, on data made on the spot from the seed. Each line
    of the table is one way to choose keys; all see the same clients in the same rounds.
    """
    outcomes = _train(rounds, seed)
    if as_json:
        rows = [
            {"keys": arm.name, **outcome.__dict__, "rounds": rounds, "seed": seed}
            for arm, outcome in outcomes
        ]
        click.echo(json.dumps(rows, indent=2))
        return
    Console().print(_table(outcomes))


def _train(rounds: int, seed: int) -> list[tuple[Arm, Outcome]]:
    progress = Progress(
        TextColumn("{task.description:14}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    outcomes, users = [], make_users(seed)
    with progress:
        for arm in ARMS:
            bar = progress.add_task(arm.name, total=rounds)
            outcomes.append(
                (arm, run_arm(arm, users, seed, rounds, partial(progress.advance, bar)))
            )
    return outcomes


def _table(outcomes: list[tuple[Arm, Outcome]]) -> Table:
    table = Table(title="Topic prediction on synthetic posts, 30 clients a round")
    for name in (
        "client's keys",
        "accuracy",
        "numbers held",
        "share",
        "KB down",
        "KB up",
    ):
        table.add_column(name, justify="left" if name.startswith("client") else "right")
    whole = outcomes[0][1].client_size
    for arm, outcome in outcomes:
        table.add_row(
            arm.name,
            f"{outcome.accuracy:.1%}",
            f"{outcome.client_size:,.0f}",
            f"{outcome.client_size / whole:.1%}",
            f"{outcome.bytes_down / 1000:,.1f}",
            f"{outcome.bytes_up / 1000:,.1f}",
        )
    return table
