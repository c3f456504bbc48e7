"""Defines an aggregation: what it declares, what a round asks of it, and what it gives back.

`SumRequest` and `SumResult` are the question and the answer of one round. `PartSum` turns sums into
rows of a model, and `Rounding` turns updates into numbers of a ring and says how large they may be.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.about import About, Leak
from keyhole.arrays import KeyArray, Tree
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint, RingBits
from keyhole.errors import InputError, ThresholdError
from keyhole.parts import PartKind
from keyhole.pricing import Workload
from keyhole.primitives.deselect import divide
from keyhole.primitives.layout import KeysBySpace, Layout
from keyhole.primitives.report import Report, Reported
from keyhole.sampling import Cohorts, Outcome
from keyhole.server.inputs import HeldBy
from keyhole.server.row_sums import BlockSum, Over, RowUpdate
from keyhole.server.rows import sum_rows


@dataclass(frozen=True, repr=False)
class ClientResult:
    """Says what became of one client in a round.

    Args:
        outcome: how its part ended; what is not "sent" does not count, however far it came.
        keys: what its sub-model holds, by key space.
        update: shaped as the sub-model; None where there is none to send.
        size: numbers in its sub-model; 0 if it received none.
        bytes_up: what it sent to select.
        update_bytes: what it sent to have its update added.
        unplaced_keys: how many keys it chose and trained without, because a private delivery had
            no place for them in its query.
        norm: of its update as it arrived; None where nobody measured it.
        is_above_norm: whether that was above what the round allows.
        report: what it said beside the update; None where that is nothing.
    """

    client: int
    outcome: Outcome
    keys: KeysBySpace
    update: Tree
    size: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    update_bytes: int = 0
    unplaced_keys: int = 0
    norm: float | None = None
    is_above_norm: bool = False
    report: Report | None = None

    def __repr__(self) -> str:
        """Keys and updates may be private."""
        return f"ClientResult(client {self.client}, {self.outcome})"


@dataclass(frozen=True)
class SumRequest:
    """One sum to be made.

    Args:
        results: of every client that was asked, in order.
        keys_per_client: key space -> max keys of a client; public.
        seed_path: (seed, trial, round), from which the randomness of a simulation derives.
        with_counts: whether to say how many clients chose each key.
        blocks: updates that were added up where clients were trained, which results then
            lack; for sums in the clear alone.
        goal: updates that the round waited for, fewer than were asked where it asks more; None for
            those of everybody asked.
    """

    layout: Layout
    results: Sequence[ClientResult]
    over: Over
    keys_per_client: Mapping[str, int]
    seed_path: tuple[int, int, int]
    with_counts: bool = False
    blocks: tuple[BlockSum, ...] | None = None
    goal: int | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether somebody must learn how many clients chose each key."""
        return self.with_counts or self.over == "choosers"

    @property
    def sent(self) -> list[ClientResult]:
        """Those that count."""
        return [each for each in self.results if each.outcome == "sent"]


@dataclass(frozen=True)
class SumResult:
    """What came of it.

    Args:
        rows: for each part its keys, ascending, and a row for each; None if nobody was left, or too
            few for the sum to be opened.
        counts: for each part how many clients chose each of its keys, where that was asked for.
        bytes_up: client -> what it sent to have its update added.
        bytes_down: client -> what it received for it.
        unplaced_keys: keys of all clients whose update found no place in a message.
        dropped_rows: rows that somebody sent, and too few for them to be opened.
        seen_by: party -> what it learned of updates and their keys.
        outliers: updates that a sum with an alarm found too long beside the others.
        error: why nothing was opened, if so.
        reported: what clients reported together, where that is read.
    """

    rows: tuple[RowUpdate, ...] | None
    bytes_up: Mapping[int, int]
    counts: tuple[NDArray[np.int64], ...] | None = None
    bytes_down: Mapping[int, int] = field(default_factory=dict)
    unplaced_keys: int = 0
    dropped_rows: int = 0
    seen_by: Mapping[str, str] = field(default_factory=dict)
    outliers: int = 0
    error: str | None = None
    reported: Reported = field(default_factory=Reported)


