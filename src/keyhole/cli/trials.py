"""Trials on the screen: bars that move with the rounds, Ctrl-C that loses none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from rich.progress import TaskID

from keyhole.cli.progress import progress_bars
from keyhole.tasks.experiment import Experiment, Hold, hold_here
from keyhole.tasks.named import task_named
from keyhole.tasks.trial_directory import Result
from keyhole.training.cores import Cores
from keyhole.training.loop import Rounds, stop_on_signals
from keyhole.training.record import RoundRecord
from keyhole.training.threads import count_cores
from keyhole.training.visit import Executor

__all__ = ["run_trials"]


def run_trials(
    work: Iterable[tuple[str, Experiment, int, Path]],
    total: int,
    keep_state: bool,
    kind_of: Callable[[threading.Event], Rounds | None] = lambda stop: None,
    execute: Executor | None = None,
    hold: Hold = hold_here,
) -> Iterator[tuple[Path, Result]]:
    """Runs trials one after the other and yields their results.

    The first Ctrl-C finishes the round under way, which is stored, and ends the command; the same
    command goes on from there.

    Args:
        work: description, experiment, trial and directory of each.
        total: how many there are.
        keep_state: whether models stay on disk.
        kind_of: what makes the rounds, given the event that stops them; None makes them in process.
        execute: where clients train; None takes all cores of this process.
        hold: what holds the server's state.
    """
    with progress_bars() as bars, stop_on_signals() as stop:
        whole = bars.add_task("trials", total=total, note="")
        for description, experiment, trial, directory in work:
            settings = experiment.arm.settings
            metric = task_named(experiment.arm.task).metric
            bar = bars.add_task(description, total=settings.rounds, note="")

            def show(record: RoundRecord, bar: TaskID = bar, metric: str = metric) -> None:
                note = f"{metric} {record.metrics[metric]:.4f}" if record.metrics else None
                bars.advance(bar)
                if note is not None:
                    bars.update(bar, note=note)

            result = experiment.run(
                trial,
                directory,
                execute=execute or Cores(count_cores()),
                stop=stop,
                on_round=show,
                keep_state=keep_state,
                kind=kind_of(stop),
                hold=hold,
            )
            if result is None:
                click.echo(f"{directory} keeps what was done; the same command goes on", err=True)
                raise click.Abort
            bars.update(bar, visible=False)
            bars.advance(whole)
            yield directory, result
