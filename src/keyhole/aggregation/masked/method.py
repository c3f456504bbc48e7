"""Adds masked vectors up at one server: the whole model, or a sketch of the rows that were touched.

Both forms add vectors by `run_secagg`. They differ in what a vector holds, how long it is, and what
the sum tells. All parties run in one process here, for simulations, tests and benchmarks: they are
those of `client.py` and `server.py`, and between them pass the bytes that would pass over a
network.

Hidden from the server: every update, but for what the sum tells. Not hidden: who takes part. One
process that holds every secret hides nothing: a simulation shows what the protocol gives and costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from types import MappingProxyType
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.about import Leak
from keyhole.aggregation.base import (
    AggregationAbout,
    ClientResult,
    PartSum,
    Rounding,
    SumPrice,
    SumRequest,
    SumResult,
    derived,
    name_of_sum,
    never,
    withheld,
)
from keyhole.aggregation.masked import sketch
from keyhole.aggregation.masked.messages import FRAME_BYTES, KEYS_BYTES, SEALED_BYTES
from keyhole.aggregation.masked.params import SecAggParams, degree_of
from keyhole.aggregation.masked.server import Stage, run_secagg
from keyhole.arrays import KeyArray
from keyhole.crypto.ring import FixedPoint, RingArray, RingBits
from keyhole.crypto.shamir import SHARE_BYTES
from keyhole.errors import SketchError, ThresholdError
from keyhole.pricing import SumSpeeds, Workload, measured
from keyhole.primitives.layout import Layout, Part, max_keys_of
from keyhole.sampling import Cohorts, Outcome

MIN_CLIENTS = 2
"""Min clients of a masked sum: that of one client is its update."""

_DROPPED = 0.1  # of the clients, after they have shared their secrets: 6 to 10 of 100 is usual
_ELEMENT = 4  # bytes of a number of the ring

_LOST: Mapping[Outcome, Stage] = {
    "lost_before": "before",
    "lost_after": "after_shares",
    "refused": "after_shares",  # a client that has no numbers to send falls silent
}


FoundRows: TypeAlias = tuple[KeyArray, RingArray, NDArray[np.int64] | None]
"""Keys of one part, ring elements of their sums, and how many clients chose each if that shows."""


class VectorPart(Protocol):
    """Where the rows of one part stand in the vectors of one sum."""

    @property
    def length(self) -> int:
        """Numbers of a vector that they take."""
        ...

    def write(self, keys: KeyArray, rows: RingArray, into: RingArray) -> None:
        """Puts the rows of one client into its numbers, which are zeros."""
        ...

    def read(self, total: RingArray, clients: int) -> FoundRows:
        """Returns what the sum of the numbers of `clients` clients holds."""
        ...


@dataclass(frozen=True)
class VectorForm:
    """What the vectors of a secure sum hold.

    Args:
        about: of the sum of such vectors.
        shows_counts: whether the sum always tells how many chose a key, as its `about` says.
        work: load -> numbers of a vector, and CPU seconds of the server to read the sum.
        lay_out: the vectors of one sum, from public numbers and the bits of the ring.
    """

    about: AggregationAbout
    shows_counts: bool
    work: Callable[[Workload], tuple[int, float]]
    lay_out: Callable[[SumRequest, RingBits], Sequence[VectorPart]]


@dataclass(frozen=True)
class SecureSum:
    """Adds masked vectors that a server can only open all together (Bonawitz et al. 2017).

    Hidden: every update but for what the sum tells, from a server that follows the protocol and
    fewer than t of its clients, t = floor(2 N / 3) + 1. See `masked.client`.

    Args:
        signed: clients sign which of them are left, against a server that shows different lists.
    """

    form: VectorForm
    rounding: Rounding = field(default_factory=Rounding)
    signed: bool = False

    @property
    def about(self) -> AggregationAbout:
        """That of the form, with this ring."""
        return replace(self.form.about, ring=self.rounding)

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> SecureSum:
        """Returns the same sum with another ring; noise is added to the sum."""
        return replace(self, rounding=ring)

    def price(self, load: Workload) -> SumPrice:
        """Returns what a round costs."""
        length, reading = self.form.work(load)
        speeds, clients = measured(SumSpeeds), load.cohort
        # Two neighbours: limits are checked, and the lists of neighbours are not made.
        SecAggParams(bytes(16), clients, length, threshold=2, degree=2 if clients > 2 else None)
        FixedPoint(1.0, clients)
        degree, vector = degree_of(clients), length * _ELEMENT
        up, down = _message_bytes(degree + 1, vector)
        lost = ceil(_DROPPED * clients)
        kept = clients - lost
        seconds = kept * vector / speeds.summing + clients * speeds.rebuild_seconds + reading
        seconds += (kept + lost * degree) * vector / speeds.masking
        client = degree * (speeds.agree_seconds + vector / speeds.masking)
        return SumPrice(self.about.name, up, down, 4, {"server": seconds}, client, 2 * vector)

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round."""
        clients = [one.client for one in request.results]
        seen = self.about.seen_by(with_counts=request.needs_counts and not self.form.shows_counts)
        if len(clients) < MIN_CLIENTS:
            return withheld(len(clients), MIN_CLIENTS, seen)
        fixed = self.rounding.fixed_point(request)
        parts = self.form.lay_out(request, fixed.bits)
        length = sum(part.length for part in parts)
        settings = SecAggParams(
            name_of_sum(request), len(clients), length, fixed.bits, signed=self.signed
        )
        lost, late = stages_of(request)
        vectors = {
            place: self._vector(request, one, parts, settings)
            for place, one in enumerate(request.results)
            if one.update is not None
        }
        # Who drops out on the way has begun: its masks must be taken out of the sum.
        nothing = np.zeros(length, settings.dtype)
        vectors |= {place: nothing for place, stage in lost.items() if stage != "before"}
        try:
            opened = run_secagg(settings, vectors, lost, late=late)
            count = len(opened.survivors)
            found = [part.read(piece, count) for part, piece in _pieces(parts, opened.total)]
        except (ThresholdError, SketchError) as error:
            return SumResult(None, {}, seen_by=seen, error=str(error))
        sums = [PartSum(keys, fixed.decode(rows), counts) for keys, rows, counts in found]
        return SumResult(
            tuple(part.divided(request.over, count) for part in sums),
            counts=tuple(part.known_counts for part in sums) if request.with_counts else None,
            bytes_up={clients[place]: up for place, up in opened.bytes_up.items()},
            bytes_down={clients[place]: down for place, down in opened.bytes_down.items()},
            seen_by=seen,
        )

    def _vector(
        self,
        request: SumRequest,
        one: ClientResult,
        parts: Sequence[VectorPart],
        settings: SecAggParams,
    ) -> RingArray:
        """What a client adds."""
        vector = np.zeros(settings.length, settings.dtype)
        rows = self.rounding.rows(request, one)
        for (part, piece), own in zip(_pieces(parts, vector), rows, strict=True):
            part.write(*own, piece)
        return vector


