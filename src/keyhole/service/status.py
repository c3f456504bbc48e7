"""Says how the current round of a rounds directory stands, from its files alone.

A trainer leaves beside the rounds, in `progress.json`, what the other files do not tell: the goal,
when the round was opened and when it closes, how earlier rounds ended. Anyone who may read the
directory can look; what is seen are counts. `missing` alone names devices: it is for those who run
the trainer.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Annotated

import msgspec

from keyhole.errors import KeyholeError, StorageError
from keyhole.files import storage_errors
from keyhole.service.access import DEVICE_NAME
from keyhole.service.directory import (
    COHORT,
    MANIFEST,
    read_cohort,
    read_current,
    round_path,
    rounds_path,
    write_file,
)
from keyhole.service.lobby import count_waiting
from keyhole.service.spool import refused_in, sizes_in
from keyhole.wire.assignment import Phase

UPDATES = "updates"
"""The folder of a rounds directory in which devices' updates are put."""
PROGRESS = "progress.json"

_IDLE = 20  # times as long as counting took, between two counts

_Count = Annotated[int, msgspec.Meta(ge=0)]


class TrainerProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a trainer says of its run: counts, and the seconds at which things happened."""

    round: str
    number: _Count
    updates: _Count
    goal: _Count
    opened: float  # unix seconds
    seen: float  # when the trainer last looked at its updates
    closes: float | None = None  # when the round closes with what is there; None if it waits
    run: str = ""  # the folder of the run, by its last two names
    closed: _Count = 0  # rounds that have closed since this trainer was started
    empty: _Count = 0  # of these, the rounds in which no update counted
    last_empty: int | None = None
    measures: bool = False  # whether devices measure the model in it, and train nothing
    needs: _Count = 0  # after it has closed, devices that are waited for to draw the next from
    measures_next: bool = False  # whether these are to measure the model
    ended: bool = False  # whether the trainer has said that it ends


class RoundStatus(msgspec.Struct, frozen=True):
    """How a round stands. What nobody has said is None.

    Args:
        cohort: devices that take part; None where all may, and in a copy of rounds.
        goal: updates with which it closes.
        updates: that are here, or as the trainer counts them at two aggregators.
        refused: updates that were refused when they came.
        bytes: of the updates that are here; None where they go elsewhere.
        checked_in: devices that were told to take part.
        waiting: devices that have checked in and are in no round.
        seconds_open: since it was opened, until now.
        seconds_left: until it closes with what is there.
        trainer_away: seconds since its trainer looked; None where no trainer has said a word.
        measures: whether its devices measure the model, and train nothing.
        needs: devices that its trainer waits for to draw the next from; 0 where it does not.
        has_ended: whether its trainer has said that it ends.
    """

    round: str
    number: int
    phase: Phase
    cohort: int | None
    goal: int | None
    updates: int | None
    refused: int
    bytes: int | None
    seconds_open: float | None
    checked_in: int | None = None
    waiting: int | None = None
    seconds_left: float | None = None
    trainer_away: float | None = None
    run: str = ""
    closed: int = 0
    empty: int = 0
    last_empty: int | None = None
    measures: bool = False
    needs: int = 0
    measures_next: bool = False
    has_ended: bool = False

    @property
    def told(self) -> str:
        """Says in one line how it stands: what it waits for while it is open."""
        if self.updates is None:
            return f"round {self.number} is {self.phase}; its counts are at the metrics' address"
        if not self.updates and self.goal is None and not self.refused:  # perhaps a copy
            return f"round {self.number} is {self.phase}; no update is here"
        if self.phase == "closed":
            of = _of(self.updates, self.goal, self.measures)
            rest = f"; {_drawn_from(self.waiting or 0, self.needs, self.measures_next)}"
            closed = "has measured the model" if self.measures else "is closed"
            return f"round {self.number} {closed} with {of}{rest if self.needs else ''}"
        done = self.updates + self.refused
        missing = None if self.cohort is None else max(0, self.cohort - done)
        return waits(
            self.number,
            self.updates,
            self.goal,
            missing,
            self.waiting,
            self.refused,
            self.measures,
        )


def waits(
    number: int,
    here: int,
    goal: int | None,
    missing: int | None,
    waiting: int | None = None,
    refused: int = 0,
    measures: bool = False,
) -> str:
    """Returns what a round waits for, as one line.

    >>> waits(3, 2, 10, 12, waiting=14)
    'round 3: 2 of 10 updates, 12 devices to come, 14 devices waiting'
    """
    rest = [] if missing is None else [f"{counted(missing, 'device')} to come"]
    rest += [] if waiting is None else [f"{counted(waiting, 'device')} waiting"]
    rest += [f"{refused} refused"] if refused else []
    who = f"round {number} measures the model" if measures else f"round {number}"
    return f"{who}: {', '.join([_of(here, goal, measures), *rest])}"


def gathers(
    number: int, here: int, needed: int, measures: bool = False, seconds: float = inf
) -> str:
    """Returns what a round waits for that is yet to be drawn, as one line.

    >>> gathers(3, 2, 10)
    'round 3: 2 of 10 devices wait to be drawn'
    >>> gathers(3, 14, 10)
    'round 3: 14 devices wait to be drawn, and 10 are enough'
    >>> gathers(3, 2, 10, measures=True, seconds=60)
    'round 3: 2 of 10 devices wait to measure the model; goes on without the others in 60 s'
    """
    limit = "" if seconds == inf else f"; goes on without the others in {seconds:,.0f} s"
    return f"round {number}: {_drawn_from(here, needed, measures)}{limit * (here < needed)}"


def _drawn_from(here: int, needed: int, measures: bool) -> str:
    what = "measure the model" if measures else "be drawn"
    if here > needed:
        return f"{counted(here, 'device')} wait to {what}, and {needed:,} are enough"
    return f"{here:,} of {counted(needed, 'device')} wait to {what}"


def counted(number: int, what: str) -> str:
    """Returns a number with what it counts.

    >>> counted(1, "device"), counted(1200, "update")
    ('1 device', '1,200 updates')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _of(updates: int, goal: int | None, measures: bool = False) -> str:
    whole = counted(updates if goal is None else goal, "answer" if measures else "update")
    return whole if goal is None else f"{updates:,} of {whole}"


