"""Updates as numbers of a ring: how large they may be, and how they are rounded."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from keyhole.private.prg import Prg
from keyhole.private.secure_sum.fixed_point import FixedPoint, RingBits
from keyhole.training.aggregation.contract import Adding, Contribution
from keyhole.training.aggregation.parts import rows_of
from keyhole.types import KeyArray

__all__ = ["RingRows", "Rounding", "derived", "name_of_sum"]

RingRows = tuple[KeyArray, NDArray[np.unsignedinteger]]
"""Different keys of one part and a row of the ring for each."""


@dataclass(frozen=True)
class Rounding:
    """How updates become numbers of a ring.

    Args:
        clip: numbers beyond it are clipped; a sum is off by at most the cohort over the scale.
        bits: of the ring; 16 halves what is sent, and is coarse.
        room: for how many clients more, so that noise cannot make a sum overflow.
        least: for how many clients at least. Where the size of a cohort must not show, one number
            for all rounds: the step to which everybody rounds follows from it.
    """

    clip: float = 16.0
    bits: RingBits = 32
    room: int = 0
    least: int = 1

    def fixed_point(self, adding: Adding) -> FixedPoint:
        """For all clients that were asked: more cannot be added."""
        return self.for_clients(len(adding.contributions))

    def for_clients(self, clients: int) -> FixedPoint:
        """For so many clients.

        Raises:
            InputError: the ring is too small for them.
        """
        return FixedPoint(self.clip, max(self.least, clients) + self.room, self.bits)

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
