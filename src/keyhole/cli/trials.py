"""Shows trials on the screen: bars that move with the rounds, then who learned what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from rich.progress import (
    TaskID,
)
from rich.table import Table

from keyhole.cli.screen import progress_bars
from keyhole.delivery import all_deliveries
from keyhole.experiments.experiment import Experiment, Hold, hold_here
from keyhole.experiments.trial import Result
from keyhole.rounds.cores import Cores
from keyhole.rounds.loop import Rounds, stop_on_signals
from keyhole.rounds.record import RoundRecord, read_records
from keyhole.rounds.round import Executor
from keyhole.rounds.threads import count_cores


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
        keep_state: whether models stay on disk.
        kind_of: what makes the rounds, given the event that stops them; None makes them in process.
        execute: where clients train; None takes all cores of this process.
        hold: what holds the server's state.
    """
    with progress_bars() as bars, stop_on_signals() as stop:
        whole = bars.add_task("trials", total=total, note="")
        for description, experiment, trial, directory in work:
            spec = experiment.spec
            metric = experiment.kind.metric
            bar = bars.add_task(description, total=spec.rounds, note="")

            def show(record: RoundRecord, bar: TaskID = bar, metric: str = metric) -> None:
                note = f"{metric} {record.metrics[metric]:.4f}" if record.metrics else None
                bars.advance(bar)
                if note is not None:
                    bars.update(bar, note=note)

            def tell(note: str, directory: Path = directory) -> None:
                click.echo(f"keyhole: {directory}: {note}", err=True)

            result = experiment.run(
                trial,
                directory,
                execute=execute or experiment.engine or Cores(count_cores()),
                stop=stop,
                on_round=show,
                on_note=tell,
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


def skipped_line(directory: Path) -> str:
    """Says how many rounds of a trial left the model as it was; nothing where all of them counted.

    Under privacy a sum of nobody is released, too: that nobody came must not show.
    """
    records = read_records(directory / "records.jsonl")
    skipped = [record.round for record in records if record.is_skipped]
    if not skipped:
        return ""
    return (
        f"{directory.name}: {len(skipped)} of {len(records)} rounds closed without an update that "
        f"counts and left the model as it was, the last of them round {skipped[-1]}\n"
    )


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
    """Those that a client meets first come first, as deliveries list them."""
    known = list(dict.fromkeys(party for way in all_deliveries() for party in way.about.leaks))
    return sorted(parties, key=lambda party: known.index(party) if party in known else len(known))
