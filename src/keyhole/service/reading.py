"""Reads rounds from a directory in any number of processes while a publisher writes to it."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from keyhole.errors import NotFoundError, StorageError, TooLateError
from keyhole.service.directory import (
    CURRENT,
    MANIFEST,
    locked_manifest,
    read_cohort,
    read_current,
    read_manifest,
    round_path,
)
from keyhole.service.mapped import MappedTable, open_table
from keyhole.service.segments import table_path
from keyhole.wire.manifest import number_of
from keyhole.wire.tables import NO_ROUND, Current, OpenRound

_LOOK_EVERY = 0.05  # seconds between two looks at a file

_Stamp: TypeAlias = tuple[int, int, int]
"""What differs between two files that had one name: inode, time, size."""


@dataclass
class _Entry:
    """An open round, or why it cannot be opened."""

    number: int
    used: float
    looked: float
    stamp: _Stamp | None
    round: OpenRound | None = None
    error: StorageError | None = None
    holders: int = 0
    lock: ExitStack = field(default_factory=ExitStack)


class RoundsDirectory:
    """The rounds of a directory, opened when they are asked for; implements `RoundSource`.

    The current round and the one numbered before it stay open. An older one is closed, so that its
    publisher can take it away, once nobody has asked for it for a while: until then its files stay
    on the disk, besides the two rounds that are kept and the one that is spare. Rounds are looked
    at when `current` or `hold` is called, as probes of a service do.

    A round that was published again is opened anew. Holders of the old one finish with it.

    Args:
        directory: that a publisher writes; may be empty yet.
        linger: seconds that an older round stays open without being used; a damaged one is looked
            at again after as long.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        directory: Path | str,
        linger: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = Path(directory)
        self._linger = linger
        self._clock = clock
        self._mutex = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._current: Current | None = None
        self._stamp: _Stamp | None = None
        self._looked = -1e9

    def current(self) -> Current | None:
        """Implements `RoundSource.current`; at most a twentieth of a second old.

        Raises:
            StorageError: the file that names it is damaged.
        """
        with self._mutex:
            self._refresh(self._clock())
            return self._current

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        """Implements `RoundSource.hold`; what `segment` returned is not to outlive it.

        Raises:
            StorageError: its files are damaged; it is not served.
        """
        with self._mutex:
            now = self._clock()
            with suppress(StorageError):  # `current` tells of it
                self._refresh(now)
            entry = self._find(round_id, now)
            if entry.round is None:
                # Each time with a traceback of its own, else it would grow with every request.
                raise (entry.error or _no_such_round()).with_traceback(None)
            entry.holders += 1
        try:
            yield entry.round
        finally:
            with self._mutex:
                entry.holders -= 1
                entry.used = self._clock()
                if not entry.holders and self._entries.get(round_id) is not entry:
                    entry.lock.close()  # it was published again

    def close(self) -> None:
        """Lets go of every round that nobody holds."""
        with self._mutex:
            for round_id in [name for name, entry in self._entries.items() if not entry.holders]:
                self._entries.pop(round_id).lock.close()

    def _refresh(self, now: float) -> None:
        """Looks at the current round, unless that was done just now, and closes what is idle."""
        if _is_due(self._looked, now):
            self._look()
            self._looked = now
            self._close_idle(now)

    def _look(self) -> None:
        """Reads the current round if its file is another one than at the last look."""
        stamp = _stamp_of(self._directory / CURRENT)
        if stamp is None:
            self._stamp = self._current = None
            return
        if stamp == self._stamp:
            return
        read = read_current(self._directory)
        if read is None:
            return
        directory = round_path(self._directory, read.round)
        cohort = read_cohort(directory)
        if cohort is None and not (directory / MANIFEST).exists():
            return  # a round that has gone already must not pass for one without a cohort
        self._current = Current(read.round, read.number, read.phase, cohort, read.trailing)
        self._stamp = stamp

    def _find(self, round_id: str, now: float) -> _Entry:
        entry = self._entries.get(round_id)
        if entry is not None and not self._is_stale(round_id, entry, now):
            return entry
        number = number_of(round_id)
        if number is None:
            raise _no_such_round()
        if entry is not None:
            del self._entries[round_id]
            if not entry.holders:
                entry.lock.close()
        stamp = _stamp_of(round_path(self._directory, round_id) / MANIFEST)
        entry = _Entry(number, now, now, stamp)
        try:
            entry.round = self._open(round_id, number, entry.lock)
        except StorageError as error:
            entry.lock.close()
            entry.error = error
        except BaseException:
            entry.lock.close()
            raise
        self._entries[round_id] = entry
        return entry

    def _is_stale(self, round_id: str, entry: _Entry, now: float) -> bool:
        """Whether a round was published again since it was opened; or damaged, a while ago."""
        if entry.error is not None and not 0 <= now - entry.used < self._linger:
            return True
        if not _is_due(entry.looked, now):
            return False
        entry.looked = now
        stamp = _stamp_of(round_path(self._directory, round_id) / MANIFEST)
        return stamp is not None and stamp != entry.stamp

    def _open(self, round_id: str, number: int, stack: ExitStack) -> OpenRound:
        directory = round_path(self._directory, round_id)
        lock = stack.enter_context(locked_manifest(directory, fcntl.LOCK_SH))
        if lock is None:
            raise self._missing(number)
        found, manifest, encoded = read_manifest(lock)
        if found != round_id:
            raise StorageError(
                "manifest.json is damaged",
                got="the content of another round",
                allowed="the file as it was published",
                fix="publish the round again",
            )
        tables = tuple(
            open_table(table_path(directory, place), info)
            for place, info in enumerate(manifest.tables)
        )
        return OpenRound(round_id, manifest, encoded, tables)

    def _missing(self, number: int) -> TooLateError | NotFoundError:
        current = self.current()
        if current is None or number > current.number:
            return _no_such_round()
        return TooLateError(
            f"round {number} has been removed",
            got=f"round {number}",
            allowed=f"the current round, {current.number}",
            fix="take part in that one",
        )

    def _close_idle(self, now: float) -> None:
        """Closes what is damaged, or older than the round before the current one, once idle."""
        oldest = -1 if self._current is None else self._current.number - 1
        for round_id, entry in list(self._entries.items()):
            entry.used = min(entry.used, now)  # the clock may have gone back
            is_kept = entry.number >= oldest and entry.error is None
            if not is_kept and not entry.holders and now - entry.used >= self._linger:
                self._entries.pop(round_id).lock.close()


def verify_round(opened: OpenRound, threads: int = 1) -> None:
    """Compares every record of a round that came from files with its sum.

    Raises:
        StorageError: some differ; says how many.
    """
    for table in opened.tables:
        if isinstance(table, MappedTable):
            table.verify(threads)


def _is_due(looked: float, now: float) -> bool:
    """Whether to look again; also if the clock has gone back."""
    return not 0 <= now - looked < _LOOK_EVERY


def _stamp_of(path: Path) -> _Stamp | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _no_such_round() -> NotFoundError:
    return NotFoundError(
        NO_ROUND,
        got="an identifier that no round has",
        allowed="those that were published",
        fix="ask for the current round",
    )
