"""Publishes a round, which appears whole or not at all.

A round is written under a name that nobody looks for, made durable, given its name, and only then
told of in `current.json`. Whenever the publisher dies, the round before is still there and current.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from keyhole.arrays import KeyArray
from keyhole.delivery.records import PLAIN, Coding
from keyhole.delivery.sources import SliceSource, sources_of
from keyhole.errors import InputError, StorageError
from keyhole.files import lock_file, make_directory, storage_errors, sync_directory
from keyhole.primitives.layout import Layout
from keyhole.server.state import ServerState
from keyhole.service.directory import (
    COHORT,
    MANIFEST,
    SIGNATURE,
    Base,
    CurrentRound,
    Shelf,
    encode_cohort,
    read_cohort,
    read_current,
    round_path,
    rounds_path,
    write_current,
    write_file,
)
from keyhole.service.patching import BaseTable, write_table
from keyhole.service.reading import open_table
from keyhole.service.segments import (
    SEGMENT,
    Progress,
    SegmentWriter,
    WriteSettings,
    sync_path,
    table_path,
)
from keyhole.wire.manifest import (
    Manifest,
    TableInfo,
    decode_manifest,
    describe_round,
    encode_manifest,
    frozen_info,
    name_round,
    table_info,
    unwritten,
)
from keyhole.wire.signing import SigningKey

Changed: TypeAlias = Callable[[str], Sequence[KeyArray | None] | None]
"""Tells which records differ from those of an earlier round, given its identifier: ascending keys
for each table, None for a table where all may, None for a round it does not know."""

_MAX_ROUNDS = 10**18  # what an identifier has digits for
_KNOWN = 8  # rounds whose state is remembered; a base is at most three rounds old


@dataclass(frozen=True)
class Published:
    """A round that is there."""

    id: str
    manifest: Manifest
    encoded: bytes


@dataclass(frozen=True)
class _Known:
    """What a round was published from: a state after this many steps, and its frozen leaves."""

    state: weakref.ref[ServerState]
    step: int
    frozen: weakref.ref[ServerState]


class Publisher:
    """The one that writes a rounds directory.

    Args:
        signing_key: signs the manifest of every round; None leaves them unsigned.
    """

    def __init__(self, directory: Path | str, signing_key: SigningKey | None = None) -> None:
        self.directory, self._signing_key = Path(directory), signing_key
        make_directory(rounds_path(self.directory))
        self._lock: int | None = lock_file(
            self.directory / "publisher.lock", f"{self.directory.name} has a publisher already"
        )
        self._shelf = Shelf(self.directory)
        self._known: dict[str, _Known] = {}
        try:
            self._shelf.clean()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Publisher:
        """The directory is this publisher's already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def close(self) -> None:
        """Lets another publisher have the directory; rounds stay."""
        lock, self._lock = self._lock, None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a forked process may have the descriptor, too
            os.close(lock)

    def publish(
        self,
        sources: Sequence[SliceSource],
        *,
        layout: Layout | None,
        frozen: Layout | None = None,
        number: int,
        step: int,
        settings: Mapping[str, Any] | None = None,
        cohort: Sequence[str] | None = None,
        trailing: Sequence[str] = (),
        may_go_back: bool = False,
        changed: Changed | None = None,
        durable: bool = True,
        threads: int = 2,
        segment_bytes: int = SEGMENT,
        progress: Progress | None = None,
        before: Callable[[str], object] = lambda _: None,
    ) -> Published:
        """Publishes a round and opens it. Sources must not change meanwhile.

        If the disk or `before` refuses, the current round is what it was.

        Args:
            sources: one for each table; of each part of the layout, in order, if there is one.
            layout: the model; None if the tables are of select functions.
            frozen: leaves that are not trained; the last sources are of its parts.
            number: t; above that of the current round, or equal to it with equal content.
            cohort: names of the devices that take part; None lets all.
            trailing: earlier rounds of this layout whose updates are still taken.
            may_go_back: whether the number may be that of the current round, with other content, or
                below it, as where a run goes on from before it: what was published since is
                forgotten.
            changed: what differs from earlier rounds; without it, everything is written.
            durable: whether the round survives a loss of power from here on.
            progress: told how many records are done, of how many.
            before: called with the name of the round before anyone can see it; an error that it
                raises leaves no round behind.
        """
        is_again = self._check_number(number, may_go_back)
        writing = WriteSettings(threads, segment_bytes, durable)
        devices = None if cohort is None else encode_cohort(cohort)
        infos = _describe(sources, layout, frozen)
        _encode(describe_round(layout, infos, number, step, settings or {}))
        self._shelf.retire()
        with self._new_directory() as made:
            bases = self._bases(infos, None if is_again else changed)
            total = sum(info.num_keys for info in infos)
            with SegmentWriter(writing, total, progress) as writer:
                tables = _write_tables(writer, sources, infos, made, bases)
                writer.settle()
            self._shelf.drop_spare()
            manifest = describe_round(layout, tables, number, step, settings or {})
            published = Published(*_encode(manifest))
            if not may_go_back:
                self._check_content(published)
            before(published.id)
            revealed = CurrentRound(published.id, number, "open", tuple(trailing))
            self._reveal(made, published, revealed, devices, durable)
        self._shelf.retire()
        return published

    def publish_state(
        self,
        state: ServerState,
        *,
        number: int,
        coding: Coding = PLAIN,
        frozen: ServerState | None = None,
        **options: Any,
    ) -> Published:
        """Publishes a server's state, writing only what changed where that is known.

        It is known if an earlier round was published from the same state by this publisher.

        Args:
            frozen: leaves of the model that are not trained, which travel plain.
            options: settings, cohort, trailing, may_go_back, durable, threads, segment_bytes,
                progress and before of `publish`.
        """

        def changed(round_id: str) -> Sequence[KeyArray | None] | None:
            known = self._known.get(round_id)
            if known is None or known.state() is not state:
                return None
            is_same = frozen is not None and known.frozen() is frozen
            rest = [np.empty(0, np.int64) if is_same else None for _ in kept]
            return *state.changed_since(known.step), *rest

        kept = () if frozen is None else sources_of(frozen)
        published = self.publish(
            (*sources_of(state, coding), *kept),
            layout=state.layout,
            frozen=None if frozen is None else frozen.layout,
            number=number,
            step=state.steps,
            changed=changed,
            **options,
        )
        what = state if frozen is None else frozen
        self._known[published.id] = _Known(weakref.ref(state), state.steps, weakref.ref(what))
        self._known = dict(list(self._known.items())[-_KNOWN:])
        return published

    def invite(self, cohort: Sequence[str]) -> None:
        """Lets other devices take part in the current round than those it was published for."""
        current = self._current()
        directory = round_path(self.directory, current.round)
        write_file(directory / COHORT, encode_cohort(cohort), True)
        write_current(self.directory, current, True)  # services look there for what is new

    def cohort_of(self, number: int) -> list[str] | None:
        """Returns whom the current round is for; None if it has another number, or is for all."""
        current = read_current(self.directory)
        if current is None or current.number != number:
            return None
        cohort = read_cohort(round_path(self.directory, current.round))
        return None if cohort is None else list(cohort)

    def close_round(self, trailing: Sequence[str] = ()) -> None:
        """Says that nobody begins in the current round any more; its slices stay."""
        closed = msgspec.structs.replace(self._current(), phase="closed", trailing=tuple(trailing))
        write_current(self.directory, closed, True)

    def _current(self) -> CurrentRound:
        current = read_current(self.directory)
        if current is None:
            raise InputError("no round yet: got none; expected a published one; publish first")
        return current

    def _check_number(self, number: int, may_go_back: bool) -> bool:
        """Whether the current round is published again: to repair it, so from nothing else."""
        current = read_current(self.directory)
        minimum = 0 if current is None or may_go_back else current.number
        if not 0 <= number < _MAX_ROUNDS:
            raise InputError(
                f"not the number of a round: got {number}; expected 0..{_MAX_ROUNDS - 1}; count "
                "rounds from 0"
            )
        if number < minimum:
            raise self._not_growing(
                number, f"round {minimum + (current is not None)} or a later one"
            )
        return current is not None and number == current.number

    def _check_content(self, published: Published) -> None:
        """Raises InputError where the current round has this number and other content."""
        current, number = read_current(self.directory), published.manifest.number
        if current is not None and number == current.number and published.id != current.round:
            raise self._not_growing(
                number, f"round {number + 1} or a later one, or the same content"
            )

    def _not_growing(self, number: int, allowed: str) -> InputError:
        return InputError(
            f"{self.directory} holds rounds of another run: got round {number}; expected "
            f"{allowed}, or an empty folder; use an empty folder, or publish with may_go_back=True "
            "to replace them"
        )

    @contextmanager
    def _new_directory(self) -> Iterator[Path]:
        """A directory to write a round into, gone if that fails."""
        path = rounds_path(self.directory) / f".new-{os.getpid()}"
        make_directory(path)
        try:
            with storage_errors(path, "write"):
                yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _bases(self, infos: Sequence[TableInfo], changed: Changed | None) -> list[BaseTable | None]:
        """What each table can be made from: the spare round, else the one before."""
        for base in self._shelf.bases():
            known = None if changed is None else changed(base.id)
            if known is not None:
                return [
                    _base_table(base, place, info, keys)
                    for place, (info, keys) in enumerate(zip(infos, known, strict=True))
                ]
        spare = self._shelf.spare
        return [BaseTable(table_path(spare, place), True) for place in range(len(infos))]

    def _reveal(
        self,
        made: Path,
        published: Published,
        revealed: CurrentRound,
        cohort: bytes | None,
        durable: bool,
    ) -> None:
        """Gives a finished round its name, then makes it the current one."""
        current = read_current(self.directory)
        named = round_path(self.directory, published.id)
        if _is_whole(named, published.manifest):  # it is served as it is, from here on
            made = named
        if self._signing_key is not None:
            write_file(made / SIGNATURE, self._signing_key.sign(published.id), durable)
        _complete(made, published, cohort, durable)
        try:
            if made != named:
                self._shelf.put(made, named)
            if durable:
                sync_directory(named.parent)
            write_current(self.directory, revealed, durable)
            if current is not None and published.manifest.number <= current.number:
                self._shelf.clean()
        except BaseException:  # nobody was told of it, and it must not pass for the one before
            self._shelf.clean()
            raise


