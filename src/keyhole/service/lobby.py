"""Draws cohorts from the devices that wait, of any names: a population by check-in.

    waiting/<device>  of the rounds directory: a device that was told to come again. The time of the
                      file is until when it counts as waiting, its content what the device has said
    cohorts.jsonl     of the run: a line for each round, with the names of its devices
    evaluations.jsonl of the run: the same of rounds that measure the model

The service writes the first and the trainer reads it; the folder is there as long as a trainer
draws from it. The second is on the disk before a round is published, so a trainer that is killed
goes on with the same cohort. A device has a number from the first round that it is drawn for: its
place among the names of that file. Devices that only wait leave nothing but a file, which goes when
they do.

A cohort is drawn uniformly from those that wait, by the secret of the run. Who waits, devices and
the service decide: it is no uniform sample of a population, and no account counts on one.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path

import msgspec

from keyhole.errors import InputError
from keyhole.files import make_directory, storage_errors, sync_directory
from keyhole.rounds.cohorts import Draws
from keyhole.sampling import Cohorts
from keyhole.service.access import DEVICE_NAME
from keyhole.wire.assignment import CheckIn

WAITING = "waiting"
"""The folder of a rounds directory in which services note who waits."""

_LOG, _EVALUATORS = "cohorts.jsonl", "evaluations.jsonl"
_GRACE = 2.0  # times what a device was told to wait, after which it no longer counts as waiting
_MAX_AHEAD = 3 * 86_400.0  # seconds; who waits for longer was noted by a clock that was wrong
_IDLE = 20  # times as long as a look took, between two looks
_REMEMBERED = 1 << 14  # devices whose files need not be written again; a megabyte or two
_KEPT = 16  # cohorts in memory; a run that goes on asks for the newest
_LOOK_EVERY = 0.1  # seconds, at the least
_PROBE = ".now"  # a file of the waiting room that tells the time there


class WaitingRoom:
    """The devices that wait, as files. Any number of services and one trainer may share it.

    Args:
        clock: unix seconds; that of the machine which holds the folder if None. Services and
            trainer may run on others, with clocks that are days off.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] | None = None) -> None:
        self._folder = directory / WAITING
        self._clock = partial(_time_at, self._folder) if clock is None else clock
        self._said: dict[str, CheckIn] = {}  # what the files of some devices hold

    def open(self) -> None:
        """From now on services note who waits."""
        make_directory(self._folder)

    def close(self) -> None:
        """Nobody draws from it: services note nothing, and who waited is forgotten."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def note(self, device: str, said: CheckIn, seconds: float) -> None:
        """Takes note of a device that was told to come again; of no use where nobody draws."""
        until = self._clock() + seconds + _GRACE * max(seconds, 1.0)
        path = self._folder / device
        with suppress(OSError):  # no trainer draws, or the disk is full: the device asks again
            if self._said.get(device) != said or not _touched(path, until):
                # Of one length, so that it is never read by halves.
                content = b"%13d %13d\n" % (said.memory_mb or 0, said.examples or 0)
                file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
                with os.fdopen(file, "wb", buffering=0) as opened:
                    opened.write(content)
                    os.utime(file, (until, until))
                if len(self._said) >= _REMEMBERED:
                    self._said.clear()
                self._said[device] = said

    def forget(self, devices: Sequence[str]) -> None:
        """They were drawn, and wait no more."""
        for device in devices:
            (self._folder / device).unlink(missing_ok=True)

    def waiting(self) -> Iterator[str]:
        """Yields the devices that wait; those that have not come again are forgotten."""
        now = self._clock()
        with storage_errors(self._folder, "read"), os.scandir(self._folder) as entries:
            for entry in entries:
                try:
                    ahead = entry.stat().st_mtime - now
                except FileNotFoundError:
                    continue
                if 0 <= ahead <= _MAX_AHEAD and DEVICE_NAME.fullmatch(entry.name):
                    yield entry.name
                elif entry.name != _PROBE:
                    Path(entry.path).unlink(missing_ok=True)

    def said(self, device: str) -> CheckIn:
        """Returns what a device said when it last checked in; nothing where it is gone."""
        try:
            memory, examples = map(int, (self._folder / device).read_bytes().split())
        except (OSError, ValueError):
            return CheckIn()
        return CheckIn(memory_mb=memory or None, examples=examples or None)


def count_waiting(directory: Path, now: float) -> int | None:
    """Returns how many devices wait in a rounds directory, looked at from outside; None where no
    trainer draws from them."""
    count = 0
    try:
        with os.scandir(directory / WAITING) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # drawn a moment ago
                    is_here = 0 <= entry.stat().st_mtime - now <= _MAX_AHEAD
                    count += is_here and entry.name != _PROBE
    except FileNotFoundError:
        return None
    return count


def _time_at(folder: Path) -> float:
    """The clock that dates files of a folder; that of this machine where nothing can be written."""
    probe = folder / _PROBE
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT, 0o600))
        os.utime(probe)
        return probe.stat().st_mtime
    except OSError:
        return time.time()


def _touched(path: Path, until: float) -> bool:
    """Whether the file was there to be given another time."""
    try:
        os.utime(path, (until, until))
    except FileNotFoundError:
        return False
    return True


class _Line(msgspec.Struct, frozen=True):
    """A line of the log."""

    round: int
    devices: list[str]


class CohortLog:
    """The cohorts of a run, and so the numbers of its devices.

    Args:
        directory: of the run; None keeps it in memory.
        name: of the file.
    """

    def __init__(self, directory: Path | None, name: str = _LOG) -> None:
        self._path = None if directory is None else directory / name
        self._numbers: dict[str, int] = {}
        self._last: dict[str, int] = {}  # the newest round that each was drawn for
        self._newest: dict[int, list[str]] = {}
        self._cut()
        for line in self._lines():
            self._take(line)

    def of(self, t: int) -> dict[int, str] | None:
        """Returns the cohort of round t, number -> device in the order drawn; None before it is
        drawn."""
        names = self._newest.get(t)
        if names is None and t < min(self._newest, default=t):
            names = next((line.devices for line in self._lines() if line.round == t), None)
        return None if names is None else {self._numbers[name]: name for name in names}

    def add(self, t: int, devices: Sequence[str]) -> dict[int, str]:
        """Keeps the cohort of a round; it is on the disk when this returns."""
        line = _Line(t, list(devices))
        if self._path is not None:
            make_directory(self._path.parent)
            with storage_errors(self._path, "write"), self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            sync_directory(self._path.parent)
        self._take(line)
        found = self.of(t)
        assert found is not None
        return found

    def rests(self, device: str, t: int, rounds: int) -> bool:
        """Whether a device sits round t out, `rounds` after each that it was drawn for."""
        return t - self._last.get(device, -inf) <= rounds

    def _take(self, line: _Line) -> None:
        self._newest[line.round] = line.devices
        self._newest = dict(list(self._newest.items())[-_KEPT:])
        for device in line.devices:
            self._numbers.setdefault(device, len(self._numbers))
            self._last[device] = max(line.round, self._last.get(device, -1))

    def _cut(self) -> None:
        """Cuts off half a line, of a trainer that was killed while it wrote."""
        if self._path is not None and self._path.exists():
            with storage_errors(self._path, "read"), self._path.open("r+b") as file:
                end = sum(len(line) for line in file if line.endswith(b"\n"))
                file.truncate(end)

    def _lines(self) -> Iterator[_Line]:
        """The lines of the file."""
        if self._path is None or not self._path.exists():
            return
        with storage_errors(self._path, "read"), self._path.open("rb") as file:
            try:
                yield from (msgspec.json.decode(line, type=_Line) for line in file)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InputError(
                    f"{self._path} is damaged: got {error}; expected a cohort in each line, which "
                    "say what the numbers of devices in the run's records mean; restore it from a "
                    "copy, or start a new run"
                ) from error


@dataclass
class Lobby:
    """Draws the cohorts of a run from the devices that wait.

    Args:
        room: where they wait.
        min_memory_mb: those that say less, or nothing, are not drawn; 0 draws all.
        min_examples: those that say fewer, or nothing, are not drawn; 1 draws all.
        stop: once set, waiting ends with KeyboardInterrupt.
    """

    room: WaitingRoom
    min_memory_mb: int = 0
    min_examples: int = 1
    stop: threading.Event = field(default_factory=threading.Event)
    _log: CohortLog = field(default_factory=lambda: CohortLog(None), repr=False)
    _evaluators: CohortLog = field(default_factory=lambda: CohortLog(None), repr=False)

    def open(self, directory: Path | None) -> None:
        """Takes up a run, whose directory keeps its cohorts; services note who waits from now."""
        self._log, self._evaluators = CohortLog(directory), CohortLog(directory, _EVALUATORS)
        self.room.open()

    def cohort(
        self, t: int, cohorts: Cohorts, draws: Draws, tell: Callable[[int], None]
    ) -> Mapping[int, str]:
        """Returns the devices of round t, number -> name, once enough wait; the same ones when it
        is asked again.

        Args:
            tell: called at every look with how many wait that could be drawn.
        """
        return self._drawn(self._log, t, cohorts, draws, tell)

    def evaluators(
        self,
        t: int,
        cohorts: Cohorts,
        draws: Draws,
        tell: Callable[[int], None],
        *,
        seconds: float = inf,
        at_least: int = 1,
    ) -> Mapping[int, str]:
        """Returns the devices that measure the model after round t, as `cohort` does; who trained
        in a round may measure after it. Their numbers are those of this round alone.

        Args:
            seconds: after which it is drawn from those who wait then.
            at_least: how many must wait then; nobody is drawn from fewer.
        """
        until = time.monotonic() + seconds
        return self._drawn(self._evaluators, t, cohorts, draws, tell, until, at_least)

    def _drawn(
        self,
        log: CohortLog,
        t: int,
        cohorts: Cohorts,
        draws: Draws,
        tell: Callable[[int], None],
        until: float = inf,
        at_least: int = 1,
    ) -> Mapping[int, str]:
        known, purpose = log.of(t), b"check-in" if log is self._log else b"evaluation"
        if known is not None:
            return known
        while True:
            began = time.monotonic()
            rest = cohorts.rest if log is self._log else -1
            here = [name for name in self.room.waiting() if self._may_come(name, t, rest)]
            tell(len(here))
            is_late = time.monotonic() >= until
            if is_late and len(here) < at_least:
                return {}
            if is_late or len(here) >= cohorts.needed:
                drawn = log.add(t, draws.among(here, cohorts.asked, t, purpose))
                self.room.forget(list(drawn.values()))
                return drawn
            if self.stop.wait(max(_LOOK_EVERY, _IDLE * (time.monotonic() - began))):
                raise KeyboardInterrupt

    def _may_come(self, device: str, t: int, rest: int) -> bool:
        if self._log.rests(device, t, rest):
            return False
        if self.min_memory_mb == 0 and self.min_examples <= 1:
            return True
        said = self.room.said(device)
        has_memory = (said.memory_mb or 0) >= self.min_memory_mb
        # What is said is a power of two, and stands for all numbers up to the next.
        return has_memory and 2 * (said.examples or 0) > self.min_examples
