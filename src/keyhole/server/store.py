"""Keeps a run in a directory from which it goes on with the same bytes after a kill.

    snapshot-000000000040.khs    state after step 40        the last two are kept
    log-000000000040.khl         steps 41, 42, ...          from the older of the two on

A step is in the log before it is applied. A snapshot is written beside the old one; the log then
goes on in a new file; what is no longer needed goes last. Whenever the process dies, the newest
good snapshot and the entries behind it are there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from keyhole.errors import InputError, StorageError
from keyhole.files import lock_file, make_directory, storage_errors, sync_directory
from keyhole.primitives.layout import Layout
from keyhole.server.log import DeltaLog, Entry, LogEnd, create_log, is_empty_log, read_log
from keyhole.server.optimizers import Optimizer
from keyhole.server.row_sums import RowUpdate
from keyhole.server.snapshots import Snapshot, load_snapshot, save_snapshot
from keyhole.server.state import ServerState
from keyhole.server.tables import Table


@dataclass(frozen=True)
class Recovered:
    """What a directory held; `notes` tell of files that were refused and bytes that were cut off,
    each in a sentence."""

    state: ServerState
    store: Store
    metadata: bytes
    notes: tuple[str, ...]


class Store:
    """A directory open for writing by this process. Made by `create_store` or `recover`."""

    def __init__(
        self, directory: Path, lock: int, log: DeltaLog, keep: int, refused: Sequence[Path] = ()
    ) -> None:
        self.directory = directory
        self._lock = lock
        self._log = log
        self._keep = keep
        self._refused = refused

    def commit(
        self, state: ServerState, updates: Sequence[RowUpdate], metadata: bytes = b""
    ) -> None:
        """Makes one step durable, then applies it; `metadata` is found again with this step."""
        slots = state.prepare(updates)
        self._log.append(Entry(state.steps + 1, tuple(updates), metadata))
        state.apply(slots, updates)

    def snapshot(self, state: ServerState, metadata: bytes = b"") -> Path:
        """Stores the whole state and lets go of what it replaces."""
        path = _snapshot_path(self.directory, state.steps)
        save_snapshot(path, Snapshot(state, metadata))
        following = _log_path(self.directory, state.steps)
        if following != self._log.path:  # the old one is kept as long as a snapshot needs it
            log = DeltaLog.open(following, create_log(following, state.layout, state.steps))
            self._log.close()
            self._log = log
        self._forget()
        return path

    def close(self) -> None:
        """Closes the log and lets other processes open the directory."""
        self._log.close()
        os.close(self._lock)

    def _forget(self) -> None:
        """Removes old snapshots, and logs whose successor reaches back to the oldest one kept."""
        with storage_errors(self.directory, "clean up"):
            for path in self._refused:  # a damaged one must not count among those kept
                path.unlink(missing_ok=True)
            snapshots = _numbered(self.directory, "snapshot-*.khs")
            for step in sorted(snapshots)[: -self._keep]:
                snapshots.pop(step).unlink()
            logs = _numbered(self.directory, "log-*.khl")
            for start, following in pairwise(sorted(logs)):
                if following <= min(snapshots):
                    logs[start].unlink()
            sync_directory(self.directory)


def create_store(
    directory: Path | str, state: ServerState, metadata: bytes = b"", keep: int = 2
) -> Store:
    """Starts a store with a first snapshot of `state`.

    The directory is made if it does not exist, and must hold no snapshots. `keep` says how many of
    them to keep, 1 or more.
    """
    directory = Path(directory)
    with _locked(directory, keep) as lock:
        if holds_store(directory):
            raise StorageError(
                f"{directory.name} holds a run already: got its files; expected an empty "
                "directory; recover it, or choose another directory"
            )
        # A log without a snapshot is what a start that was cut short may leave: it is replaced.
        path = _log_path(directory, state.steps)
        end = create_log(path, state.layout, state.steps)
        save_snapshot(_snapshot_path(directory, state.steps), Snapshot(state, metadata))
        return Store(directory, lock, DeltaLog.open(path, end), keep)


def holds_store(directory: Path) -> bool:
    """Returns whether a store was begun here, so that `recover` has something to find."""
    return bool(_numbered(directory, "snapshot-*.khs"))


def drop_unused_store(directory: Path) -> bool:
    """Removes a store that no step was ever written to; returns whether there is none now.

    Raises:
        StorageError: another process has it open.
    """
    if not holds_store(directory):
        return True
    with _locked(directory, keep=1) as lock, storage_errors(directory, "clean up"):
        snapshots = _numbered(directory, "snapshot-*.khs")
        logs = _numbered(directory, "log-*.khl")
        is_unused = not any((*snapshots, *logs)) and all(map(is_empty_log, logs.values()))
        for path in (*snapshots.values(), *logs.values()) if is_unused else ():
            path.unlink()
        os.close(lock)
    return is_unused


def recover(
    directory: Path | str,
    layout: Layout,
    *,
    keep: int = 2,
    threads: int = 1,
    until: int | None = None,
    into: Sequence[Table] = (),
    optimizer: Optimizer | None = None,
) -> Recovered:
    """Opens a store: newest good snapshot, then every durable step after it.

    Args:
        keep: how many snapshots to keep from now on.
        until: the last step to recover; later ones are dropped for good. For a damaged log.
        into: tables of a state of this layout; those whose rows lie elsewhere take the stored rows
            in place of their own.
        optimizer: that the state was stored with; None makes it again if the library ships it.
    """
    directory = Path(directory)
    load = partial(load_snapshot, layout=layout, threads=threads, into=into, optimizer=optimizer)
    with _locked(directory, keep) as lock:
        for leftover in directory.glob("*.tmp"):
            leftover.unlink()
        notes: list[str] = []
        snapshot, refused = _newest(directory, load, until, notes)
        metadata, log = _replay(directory, snapshot, until, notes)
        store = Store(directory, lock, log, keep, refused)
    return Recovered(snapshot.state, store, metadata, tuple(notes))


def _newest(
    directory: Path, load: Callable[[Path], Snapshot], until: int | None, notes: list[str]
) -> tuple[Snapshot, list[Path]]:
    """The newest snapshot that passes its checks, and newer ones that do not."""
    found = _numbered(directory, "snapshot-*.khs")
    refused: list[Path] = []
    for step in sorted(found, reverse=True):
        if until is not None and step > until:
            found[step].unlink()
            continue
        try:
            return load(found[step]), refused
        except StorageError as error:
            notes.append(str(error))
            refused.append(found[step])
    raise StorageError(
        f"{directory.name} holds no snapshot that can be used: got {'; '.join(notes) or 'none'}; "
        "expected a snapshot of this layout; restore one from a copy, or start a new run"
    )


def _replay(
    directory: Path, snapshot: Snapshot, until: int | None, notes: list[str]
) -> tuple[bytes, DeltaLog]:
    """Applies what the logs hold beyond the snapshot; returns the last metadata and an open log."""
    state, last = snapshot.state, [snapshot.metadata]

    def apply(entry: Entry) -> None:
        done = state.steps
        if entry.step > done + 1:
            raise StorageError(
                f"{directory.name} misses steps: got step {entry.step} after {done}; expected step "
                f"{done + 1}; restore the log that is missing; recover(..., until={done}) goes "
                "without it"
            )
        if entry.step > done:
            state.step(entry.updates)
            last[0] = entry.metadata

    logs = _numbered(directory, "log-*.khl")
    if until is not None:
        for start in [start for start in logs if start > until]:
            logs.pop(start).unlink()
    first = max((start for start in logs if start <= state.steps), default=None)
    path, end = None, LogEnd(0, state.steps)
    for start in sorted(start for start in logs if first is None or start >= first):
        path = logs[start]
        end = read_log(path, state.layout, apply, until)
        notes += [end.torn] if end.torn else []
    if path is None or end.last_step < state.steps:
        path = _log_path(directory, state.steps)
        end = create_log(path, state.layout, state.steps)
    return last[0], DeltaLog.open(path, end)


@contextmanager
def _locked(directory: Path, keep: int) -> Iterator[int]:
    """Takes the directory for this process, and lets go of it where the block fails."""
    if keep < 1:
        raise InputError(f"too few snapshots to keep: got {keep}; expected 1 or more; keep 2")
    make_directory(directory)
    lock = lock_file(directory, f"{directory.name} is in use", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield lock
    except BaseException:
        os.close(lock)
        raise


def _snapshot_path(directory: Path, step: int) -> Path:
    return directory / f"snapshot-{step:012d}.khs"


def _log_path(directory: Path, start: int) -> Path:
    return directory / f"log-{start:012d}.khl"


def _numbered(directory: Path, pattern: str) -> dict[int, Path]:
    """Files of a kind by their step; names that hold no number are none of ours."""
    found = {path.stem.rpartition("-")[2]: path for path in directory.glob(pattern)}
    return {int(number): path for number, path in found.items() if number.isdecimal()}