def withheld(clients: int, minimum: int, seen_by: Mapping[str, str]) -> SumResult:
    """What comes of a sum with too few clients: nothing."""
    few = ThresholdError(
        f"too few clients for a sum to be released: got {clients}; expected {minimum} or more; ask "
        "more clients"
    )
    return SumResult(None, {}, seen_by=seen_by, error=str(few))


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

    def fixed_point(self, request: SumRequest) -> FixedPoint:
        """For all clients that were asked: more cannot be added."""
        return self.for_clients(len(request.results))

    def for_clients(self, clients: int) -> FixedPoint:
        """Returns the fixed-point scale that cannot overflow with this many summands.

        Raises:
            InputError: the ring is too small for them.
        """
        return FixedPoint(self.clip, max(self.minimum, clients) + self.room, self.bits)

    def rows(self, request: SumRequest, one: ClientResult) -> list[RingRows]:
        """What a client adds to each part, rounded up or down by its own coin.

        In a simulation that coin derives from the seed of the run: the same seed, the same bytes.
        """
        fixed = self.fixed_point(request)
        prg = derived(b"rounding", request.seed_path, one.client)
        return [(keys, fixed.encode(rows, prg)) for keys, rows in rows_of(request.layout, one)]


Failure: TypeAlias = Callable[[Layout, Mapping[str, int], Cohorts], float]
"""(layout, keys per client by key space, cohorts) -> probability that a round's sum is not opened
although enough clients stayed."""


def never(layout: Layout, keys_per_client: Mapping[str, int], cohorts: Cohorts) -> float:
    """Says that a sum is always opened."""
    return 0.0


NoisePlace: TypeAlias = Literal["on_sum", "by_parties"]
"""Where the noise of differential privacy is added."""


@dataclass(frozen=True, kw_only=True)
class AggregationAbout(About):
    """What an aggregation declares. A default is cautious, or refused where privacy is promised;
    `ring` alone must be declared by every sum that rounds.

    Args:
        ring: how updates are rounded; None states that floats are added up as they are.
        noise: where the noise of differential privacy is added: to the sum once it is open, or by
            the parties, each to its own share. None is refused where privacy is promised.
        noise_added: standard deviation of the noise that each party adds to its share, in the units
            of updates: what `with_ring` was told. Noise that is not stated here is refused.
        min_clients: below which a sum is not opened; None (not declared) is refused where privacy
            is promised.
        min_share: of those who were asked: fewer are not opened either.
        min_per_key: rows that fewer clients sent are dropped before the sum is opened; 0 for none.
        hides_dropouts: whether the sum is opened no matter how many of the cohort dropped out, as
            long as `min_clients` stayed. If not, Poisson cohorts may lose nobody.
        failure: how often a sum is not opened although enough clients stayed; `never` for always.
            None (not declared) is refused where privacy is promised.
        is_in_clear: whether updates arrive as they are, at one who sees each of them.
        adds_in_blocks: whether updates may be added up in blocks before they arrive: it needs
            nothing but their sums.
        inputs: how a bound on updates is held.
        needs_norms: whether it looks at `ClientResult.norm`.
        is_robust: whether it is a robust statistic of updates rather than their sum.
        can_trim: whether the share that it leaves out can be chosen.
        can_sign: whether clients can sign which of them are left.
    """

    ring: Rounding | None = None
    noise: NoisePlace | None = None
    noise_added: float = 0.0
    min_clients: int | None = None
    min_share: float = 0.0
    min_per_key: int = 0
    hides_dropouts: bool = False
    failure: Failure | None = None
    is_in_clear: bool = False
    adds_in_blocks: bool = False
    inputs: HeldBy = "unproved"
    needs_norms: bool = False
    is_robust: bool = False
    can_trim: bool = False
    can_sign: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether two aggregators make it, as services, of shares that devices send; it is then a
        `SharedSum` of `aggregation/exchange.py`."""
        return self.is_served and self.servers == 2

    def min_clients_for(self, asked: int, goal: int | None = None) -> int:
        """The min number of clients of which a sum is opened where this many were asked, and no
        more than `goal` waited for."""
        share = ceil(self.min_share * asked)
        return max(self.min_clients or 0, share if goal is None else min(share, goal))

    def seen_by(self, *, with_counts: bool = False) -> dict[str, str]:
        """Party -> what it learns of updates, and of the counts beside the sum if it has any."""
        more = ", and how many chose each key" if with_counts else ""
        return {party: f"{leak}{more}" for party, leak in self.leaks.items()}


@dataclass(frozen=True)
class SumPrice:
    """What adding up costs in a round.

    Args:
        name: of the aggregation.
        bytes_up: that a client sends, to all servers together.
        requests: of a client, at each server.
        seconds_by: party -> CPU seconds of one core for the whole cohort.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
    """

    name: str
    bytes_up: int
    bytes_down: int
    requests: int
    seconds_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int


class Aggregation(Protocol):
    """Adds updates up: the plain sum, up to the rounding that it declares."""

    @property
    def about(self) -> AggregationAbout:
        """What account, planner, screens and services may know of it."""
        ...

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> Aggregation:
        """Returns the same aggregation, of the same class, with another ring.

        What it returns declares this ring, and this noise as `noise_added`.

        Args:
            ring: in place of the one that it declares.
            noise: standard deviation of the noise of each party, in the units of updates; 0 unless
                it declares noise "by_parties".
        """
        ...

    def price(self, load: Workload) -> SumPrice:
        """Returns what a round costs; one in ten clients drops out on the way.

        Raises:
            InputError: the load is beyond what its messages or rings can hold.
        """
        ...

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round."""
        ...