def _pieces(
    parts: Sequence[VectorPart], vector: RingArray
) -> Iterator[tuple[VectorPart, RingArray]]:
    """Each part with its numbers in a vector."""
    borders = np.cumsum([part.length for part in parts])[:-1]
    return zip(parts, np.split(vector, borders), strict=True)


def _message_bytes(members: int, vector: int) -> tuple[int, int]:
    """Bytes that a client sends and receives in all steps, in a group of this many members."""
    bits = -(-members // 8)
    slots = {width: bits + members * width for width in (KEYS_BYTES, SEALED_BYTES, SHARE_BYTES)}
    up = KEYS_BYTES + slots[SEALED_BYTES] + vector + slots[SHARE_BYTES] + 4 * FRAME_BYTES
    down = slots[KEYS_BYTES] + slots[SEALED_BYTES] + 2 * bits + 3 * FRAME_BYTES
    return up, down


def _width(load: Workload) -> int:
    """Numbers of a row."""
    return -(-load.slice_bytes // _ELEMENT)


def stages_of(request: SumRequest) -> tuple[dict[int, Stage], list[int]]:
    """Returns who is lost at which stage of a secure sum, and who is late, by their places."""
    lost, late = {}, []
    for place, one in enumerate(request.results):
        if one.outcome in _LOST:
            lost[place] = _LOST[one.outcome]
        elif one.update is None:  # late, and what it would have sent was never computed
            lost[place] = "after_shares"
        elif one.outcome == "late":
            late.append(place)
    return lost, late


@dataclass(frozen=True)
class _DenseRows:
    """Every row of a part, with zeros where a client touched nothing, and a count beside each."""

    part: Part
    with_counts: bool

    @property
    def length(self) -> int:
        return self.part.space.num_keys * (self.part.slice_size + self.with_counts)

    def write(self, keys: KeyArray, rows: RingArray, into: RingArray) -> None:
        whole = into.reshape(self.part.space.num_keys, -1)
        whole[keys, : self.part.slice_size] = rows
        whole[keys, self.part.slice_size :] = 1

    def read(self, total: RingArray, clients: int) -> FoundRows:
        whole = total.reshape(self.part.space.num_keys, -1)
        keys = np.flatnonzero(whole.any(axis=1))
        counts = whole[keys, -1].astype(np.int64) if self.with_counts else None
        return keys, whole[keys, : self.part.slice_size], counts


@dataclass(frozen=True)
class _SketchedRows:
    """An invertible sketch of a part: as long as what the cohort touches."""

    shape: sketch.SketchShape

    @property
    def length(self) -> int:
        return self.shape.length

    def write(self, keys: KeyArray, rows: RingArray, into: RingArray) -> None:
        into[:] = sketch.encode(self.shape, keys, rows)

    def read(self, total: RingArray, clients: int) -> FoundRows:
        decoded = sketch.decode(self.shape, total, clients)
        return decoded.keys, decoded.rows, decoded.counts


def _lay_out_rows(request: SumRequest, bits: RingBits) -> list[_DenseRows]:
    """Every row of every part; a count beside each where sums are divided by choosers."""
    return [_DenseRows(part, request.needs_counts) for part in request.layout.parts]


def _lay_out_sketches(request: SumRequest, bits: RingBits) -> list[_SketchedRows]:
    """Sketches with room for all keys that the cohort can have, under a seed of this sum."""
    seeds, clients = derived(b"sketch", request.seed_path), len(request.results)
    limit = max_keys_of(request.layout, request.keys_per_client)
    return [
        _SketchedRows(
            sketch.SketchShape(
                part.space.num_keys,
                part.slice_size,
                max(1, min(clients * m, part.space.num_keys)),
                seeds.bytes(16),
                bits,
                max_clients=clients,
            )
        )
        for part, m in zip(request.layout.parts, limit, strict=True)
    ]


def _work_of_sketches(load: Workload) -> tuple[int, float]:
    """Cells for all keys of the cohort, which are decoded one by one."""
    distinct = load.distinct_keys
    shape = sketch.SketchShape(
        load.num_keys, _width(load), distinct, bytes(16), max_clients=load.cohort
    )
    return shape.length, distinct * load.slice_bytes / measured(SumSpeeds).decoding


def odds_of_failing(layout: Layout, keys_per_client: Mapping[str, int], cohorts: Cohorts) -> float:
    """Returns how often the sketches of a round do not decode, at the most.

    Two keys that share all their cells are U^2 / 2 / (C / 4)^4 of all sketches of U keys in C
    cells; twice that holds from 500 keys on. With fewer, 4 in 10,000 were measured at the worst
    (see `SketchShape`): 5 are taken.
    """
    total = 0.0
    clients = cohorts.asked // (2 if cohorts.sampling == "poisson" else 1)  # hardly ever fewer
    limit = max_keys_of(layout, keys_per_client)
    for part, m in zip(layout.parts, limit, strict=True):
        distinct = max(1, min(clients * m, part.space.num_keys))
        cells = 1.4 * distinct + 96
        total += 5e-4 if distinct < 500 else distinct**2 / (cells / 4) ** 4
    return min(1.0, total)


_RESTS_ON = "The server follows the protocol, and fewer than t clients work with it."
_DENSE = AggregationAbout(
    name="secure-dense",
    title="masked dense sum",
    leaks=MappingProxyType({"server": Leak(updates="the sum of all updates")}),
    rests_on=_RESTS_ON,
    is_private=True,
    is_served=False,
    noise="on_sum",
    min_clients=MIN_CLIENTS,
    failure=never,
    can_sign=True,
)
_PER_KEY = "for each key the sum of its updates and how many clients chose it"
_SKETCH = AggregationAbout(
    name="secure-sketch",
    title="masked sketch",
    leaks=MappingProxyType({"server": Leak(updates=_PER_KEY)}),
    rests_on=_RESTS_ON,
    is_private=True,
    is_served=False,
    noise="on_sum",
    min_clients=MIN_CLIENTS,
    failure=odds_of_failing,
    can_sign=True,
)

DENSE_FORM = VectorForm(
    _DENSE, False, lambda load: (load.num_keys * _width(load), 0.0), _lay_out_rows
)
"""The whole model, with zeros where a client touched nothing."""

SKETCH_FORM = VectorForm(_SKETCH, True, _work_of_sketches, _lay_out_sketches)
"""An invertible sketch of each part: as long as what the cohort touches."""
