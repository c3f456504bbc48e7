"""Describes what the service asks of a round, whose slices are in files or made on demand."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from keyhole.arrays import KeyArray
from keyhole.delivery.records import RecordArray
from keyhole.wire.manifest import Manifest, TableInfo
from keyhole.wire.messages import Sums

Phase: TypeAlias = Literal["open", "closed"]
"""Whether the current round takes updates."""

NO_ROUND = "no such round"
"""What is wrong where a service has no such round, or not yet; devices tell by it whether a second
server lags behind or is set up wrongly."""


@dataclass(frozen=True)
class Fetched:
    """Records and their sums.

    Args:
        records: (m, record_bytes), C-contiguous; this request's own, nobody else writes to it.
        sums: (m,), made when the records were.
    """

    records: RecordArray
    sums: Sums


class SliceTable(Protocol):
    """One table of a round."""

    @property
    def info(self) -> TableInfo:
        """As the manifest has it."""
        ...

    async def fetch(self, keys: KeyArray) -> Fetched:
        """Returns the records of keys that have been checked; order and repeats are kept."""
        ...

    def segment(self, place: int) -> memoryview:
        """The records of one segment, read-only.

        Raises:
            NotFoundError: there is no such segment; slices on demand have none.
        """
        ...

    def segment_sums(self, place: int) -> memoryview:
        """The sums of one segment, read-only; NotFoundError as above."""
        ...


@dataclass(frozen=True)
class OpenRound:
    """A round that can be served as long as it is held."""

    id: str
    manifest: Manifest
    encoded: bytes
    tables: tuple[SliceTable, ...]


@dataclass(frozen=True)
class Current:
    """The newest round.

    Args:
        round: its identifier.
        number: t.
        phase: whether it takes updates.
        cohort: device -> its place; those that take part. None lets every device.
        trailing: rounds that nobody starts in any more, while updates of those who did are still
            taken. All are of one layout, that of the newest round.
    """

    round: str
    number: int
    phase: Phase
    cohort: Mapping[str, int] | None = None
    trailing: tuple[str, ...] = ()


class RoundSource(Protocol):
    """The rounds of a service."""

    def current(self) -> Current | None:
        """The newest round; None before the first."""
        ...

    def hold(self, round_id: str) -> AbstractContextManager[OpenRound]:
        """Keeps a round from being removed while it is used.

        Raises:
            NotFoundError: there never was such a round, as far as can be told.
            TooLateError: the round has been removed.
        """
        ...
