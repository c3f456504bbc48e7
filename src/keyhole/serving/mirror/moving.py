"""What pushing and pulling share: the current round, progress, and work in several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeAlias, TypeVar

import msgspec

from keyhole.errors import DamageError, InputError, NotFoundError
from keyhole.serving.files.round_files import CURRENT, CurrentRound, number_of, read_current

__all__ = [
    "Meter",
    "MirrorSettings",
    "Moved",
    "Progress",
    "decode_current",
    "encode_current",
    "find_current",
    "oldest_first",
    "work_through",
]

Progress: TypeAlias = Callable[[int, int], None]
"""Is told of the bytes done and of all bytes, from several threads but one at a time."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class MirrorSettings:
    """How rounds are copied.

    Args:
        keep: how many rounds remain at the target, the current one included.
        workers: files that are copied at the same time.
        is_anew: also copies what seems to be there.
        may_go_back: lets a store's newer round be replaced by an older one.

    Raises:
        InputError: a number is below 1.
    """

    keep: int = 2
    workers: int = 4
    is_anew: bool = False
    may_go_back: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1 or self.workers < 1:
            raise InputError(
                "too few rounds to keep, or workers",
                got=f"keep={self.keep}, workers={self.workers}",
                allowed="1 or more",
                fix="raise the number",
            )


@dataclass(frozen=True)
class Moved:
    """What a push or a pull did.

    Args:
        round: that is now current at the target.
        number: of that round.
        bytes_moved: that were sent or fetched.
        bytes_known: that were there already.
        removed: older rounds that were removed.
    """

    round: str
    number: int
    bytes_moved: int
    bytes_known: int
    removed: tuple[str, ...]


@dataclass
class Meter:
    """Counts bytes over threads, and stops those that move them."""

    total: int
    progress: Progress | None = None
    moved: int = 0
    known: int = 0
    is_stopped: bool = False
    _lock: Lock = field(default_factory=Lock)

    def stop(self) -> None:
        """Ends copies under way at their next bytes: another one has failed."""
        self.is_stopped = True

    def check(self) -> None:
        """Raises CancelledError once copies are to end."""
        if self.is_stopped:
            raise CancelledError

    def add(self, count: int) -> None:
        """Counts bytes that were moved."""
        self.check()
        with self._lock:
            self.moved += count
            self._tell()

    def skip(self, count: int) -> None:
        """Counts bytes that were there."""
        with self._lock:
            self.known += count
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.moved + self.known, self.total)


def encode_current(current: CurrentRound) -> bytes:
    """Returns the content of `current.json`."""
    return msgspec.json.encode(current) + b"\n"


def decode_current(data: bytes, place: str) -> CurrentRound:
    """Returns what `current.json` of a store holds; what is not the name of a round is refused.

    Raises:
        DamageError: it does not hold that.
    """
    try:
        current = msgspec.json.decode(data, type=CurrentRound)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_current(place, str(error)) from error
    is_named = current.round.startswith(f"{current.number}-")
    if not is_named or number_of(current.round) != current.number:
        raise _not_current(place, "a name that is not that of the round")
    return current


def find_current(directory: Path) -> CurrentRound:
    """Returns the current round of a rounds directory.

    Raises:
        NotFoundError: it has none.
        StorageError: its `current.json` is damaged.
    """
    current = read_current(directory)
    if current is None:
        raise NotFoundError(
            "no round has been published here",
            got=f"{directory} without {CURRENT}",
            allowed="a rounds directory",
            fix="run keyhole publish first, or check the path",
        )
    return current


def oldest_first(names: Iterable[str], before: int) -> list[str]:
    """Those names that are of rounds before a number, the oldest first.

    >>> oldest_first(["10-44136fa355b3678a", "9-44136fa355b3678a", ".new", "11-0"], before=11)
    ['9-44136fa355b3678a', '10-44136fa355b3678a']
    """
    found = [(number, name) for name in names if (number := number_of(name)) is not None]
    return [name for number, name in sorted(found) if number < before]


def _not_current(place: str, got: str) -> DamageError:
    return DamageError(
        f"{CURRENT} of {place} is damaged",
        got=got,
        allowed="the name, number and phase of a round",
        fix="push a round again",
    )


def work_through(
    work: Callable[[_Item], None], items: Iterable[_Item], workers: int, meter: Meter
) -> None:
    """Does the work for all items in several threads; the first error ends all of them."""
    failed: list[BaseException] = []

    def attempt(item: _Item) -> None:
        try:
            meter.check()
            work(item)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
            meter.stop()

    with ThreadPoolExecutor(workers, "keyhole-mirror") as pool:
        try:
            list(pool.map(attempt, items))
        except BaseException:  # an interrupt of this thread
            meter.stop()
            raise
    if failed:
        raise failed[0]
