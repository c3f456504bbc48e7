"""Makes trials, shown on the screen, and finds what was asked in those that others have made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from keyhole.cli.numbers import write_bytes
from keyhole.cli.options import option
from keyhole.cli.screen import import_shown
from keyhole.delivery import all_deliveries
from keyhole.delivery.popular import popular_settings
from keyhole.delivery.records import CodingKind
from keyhole.errors import InputError
from keyhole.experiments.specs import SYNTHETIC
from keyhole.files import kept_secret
from keyhole.logs import say, tell
from keyhole.rounds.cohorts import SECRET_BYTES, Draws

if TYPE_CHECKING:
    import threading

    from rich.progress import TaskID
    from rich.table import Table

    from keyhole.experiments.experiment import Experiment, Hold
    from keyhole.experiments.opening import SavedTrial
    from keyhole.experiments.trackers import Tracker
    from keyhole.experiments.trial import Result
    from keyhole.rounds.loop import Rounds
    from keyhole.rounds.record import RoundRecord
    from keyhole.rounds.round import Executor
    from keyhole.rounds.spec import RunSpec


coding_option = option(
    "--coding",
    type=click.Choice(get_args(CodingKind)),
    default="plain",
    help="How the numbers of slices are stored: as they are, in 16, 8 or 4 bits.",
)


def open_saved(run: Path, data: str) -> SavedTrial:
    """Opens the one trial of a run on what `--data` names, or on the data it was trained with."""
    from keyhole.experiments.opening import open_trials, trials_in

    trial, *more = trials_in(run)
    if more:
        raise InputError(
            f"{run} has {len(more) + 1} trials, each with a model of its own: got the run; "
            f"expected one of them; name {trial}, say"
        )
    (found,) = open_trials([trial], None if data == SYNTHETIC else data, find=import_shown)
    return found


def run_settings(experiment: Experiment, draws: Draws, number: int) -> dict[str, Any]:
    """Returns what devices are told about a run whose state is given out as round `number`."""
    spec = experiment.spec
    return {
        "nonce": draws.nonce(number),
        "keys_per_client": experiment.keys_per_client,
        "shared_keys": spec.shared_keys,
        **popular_settings(experiment.popular),
        "spec": spec.for_devices(),
    }


def draws_of(run: Path) -> Draws:
    """Returns what a run draws from whose state is given out: a secret in its directory, and not
    its seed."""
    return Draws("secret", kept_secret(run / "secret", SECRET_BYTES))


def run_trials(
    work: Iterable[tuple[str, Experiment, int, Path]],
    total: int,
    keep_state: bool,
    kind_of: Callable[[threading.Event], Rounds | None] = lambda stop: None,
    execute: Executor | None = None,
    hold: Hold | None = None,
    trackers: Sequence[Tracker] = (),
    on_record: Callable[[RoundRecord], None] | None = None,
) -> Iterator[tuple[Path, Result]]:
    """Runs trials one after the other, in one bar each, and yields their results.

    The first Ctrl-C finishes the round under way, which is stored, and ends the command; a second
    one gives that round up. The same command resumes the trial.

    Args:
        work: description, experiment, trial and directory of each.
        kind_of: what makes the rounds, given the event that stops them; None makes them in process.
        execute: where clients train; None takes all cores of this process.
        hold: what holds the server's state; None holds it here.
        trackers: that are told every round.
        on_record: is told how every round that is made here ended; None tells of rounds without
            an update that counts.
    """
    from keyhole.cli.bars import progress_bars
    from keyhole.experiments.experiment import hold_here
    from keyhole.experiments.measuring import measured_on
    from keyhole.experiments.trackers import run_tracked
    from keyhole.experiments.trial import rounds_kept
    from keyhole.rounds.cores import Cores
    from keyhole.signals import ignore_interrupts, stop_on_signals

    with progress_bars() as bars, stop_on_signals() as stop:
        whole = bars.add_task("trials", total=total, note="")
        for description, experiment, trial, directory in work:
            metric, kept = experiment.kind.metric, rounds_kept(directory)
            bar = bars.add_task(description, total=experiment.spec.rounds, note="")

            def show(
                record: RoundRecord,
                bar: TaskID = bar,
                metric: str = metric,
                kept: int = kept,
                spec: RunSpec = experiment.spec,
            ) -> None:
                if record.round >= kept:
                    bars.advance(bar)
                    (on_record or _tell_if_empty)(record)
                elif record.round == kept - 1:
                    bars.reset(bar, completed=kept, before=kept, note="")
                    text = f"resumed after round {record.round}"
                    tell("trainer", "resumed", text, round=record.round)
                if record.metrics:
                    told = {n: v for n, v in record.numbers.items() if n.startswith("client_")}
                    shown = {n: v for n, v in record.metrics.items() if n == metric} | told
                    words = {metric: measured_on(spec, record.metrics, "")}
                    note = ", ".join(
                        f"{words.get(name, '')} {name} {value:.4f}".lstrip()
                        for name, value in shown.items()
                    )
                    bars.update(bar, note=note)

            def warn(note: str, directory: Path = directory) -> None:
                say(f"keyhole: {directory}: {note}")

            result = None
            with suppress(KeyboardInterrupt):  # a second one, in the middle of a round
                result = run_tracked(
                    experiment,
                    trackers,
                    trial,
                    directory,
                    on_failure=warn,
                    execute=execute or experiment.engine or Cores(),
                    stop=stop,
                    on_round=show,
                    on_note=warn,
                    keep_state=keep_state,
                    kind=kind_of(stop),
                    hold=hold or hold_here,
                )
            if result is None:
                ignore_interrupts()  # a second one that comes late cuts no line
                saved = f"keeps {rounds_kept(directory)} finished rounds"
                say(f"{directory} {saved}; the same command resumes it")
                raise click.Abort
            bars.update(bar, visible=False)
            bars.advance(whole)
            yield directory, result


def _tell_if_empty(record: RoundRecord) -> None:
    if record.is_skipped:
        tell("trainer", "round empty", record.told, "warning", round=record.round)


def skipped_line(directory: Path, records: Sequence[RoundRecord]) -> str:
    """Says how many rounds of a trial left the model as it was; nothing where all of them counted.

    Under privacy a sum of nobody is released, too: that nobody came must not show.
    """
    skipped = [record.round for record in records if record.is_skipped]
    if not skipped:
        return ""
    return (
        f"{directory.name}: {len(skipped)} of {len(records)} rounds closed without an update that "
        f"counts and left the model as it was, the last of them round {skipped[-1]}\n"
    )


def broadcast_line(moved: float, parameters: float, whole: float) -> str:
    """Says what select costs beside broadcast, per client and round, and why where it costs more.

    Args:
        moved: bytes that a client receives and sends.
        parameters: how many of these are parameters.
        whole: bytes of the whole model, both ways.

    >>> broadcast_line(3_000, 2_600, 256_000)
    'select costs 0.012 times broadcast here: 3.0 kB per client and round, not 256 kB'
    >>> print(broadcast_line(848, 192, 320))
    select costs 2.6 times broadcast here: 848 B per client and round, not 320 B, because 192 B of \