def _describe(
    sources: Sequence[SliceSource], layout: Layout | None, frozen: Layout | None
) -> list[TableInfo]:
    trained = len(sources) if layout is None else len(layout.parts)
    parts = trained + (0 if frozen is None else len(frozen.parts))
    if len(sources) != parts or not sources:
        allowed = f"one for each of {parts} parts" if parts else "one or more"
        raise InputError(
            f"sources do not fit the layout: got {len(sources)} sources; expected "
            f"{allowed}; make them with sources_of"
        )
    return [
        table_info(source.records, layout, place)
        if place < trained
        else frozen_info(source.records, frozen, place - trained)
        for place, source in enumerate(sources)
    ]


def _base_table(base: Base, place: int, info: TableInfo, changed: KeyArray | None) -> BaseTable:
    """What a table can be made from; if it held something else before, only pages are of use."""
    directory, tables = table_path(base.directory, place), base.manifest.tables
    if changed is None or place >= len(tables):
        return BaseTable(directory, base.is_spare)
    if unwritten(tables[place]) != info:
        return BaseTable(directory, base.is_spare)
    return BaseTable(directory, base.is_spare, tables[place], changed)


def _encode(manifest: Manifest) -> tuple[str, Manifest, bytes]:
    """The manifest as devices will read it, so that what they cannot read is not published."""
    encoded = encode_manifest(manifest)
    return name_round(encoded, manifest.number), decode_manifest(encoded), encoded


