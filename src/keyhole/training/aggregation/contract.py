"""What a round asks of an aggregation, and what it gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import ThresholdError
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.server.aggregation import BlockSum, Over
from keyhole.server.updates import RowUpdate
from keyhole.training.fate import Fate
from keyhole.types import Tree

__all__ = ["Adding", "Aggregation", "Contribution", "Summed", "with_counts", "withheld"]


@dataclass(frozen=True, repr=False)
class Contribution:
    """What one client brings to a sum.

    Args:
        client: its number.
        fate: how its visit ends; what is not "sent" does not count, however far it came.
        keys: of its sub-model, by key space.
        update: shaped as the sub-model; None where there is none to send.
    """

    client: int
    fate: Fate
    keys: Mapping[str, Keys]
    update: Tree

    def __repr__(self) -> str:
        """Keys and updates may be private."""
        return f"Contribution(client {self.client}, {self.fate})"


@dataclass(frozen=True)
class Adding:
    """One sum to be made.

    Args:
        layout: the model and its cuts.
        contributions: of every client that was asked, in order.
        over: what sums are divided by.
        keys_per_client: key space -> the most keys of a client; public.
        place: (seed, trial, round), from which the randomness of a simulation derives.
        with_counts: whether to say how many clients chose each key.
        blocks: updates that were added up where clients were trained, which contributions then
            lack; for sums in the clear alone.
    """

    layout: Layout
    contributions: Sequence[Contribution]
    over: Over
    keys_per_client: Mapping[str, int]
    place: tuple[int, int, int]
    with_counts: bool = False
    blocks: tuple[BlockSum, ...] | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether somebody must learn how many clients chose each key."""
        return self.with_counts or self.over == "choosers"

    @property
    def sent(self) -> list[Contribution]:
        """Those that count."""
        return [each for each in self.contributions if each.fate == "sent"]


@dataclass(frozen=True)
class Summed:
    """What came of it.

    Args:
        rows: for each part its keys, ascending, and a row for each; None if nobody was left, or too
            few for the sum to be opened.
        counts: for each part how many clients chose each of its keys, where that was asked for.
        bytes_up: client -> what it sent to have its update added.
        bytes_down: client -> what it received for it.
        unplaced_keys: keys of all clients whose update found no place in a message.
        seen_by: party -> what it learned of updates and their keys.
        error: why nothing was opened, if so.
    """

    rows: tuple[RowUpdate, ...] | None
    bytes_up: Mapping[int, int]
    counts: tuple[NDArray[np.int64], ...] | None = None
    bytes_down: Mapping[int, int] = field(default_factory=dict)
    unplaced_keys: int = 0
    seen_by: Mapping[str, str] = field(default_factory=dict)
    error: str | None = None


def with_counts(seen_by: Mapping[str, str], adding: Adding) -> dict[str, str]:
    """What parties learn from a sum, and from the counts beside it where it has any."""
    if not adding.needs_counts:
        return dict(seen_by)
    return {party: f"{seen}, and how many chose each key" for party, seen in seen_by.items()}


def withheld(clients: int, least: int, seen_by: Mapping[str, str]) -> Summed:
    """What comes of a sum with too few clients: nothing."""
    few = ThresholdError(
        "too few clients for a sum to be released",
        got=clients,
        allowed=f"{least} or more",
        fix="ask more clients",
    )
    return Summed(None, {}, seen_by=seen_by, error=str(few))


class Aggregation(Protocol):
    """A way to add updates up. Equal to the plain sum, up to the rounding that it states."""

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        ...
