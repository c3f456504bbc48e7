"""How much a copy has moved: counted over threads while it runs, told at the end."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from threading import Lock

from keyhole.serving.files.slice_files import Progress

__all__ = ["Meter", "Moved"]


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
    """Counts bytes over threads, and stops those that move them.

    Args:
        total: all bytes of the copy.
        progress: is told of the bytes done, from several threads but one at a time.
    """

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