def _write_tables(
    writer: SegmentWriter,
    sources: Sequence[SliceSource],
    infos: Sequence[TableInfo],
    directory: Path,
    bases: Sequence[BaseTable | None],
) -> list[TableInfo]:
    """Writes all tables; returns them with their roots and segments."""
    tables = []
    for place, (source, info, base) in enumerate(zip(sources, infos, bases, strict=True)):
        target = table_path(directory, place)
        make_directory(target)
        tables.append(write_table(writer, source, target, info, base))
    return tables


def _complete(directory: Path, published: Published, cohort: bytes | None, durable: bool) -> None:
    """Writes the small files of a round, the manifest last, and makes its names durable.

    A round that is there already may have been published without waiting for the disk.
    """
    if cohort is None:
        (directory / COHORT).unlink(missing_ok=True)
    else:
        write_file(directory / COHORT, cohort, durable)
    if durable:
        for table in directory.glob("table-*"):
            sync_directory(table)
    if not (directory / MANIFEST).exists():
        write_file(directory / MANIFEST, published.encoded, durable)
    elif durable:
        for path in [*directory.rglob("*.*"), directory]:
            sync_path(path)


def _is_whole(directory: Path, manifest: Manifest) -> bool:
    """Whether a round that was published before is there, and as it was."""
    try:
        if (directory / MANIFEST).read_bytes() != encode_manifest(manifest):
            return False
        for place, info in enumerate(manifest.tables):
            open_table(table_path(directory, place), info).verify()
    except (StorageError, OSError):
        return False
    return True