parameters come with 656 B of keys, proofs and padding; select saves where a client holds less of \
the model, or a slice is larger
    """
    told = (
        f"select costs {moved / whole:.2g} times broadcast here: {write_bytes(moved)} per client "
        f"and round, not {write_bytes(whole)}"
    )
    if moved <= whole:
        return told
    return (
        f"{told}, because {write_bytes(parameters)} of parameters come with "
        f"{write_bytes(moved - parameters)} of keys, proofs and padding; select saves where a "
        "client holds less of the model, or a slice is larger"
    )


_PARTIES = {
    "server": "who holds the model and adds updates up: the trainer",
    "slice server": "what gives out slices: keyhole serve",
    "mirrors and CDNs": "copies between it and devices, where there are some",
    "first server": "of one operator: slice server, aggregator, or both",
    "second server": "of another operator, the same",
    "trainer": "keyhole train",
}
"""What parties are, for those who have met only their names."""


def trust_table(record: RoundRecord) -> Table:
    """Returns one line for each party."""
    from rich.table import Table

    table = Table(title="who learned what", title_justify="left")
    for column in ("party", "of the keys, when slices were delivered", "when updates were added"):
        table.add_column(column)
    # Those that a client meets first come first, as deliveries list them.
    known = list(dict.fromkeys(party for way in all_deliveries() for party in way.about.leaks))
    parties = sorted(
        {**record.seen_by, **record.seen_in_sum},
        key=lambda party: known.index(party) if party in known else len(known),
    )
    known_parties = [f"{party}: {_PARTIES[party]}" for party in parties if party in _PARTIES]
    table.caption, table.caption_justify = "\n".join(known_parties), "left"
    for party in parties:
        learned = (seen.get(party, "nothing") for seen in (record.seen_by, record.seen_in_sum))
        table.add_row(party, *learned)
    return table


def privacy_line(record: RoundRecord) -> str:
    """Returns what a run has spent, for whom; nothing where it promised nothing."""
    spent = record.privacy
    if not spent:
        return ""

    def bound(name: str) -> str:
        return "without bound" if spent[name] is None else f"{spent[name]:.4g}"

    counted = f"{spent['sampling']} cohorts"
    if spent["sampling"] == "participation":
        counted = f"counted in {spent['participations']} of them"
    how = {
        "simulated": "; simulated: cohorts and noise come from the seed",
        "named": "; cohorts were named by the seed",
    }.get(spent["drawn"], "")
    if "epsilon_unseen" in spent:
        how = f"; {bound('epsilon_unseen')} for those who do not see who takes part"
    return (
        f"privacy spent: epsilon {bound('epsilon')} at delta {spent['delta']:g} after "
        f"{spent['rounds']} rounds, for one {spent['unit']} ({spent['neighbours']}, "
        f"{counted}{how})"
    )