@dataclass(frozen=True)
class _Counted:
    """Counts of files, and until when they are good enough."""

    of: tuple[str, Phase]
    updates: int
    bytes: int
    refused: int
    waiting: int | None
    due: float


@dataclass
class RoundFiles:
    """The rounds directory of a service, looked at from outside. Counting a million files takes
    seconds, so what was counted is kept for 20 times as long as that took."""

    directory: Path
    _counted: _Counted | None = field(default=None, init=False, repr=False)

    def status(self, now: float) -> RoundStatus | None:
        """Returns how the current round stands at `now`, in unix seconds; None before the first.

        Raises:
            StorageError: a file is damaged, or cannot be read.
        """
        current = read_current(self.directory)
        if current is None:
            return None
        path = round_path(self.directory, current.round)
        told = read_progress(self.directory)
        if told is not None and told.round != current.round:
            told = None
        found = self._count(current.round, current.phase, now)
        cohort = _cohort_size(path)
        opened = _made_at(path, now) if told is None else told.opened
        goal = cohort if told is None else told.goal
        is_open = current.phase == "open"
        closes = None if told is None or not is_open else told.closes
        return RoundStatus(
            current.round,
            current.number,
            current.phase,
            cohort,
            goal,
            max(found.updates, 0 if told is None else told.updates),
            found.refused,
            found.bytes if found.updates or told is None or not told.updates else None,
            max(0.0, now - opened),
            waiting=found.waiting,
            seconds_left=None if closes is None else max(0.0, closes - now),
            trainer_away=None if told is None else max(0.0, now - told.seen),
            run="" if told is None else told.run,
            closed=0 if told is None else told.closed,
            empty=0 if told is None else told.empty,
            last_empty=None if told is None else told.last_empty,
            measures=told is not None and told.measures,
            needs=0 if told is None or is_open else told.needs,
            measures_next=told is not None and told.measures_next,
            has_ended=told is not None and told.ended,
        )

    def _count(self, round_id: str, phase: Phase, now: float) -> _Counted:
        began, known = time.monotonic(), self._counted
        if known is not None and known.of == (round_id, phase) and began < known.due:
            return known
        folder = self.directory / UPDATES / round_id
        sizes, refused = sizes_in(folder), len(refused_in(folder))
        waiting, done = count_waiting(self.directory, now), time.monotonic()
        due = done + _IDLE * (done - began)
        known = _Counted((round_id, phase), len(sizes), sum(sizes.values()), refused, waiting, due)
        self._counted = known
        return known

    def missing(self) -> list[str]:
        """Returns the devices of the cohort whose update is not here, by name; none where all may
        take part, or where updates go elsewhere and nobody here knows."""
        current = read_current(self.directory)
        if current is None:
            return []
        folder = self.directory / UPDATES / current.round
        here = {*sizes_in(folder), *refused_in(folder)}
        told = read_progress(self.directory)
        if told is not None and told.round == current.round and told.updates > len(here):
            return []
        cohort = read_cohort(round_path(self.directory, current.round)) or {}
        return [device for device in cohort if device not in here]


