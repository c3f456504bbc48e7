"""Secure sums with one server: the whole model, a sketch of what was touched, or the union of keys.

All of them add vectors by `secagg`. They differ in what a vector holds, how long it is, and what
the sum tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.delivery.assembly import most_keys_of
from keyhole.errors import SketchError, ThresholdError
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.private.secure_sum import sketch
from keyhole.private.secure_sum.secagg_run import Stage, run_secagg
from keyhole.private.secure_sum.secagg_settings import SecAggSettings
from keyhole.training.aggregation.contract import Adding, Summed, with_counts, withheld
from keyhole.training.aggregation.parts import PartSum
from keyhole.training.aggregation.rounding import RingRows, Rounding, derived, name_of_sum
from keyhole.training.cohort import Cohorts
from keyhole.training.fate import Fate

__all__ = [
    "LEAST_CLIENTS",
    "DenseForm",
    "SecureSum",
    "SketchForm",
    "VectorForm",
    "odds_of_failing",
    "stages_of",
]

LEAST_CLIENTS = 2
"""Of a masked sum: that of one client is its update."""

Ring = NDArray[np.unsignedinteger]

_LOST: Mapping[Fate, Stage] = {
    "lost_before": "before",
    "lost_after": "after_shares",
    "refused": "after_shares",  # a client that has no numbers to send falls silent
}


class VectorForm(Protocol):
    """What the vectors of a secure sum hold."""

    def seen_by(self, adding: Adding) -> Mapping[str, str]:
        """Party -> what the sum tells it."""
        ...

    def lay_out(self, adding: Adding, bits: int) -> VectorLayout:
        """The layout of the vectors of one sum, from public numbers."""
        ...


class VectorLayout(Protocol):
    """Where things stand in the vectors of one sum."""

    @property
    def length(self) -> int:
        """Of a vector."""
        ...

    def write(self, rows: Sequence[RingRows]) -> Ring:
        """The vector of one client."""
        ...

    def read(self, total: Ring, clients: int) -> list[tuple[np.ndarray, Ring, np.ndarray | None]]:
        """Keys, rows and counts of each part, from the sum of the vectors of so many clients.

        Raises:
            SketchError: it does not decode.
        """
        ...


@dataclass(frozen=True)
class SecureSum:
    """Masked vectors that a server can only open all together (Bonawitz et al. 2017).

    Hidden: every update but for what the sum tells, from a server that follows the protocol and
    fewer than t of its clients, t = floor(2 N / 3) + 1. See `private.secure_sum.secagg_client`.

    Args:
        form: what vectors hold.
        rounding: of updates.
        signed: clients sign which of them are left, against a server that shows different lists.
    """

    form: VectorForm
    rounding: Rounding = field(default_factory=Rounding)
    signed: bool = False

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        clients = [one.client for one in adding.contributions]
        seen = self.form.seen_by(adding)
        if len(clients) < LEAST_CLIENTS:
            return withheld(len(clients), LEAST_CLIENTS, seen)
        fixed = self.rounding.fixed_point(adding)
        layout = self.form.lay_out(adding, fixed.bits)
        settings = SecAggSettings(
            name_of_sum(adding), len(clients), layout.length, fixed.bits, signed=self.signed
        )
        lost, late = stages_of(adding)
        vectors = {
            place: layout.write(self.rounding.rows(adding, one))
            for place, one in enumerate(adding.contributions)
            if one.update is not None
        }
        # Who drops out on the way has begun: its masks must be taken out of the sum.
        nothing = np.zeros(layout.length, f"<u{fixed.bits // 8}")
        vectors |= {place: nothing for place, stage in lost.items() if stage != "before"}
        try:
            opened = run_secagg(settings, vectors, lost, late=late)
            found = layout.read(opened.total, len(opened.survivors))
        except (ThresholdError, SketchError) as error:
            return Summed(None, {}, seen_by=seen, error=str(error))
        sums = [PartSum(keys, fixed.decode(rows), counts) for keys, rows, counts in found]
        count = len(opened.survivors)
        return Summed(
            tuple(part.divided(adding.over, count) for part in sums),
            counts=tuple(part.known_counts for part in sums) if adding.with_counts else None,
            bytes_up={clients[place]: up for place, up in opened.bytes_up.items()},
            bytes_down={clients[place]: down for place, down in opened.bytes_down.items()},
            seen_by=seen,
        )


def stages_of(adding: Adding) -> tuple[dict[int, Stage], list[int]]:
    """Who is lost at which stage of a secure sum, and who is late, by their places."""
    lost, late = {}, []
    for place, one in enumerate(adding.contributions):
        if one.fate in _LOST:
            lost[place] = _LOST[one.fate]
        elif one.update is None:  # late, and what it would have sent was never computed
            lost[place] = "after_shares"
        elif one.fate == "late":
            late.append(place)
    return lost, late


@dataclass(frozen=True)
class DenseForm:
    """The whole model, with zeros where a client touched nothing."""

    def seen_by(self, adding: Adding) -> Mapping[str, str]:
        """The sum alone, and counts where there are any."""
        return with_counts({"server": "the sum of all updates"}, adding)

    def lay_out(self, adding: Adding, bits: int) -> _Dense:
        """Every row of every part; a count beside each where sums are divided by choosers."""
        return _Dense(adding.layout.parts, adding.needs_counts, bits)


@dataclass(frozen=True)
class _Dense:
    parts: Sequence[Part]
    with_counts: bool
    bits: int

    @property
    def length(self) -> int:
        return sum(part.space.num_keys * self._width(part) for part in self.parts)

    def _width(self, part: Part) -> int:
        return part.slice_size + self.with_counts

    def write(self, rows: Sequence[RingRows]) -> Ring:
        vector = np.zeros(self.length, f"<u{self.bits // 8}")
        at = 0
        for part, (keys, own) in zip(self.parts, rows, strict=True):
            size = part.space.num_keys * self._width(part)
            whole = vector[at : at + size].reshape(part.space.num_keys, -1)
            whole[keys, : part.slice_size] = own
            if self.with_counts:
                whole[keys, -1] = 1
            at += size
        return vector

    def read(self, total: Ring, clients: int) -> list[tuple[np.ndarray, Ring, np.ndarray | None]]:
        found, at = [], 0
        for part in self.parts:
            size = part.space.num_keys * self._width(part)
            whole = total[at : at + size].reshape(part.space.num_keys, -1)
            keys = np.flatnonzero(whole.any(axis=1))
            counts = whole[keys, -1].astype(np.int64) if self.with_counts else None
            found.append((keys, whole[keys, : part.slice_size], counts))
            at += size
        return found


@dataclass(frozen=True)
class SketchForm:
    """An invertible sketch of each part that is cut: as long as what the cohort touches."""

    def seen_by(self, adding: Adding) -> Mapping[str, str]:
        """The sum under each key that was touched, and by how many."""
        return {"server": "for each key the sum of its updates and how many clients chose it"}

    def lay_out(self, adding: Adding, bits: int) -> _Sketched:
        """Sketches with room for all keys that the cohort can have, under a seed of this sum."""
        seeds = derived(b"sketch", adding.place)
        clients = len(adding.contributions)
        most = most_keys_of(adding.layout, adding.keys_per_client)
        shapes = [
            sketch.SketchShape(
                part.space.num_keys,
                part.slice_size,
                max(1, min(clients * m, part.space.num_keys)),
                seeds.bytes(16),
                bits,  # type: ignore[arg-type]
                most_clients=clients,
            )
            for part, m in zip(adding.layout.parts, most, strict=True)
        ]
        return _Sketched(shapes)


@dataclass(frozen=True)
class _Sketched:
    shapes: Sequence[sketch.SketchShape]

    @property
    def length(self) -> int:
        return sum(shape.length for shape in self.shapes)

    def write(self, rows: Sequence[RingRows]) -> Ring:
        pieces = [
            sketch.encode(shape, keys, own)
            for shape, (keys, own) in zip(self.shapes, rows, strict=True)
        ]
        return np.concatenate(pieces)

    def read(self, total: Ring, clients: int) -> list[tuple[np.ndarray, Ring, np.ndarray | None]]:
        found: list[tuple[np.ndarray, Ring, np.ndarray | None]] = []
        at = 0
        for shape in self.shapes:
            piece = total[at : at + shape.length]
            decoded = sketch.decode(shape, piece, clients)
            found.append((decoded.keys, decoded.rows, decoded.counts))
            at += shape.length
        return found


def odds_of_failing(layout: Layout, most_keys: Sequence[int], cohorts: Cohorts) -> float:
    """How often the sketches of a round do not decode, at the most.

    Two keys that share all their cells are U^2 / 2 / (C / 4)^4 of all sketches of U keys in C
    cells; twice that holds from 500 keys on. With fewer, 4 in 10,000 were measured at the worst
    (see `SketchShape`): 5 are taken.
    """
    total = 0.0
    clients = cohorts.asked // (2 if cohorts.sampling == "poisson" else 1)  # hardly ever fewer
    for part, m in zip(layout.parts, most_keys, strict=True):
        distinct = max(1, min(clients * m, part.space.num_keys))
        cells = 1.4 * distinct + 96
        total += 5e-4 if distinct < 500 else distinct**2 / (cells / 4) ** 4
    return min(1.0, total)
