"""Where slices come from: the server's state, or any select function computed in batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from keyhole.delivery.records import PLAIN, Coding, RecordArray, Records, records_of
from keyhole.server.state import ServerState
from keyhole.types import Array, KeyArray

__all__ = ["FunctionSource", "SliceSource", "StateSource", "sources_of"]


class SliceSource(Protocol):
    """The slices of one table, as records."""

    @property
    def records(self) -> Records:
        """What a record holds."""
        ...

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`, (m, record_bytes); order and repeats are kept.

        Args:
            keys: (m,) int64, checked by the caller.
        """
        ...


@dataclass(frozen=True)
class StateSource:
    """One part of a server state.

    Args:
        state: read at the moment of asking.
        place: of the part in `state.layout.parts`.
        coding: how its numbers are stored.
    """

    state: ServerState
    place: int
    coding: Coding = PLAIN

    @cached_property
    def records(self) -> Records:
        """What a record holds."""
        return Records.of_part(self.state.layout.parts[self.place], self.coding)

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`."""
        return self.records.encode_rows(self.state.rows(self.place, keys), keys)


@dataclass(frozen=True)
class FunctionSource:
    """A select function that takes all keys of a batch at once.

    Args:
        records: what a record holds.
        server_value: x.
        select_batch: `(x, keys) -> {path: (m, *shape)}`; `keyhole.models.batched` makes one of any
            select function written in JAX.
    """

    records: Records
    server_value: Any
    select_batch: Callable[[Any, KeyArray], dict[str, Array]]

    def read(self, keys: KeyArray) -> RecordArray:
        """Returns the records of `keys`."""
        return self.records.encode(self.select_batch(self.server_value, keys), keys)


def sources_of(state: ServerState, coding: Coding = PLAIN) -> tuple[StateSource, ...]:
    """The sources of every part of a state, in order; what everyone receives stays plain."""
    return tuple(
        StateSource(state, place, records.coding)
        for place, records in enumerate(records_of(state.layout, coding))
    )