def is_run_name(name: str) -> bool:
    """Returns whether a run of a service may be called so: as a device may."""
    return DEVICE_NAME.fullmatch(name) is not None


def has_rounds(directory: Path) -> bool:
    """Returns whether a directory is one of rounds: a trainer has made it."""
    return rounds_path(directory).is_dir()


def run_names(folder: Path) -> list[str]:
    """Returns the runs with a name in the folder of a service, sorted."""
    with storage_errors(folder, "read"):
        names = [each.name for each in folder.iterdir() if is_run_name(each.name)]
    return sorted(name for name in names if has_rounds(folder / name))


@dataclass
class RunsFiles:
    """The folder of a service with all its runs, looked at from outside."""

    folder: Path
    _files: dict[str, RoundFiles] = field(default_factory=dict, init=False, repr=False)

    def statuses(self, now: float) -> dict[str, RoundStatus]:
        """Returns how the current round of each run stands at `now`, by the name of the run; the
        one of the folder itself has none. What is being replaced is passed over."""
        found = {}
        for name in ("", *run_names(self.folder)):
            files = self._files.setdefault(name, RoundFiles(self.folder / name))
            with suppress(KeyholeError, OSError):
                if (status := files.status(now)) is not None:
                    found[name] = status
        return found


def read_progress(directory: Path) -> TrainerProgress | None:
    """Returns what the trainer of a rounds directory says; None where there was none."""
    path = directory / PROGRESS
    try:
        return msgspec.json.decode(path.read_bytes(), type=TrainerProgress)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StorageError(
            f"{path.name} cannot be read: got {type(error).__name__}; expected the file as a "
            "trainer writes it; remove it: the trainer writes it again"
        ) from error


def write_progress(directory: Path, told: TrainerProgress) -> None:
    """Replaces what the trainer says; nothing depends on it, so nobody waits for the disk."""
    write_file(directory / PROGRESS, msgspec.json.encode(told), durable=False)


def _made_at(path: Path, now: float) -> float:
    """When a round was published; now, where it has just gone."""
    try:
        return (path / MANIFEST).stat().st_mtime
    except FileNotFoundError:
        return now


def _cohort_size(path: Path) -> int | None:
    """How many devices take part; None where all may."""
    try:
        found = (path / COHORT).stat()
    except FileNotFoundError:
        return None
    return _size_of(path, found.st_mtime_ns, found.st_ino)


@lru_cache(maxsize=4)
def _size_of(path: Path, *version: int) -> int | None:
    """The same, read once for each version of the file: a cohort may have a million names."""
    cohort = read_cohort(path)
    return None if cohort is None else len(cohort)
