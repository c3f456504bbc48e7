"""Progress bars of long commands, on standard error: how far, how fast, how long still.

Trials on the screen: bars that move with the rounds, Ctrl-C that loses none.

The trust table of a run: who learned what while slices were delivered and updates added up, and
what its models tell.

Notices: what a command that waits tells whoever looks at it, without saying it for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from keyhole.data.cache import cache_root, find_source
from keyhole.data.open import find_current, import_dataset, locate
from keyhole.delivery.base import PARTIES
from keyhole.experiments.experiment import Experiment, Hold, Result, hold_here
from keyhole.experiments.named import task_named
from keyhole.rounds.cores import Cores
from keyhole.rounds.loop import Rounds, stop_on_signals
from keyhole.rounds.record import RoundRecord, read_records
from keyhole.rounds.round import Executor
from keyhole.rounds.threads import count_cores


def progress_bars() -> Progress:
    """Returns bars with a description, the count, the rate and the time that remains.

    A task is added with a `note`, which may be empty, and where it helps with a `unit`: what is
    counted, such as "clients"; "bytes" are told as kB and MB.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        _Count(Column(no_wrap=True)),  # where a line is too long, the bar becomes shorter
        _Rate(Column(no_wrap=True)),
        TimeElapsedColumn(Column(no_wrap=True)),
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )


def import_shown(source: str | Path) -> Path:
    """Returns the directory of a dataset, imported where it is not, with a bar for each step."""
    if (found := find_current(source, cache_root())) is not None:
        return found
    path = locate(source)
    known = find_source(path)
    with progress_bars() as bars:
        hashing = bars.add_task(f"hash {known.name}", total=None, note="", unit="bytes")
        reading = bars.add_task(
            f"import {known.name}", total=None, start=False, note="", unit=known.unit
        )

        def show_hashing(done: int, total: int) -> None:
            bars.update(hashing, completed=done, total=total)
            if done == total:  # the first client may take long, and its time counts
                bars.start_task(reading)

        def show_reading(done: int, total: int) -> None:
            bars.update(reading, completed=done, total=total)

        directory = import_dataset(path, hashing=show_hashing, progress=show_reading)
        if not bars.tasks[-1].completed:  # bytes that are known already are not read
            bars.update(reading, visible=False)
    return directory


class _Count(ProgressColumn):
    """How much is done, of how much."""

    def render(self, task: Task) -> Text:
        """Returns 3/7, 3/7 clients, or 3.0 MB/7.1 MB; ? stands for what is not known yet."""
        unit = task.fields.get("unit", "")
        done = _number(task.completed, unit)
        total = "?" if task.total is None else _number(task.total, unit)
        named = f" {unit}" if unit not in ("", "bytes") else ""
        return Text(f"{done:>{len(total)}}/{total}{named}", style="progress.download")


class _Rate(ProgressColumn):
    """Rounds, bytes or whatever is counted, per second."""

    def render(self, task: Task) -> Text:
        """Returns the rate of late, or that since the start where there was one step alone."""
        speed = task.finished_speed or task.speed
        seconds = task.finished_time or task.elapsed
        if speed is None and task.completed and seconds:
            speed = task.completed / seconds
        if speed is None:
            return Text("")
        is_bytes = task.fields.get("unit") == "bytes"
        said = decimal(int(speed)) if is_bytes else f"{speed:,.1f}"
        return Text(f"{said}/s", style="progress.data.speed")


def _number(value: float, unit: str) -> str:
    return decimal(int(value)) if unit == "bytes" else str(int(value))


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


def last_record(directory: Path) -> RoundRecord | None:
    """The newest record of a trial; None where it made no round."""
    records = read_records(directory / "records.jsonl")
    return records[-1] if records else None


def trust_table(record: RoundRecord) -> Table:
    """One line for each party."""
    table = Table(title="who learned what", title_justify="left")
    for column in ("party", "of the keys, when slices were delivered", "when updates were added"):
        table.add_column(column)
    for party in _in_order({**record.seen_by, **record.seen_in_sum}):
        table.add_row(
            party, record.seen_by.get(party, "nothing"), record.seen_in_sum.get(party, "nothing")
        )
    return table


def privacy_line(record: RoundRecord) -> str:
    """What a run has spent, for whom; nothing where it promised nothing."""
    spent = record.privacy
    if not spent:
        return ""
    epsilon = "without bound" if spent["epsilon"] is None else f"{spent['epsilon']:.4g}"
    return (
        f"privacy spent: epsilon {epsilon} at delta {spent['delta']:g} after {spent['rounds']} "
        f"rounds, for one {spent['unit']} ({spent['neighbours']}, {spent['sampling']} cohorts)"
    )


def _in_order(parties: Iterable[str]) -> list[str]:
    """Those that a client meets first come first, as `PARTIES` has them; records sort by letter."""
    known = list(dict.fromkeys(party for way in PARTIES.values() for party in way.seen_by))
    return sorted(parties, key=lambda party: known.index(party) if party in known else len(known))


class Notices:
    """Lines on standard error, each kind once until something has changed."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, kind: str | None = None) -> None:
        """Prints a line, unless one of its kind is there already.

        Args:
            text: the line.
            kind: what it is about, where the text is never twice the same.
        """
        kind = text if kind is None else kind
        if kind not in self._told:
            self._told.add(kind)
            click.echo(text, err=True)

    def forget(self) -> None:
        """Things go on: what happens from now on is news again."""
        self._told.clear()
