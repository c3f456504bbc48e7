"""What a round asks of an aggregation, and what it gets.

Updates part by part: what a client adds under which keys, and rows from sums.

Updates as numbers of a ring: how large they may be, and how they are rounded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import KeyArray, Tree
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint, RingBits
from keyhole.errors import ThresholdError
from keyhole.primitives.deselect import divide
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.sampling import Fate
from keyhole.server.row_sums import BlockSum, Over, RowUpdate
from keyhole.server.rows import sum_rows


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


def withheld(clients: int, minimum: int, seen_by: Mapping[str, str]) -> Summed:
    """What comes of a sum with too few clients: nothing."""
    few = ThresholdError(
        "too few clients for a sum to be released",
        got=clients,
        allowed=f"{minimum} or more",
        fix="ask more clients",
    )
    return Summed(None, {}, seen_by=seen_by, error=str(few))


class Aggregation(Protocol):
    """A way to add updates up. Equal to the plain sum, up to the rounding that it states."""

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        ...


RowsOfClient = tuple[KeyArray, NDArray[np.float32]]
"""Different keys of one part, ascending, and what one client adds to the row of each."""


def rows_of(layout: Layout, one: Contribution) -> list[RowsOfClient]:
    """What a client adds to each part; rows of a repeated key are one."""
    layout.check(one.update, one.keys)
    leaves = tree.flatten(one.update)
    found = []
    for part in layout.parts:
        rows = np.ascontiguousarray(part.to_rows(leaves), np.float32)
        found.append(sum_rows(part.keys_of(one.keys).array, rows))
    return found


@dataclass(frozen=True, repr=False)
class PartSum:
    """What all clients added to one part.

    Args:
        keys: (d,) int64, ascending; those of which something is known.
        rows: (d, width), their sums.
        counts: (d,) how many clients chose each; None where that was not asked for.
    """

    keys: KeyArray
    rows: NDArray[np.float32]
    counts: NDArray[np.int64] | None = None

    def __repr__(self) -> str:
        return f"PartSum({len(self.keys)} keys)"

    @staticmethod
    def of_dense(sums: NDArray[np.float32], counts: NDArray[np.int64] | None) -> PartSum:
        """The rows of a dense sum that somebody touched: a step leaves zeros as they are."""
        is_touched = sums.any(axis=1) if counts is None else counts > 0
        keys = np.flatnonzero(is_touched)
        return PartSum(keys, sums[keys], None if counts is None else counts[keys])

    def divided(self, over: Over, clients: int) -> RowUpdate:
        """The update of the part, over what the plan divides by.

        Args:
            over: what to divide by; "choosers" needs counts.
            clients: how many were added.
        """
        if over == "cohort":
            return RowUpdate(self.keys, divide(self.rows, clients))
        if over == "choosers":
            return RowUpdate(self.keys, divide(self.rows, self.known_counts[:, None]))
        return RowUpdate(self.keys, self.rows)

    @property
    def known_counts(self) -> NDArray[np.int64]:
        """The counts, of a sum that was asked for them."""
        assert self.counts is not None
        return self.counts


RingRows = tuple[KeyArray, NDArray[np.unsignedinteger]]
"""Different keys of one part and a row of the ring for each."""


@dataclass(frozen=True)
class Rounding:
    """How updates become numbers of a ring.

    Args:
        clip: numbers beyond it are clipped; a sum is off by at most the cohort over the scale.
        bits: of the ring; 16 halves what is sent, and is coarse.
        room: for how many clients more, so that noise cannot make a sum overflow.
        minimum: for how many clients at least. Where the size of a cohort must not show, one number
            for all rounds: the step to which everybody rounds follows from it.
    """

    clip: float = 16.0
    bits: RingBits = 32
    room: int = 0
    minimum: int = 1

    def fixed_point(self, adding: Adding) -> FixedPoint:
        """For all clients that were asked: more cannot be added."""
        return self.for_clients(len(adding.contributions))

    def for_clients(self, clients: int) -> FixedPoint:
        """For so many clients.

        Raises:
            InputError: the ring is too small for them.
        """
        return FixedPoint(self.clip, max(self.minimum, clients) + self.room, self.bits)

    def rows(self, adding: Adding, one: Contribution) -> list[RingRows]:
        """What a client adds to each part, rounded up or down by its own coin.

        In a simulation that coin derives from the seed of the run: the same seed, the same bytes.
        """
        fixed = self.fixed_point(adding)
        prg = derived(b"rounding", adding.place, one.client)
        return [(keys, fixed.encode(rows, prg)) for keys, rows in rows_of(adding.layout, one)]


def derived(purpose: bytes, place: tuple[int, int, int], *more: int) -> Prg:
    """Randomness of a simulation, from its seed, trial and round: whoever knows the seed of a run
    knows it too."""
    numbers = struct.pack(f"<{3 + len(more)}q", *place, *more)
    return Prg(sha256(b"keyhole-" + purpose + b"\0" + numbers).digest()[:16])


def name_of_sum(adding: Adding) -> bytes:
    """16 bytes that name a sum among all of a run."""
    return sha256(b"keyhole-sum" + struct.pack("<3q", *adding.place)).digest()[:16]