AGGREGATION = PartKind("aggregation", "own-sum", {"add": Callable})

_UNDECLARED = AggregationAbout(
    name="undeclared",
    title="undeclared sum",
    leaks=MappingProxyType({"server": Leak(updates="it declares nothing: suppose everything")}),
    rests_on="Nothing is declared.",
    is_served=False,
)


def about_of(aggregation: Any) -> AggregationAbout:
    """Returns what an aggregation declares; of one that declares nothing, the worst."""
    about = getattr(aggregation, "about", None)
    return about if isinstance(about, AggregationAbout) else _UNDECLARED


def added(add: Callable[[SumRequest], SumResult], request: SumRequest) -> SumResult:
    """Returns what an aggregation's `add` makes of a request; raises InputError where that is no
    sum."""
    total = add(request)
    if not isinstance(total, SumResult):
        kind = "None" if total is None else f"a {type(total).__name__}"
        raise InputError(
            f"add of the sum in round {request.seed_path[-1]} has returned no sum: got {kind}; "
            "expected a SumResult; return one (docs/own-sum.md)"
        )
    return total


def check_declares_noise(aggregation: Any) -> None:
    """Raises InputError for a sum of which no privacy account can be made."""
    about = about_of(aggregation)
    is_declared = {
        f"noise ({' or '.join(get_args(NoisePlace))})": about.noise in get_args(NoisePlace),
        "min_clients": about.min_clients is not None,
        "failure": about.failure is not None,
        "ring (in which its parties add noise)": about.ring is not None
        or about.noise != "by_parties",
    }
    lacking = ", ".join(name for name, is_there in is_declared.items() if not is_there)
    if lacking:
        raise InputError(
            f"a sum that does not declare what a privacy account needs: got {about.name} without "
            f"{lacking}; expected all of it in its `about`; declare it: "
            "AggregationAbout(noise=..., min_clients=..., failure=..., ring=...)"
        )


RowsOfClient = tuple[KeyArray, NDArray[np.float32]]
"""Different keys of one part, ascending, and what one client adds to the row of each."""


def rows_of(layout: Layout, one: ClientResult) -> list[RowsOfClient]:
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
        """The update of the part, over what the plan divides by."""
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


def derived(purpose: bytes, place: tuple[int, int, int], *more: int) -> Prg:
    """Returns the randomness of a simulation, from its seed, trial and round: it is no secret from
    a party that knows the seed of the run."""
    numbers = struct.pack(f"<{3 + len(more)}q", *place, *more)
    return Prg(sha256(b"keyhole-" + purpose + b"\0" + numbers).digest()[:16])


def name_of_sum(request: SumRequest) -> bytes:
    """16 bytes that name a sum among all of a run."""
    return sha256(b"keyhole-sum" + struct.pack("<3q", *request.seed_path)).digest()[:16]
