"""Adds updates up in the clear so that a few that lie move little: trimmed mean, median, an alarm.

Row by row and number by number: of the values that clients sent for one number of one key, the
largest and the smallest are left out and the rest is averaged (Yin et al., Byzantine-Robust
Distributed Learning, 2018). The median is what is left when half is trimmed at each end.

Over whom. The values of a key are those of the clients that chose it ("left-out"). What they agree
on is weighed as the mean of their updates would be, by their share of the cohort (Eq. 5): with
nothing trimmed it is the plain mean. Or all others of the cohort count as zeros ("zeros"), which is
`deselect` with a robust aggregate: a key that at most the trimmed share of the cohort chose does
not move at all. Where clients select few keys, most keys are of that kind.

`NormAlarm` wraps any sum in the clear, counts updates much longer than the median one, and changes
nothing.

Hidden: nothing. The server sees every update, and which client sent it. Not stopped: clients that
lie where they are the majority of those who chose a key, and lies as long as honest updates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.about import Leak
from keyhole.aggregation.base import (
    Aggregation,
    AggregationAbout,
    Rounding,
    RowsOfClient,
    SumPrice,
    SumRequest,
    SumResult,
    about_of,
    added,
    rows_of,
)
from keyhole.aggregation.plain import PLAIN, count_choosers, sent_bytes
from keyhole.errors import InputError
from keyhole.pricing import ServiceSpeeds, Workload, measured
from keyhole.primitives.deselect import trimmed_count
from keyhole.server.row_sums import Over, RowUpdate

Untouched: TypeAlias = Literal["left-out", "zeros"]
"""What a client that did not choose a key counts as there: nobody, or a client that sent zeros."""

DEFAULT_TRIM, HALF = 0.2, 0.5
_PIECE = 1 << 22  # numbers that are sorted at once: what is copied for it stays in tens of MB
_LOG = logging.getLogger("keyhole.aggregation")  # a warning shows on stderr unless told otherwise

_LEAKS = MappingProxyType({"server": Leak(updates="each update, its keys and whose they are")})
_RESTS_ON = (
    "Nothing is hidden: the server sees every update. Of those who choose a key, fewer than are "
    "trimmed at one end lie."
)
_TRIMMED = AggregationAbout(
    name="trimmed-mean",
    title="trimmed mean",
    leaks=_LEAKS,
    rests_on=_RESTS_ON,
    is_in_clear=True,
    inputs="checked",
    is_robust=True,
    can_trim=True,
)
_MEDIAN = replace(_TRIMMED, name="median", title="coordinate median", can_trim=False)


@dataclass(frozen=True)
class TrimmedMean:
    """Averages each number of each key without its largest and smallest values.

    Args:
        share: of the values of a key that are left out at each end, rounded up, as long as one is
            left: 0 is the mean, 0.5 the median.
        untouched: what a client counts as that did not choose the key.

    Raises:
        InputError: a value is not allowed.
    """

    share: float = DEFAULT_TRIM
    untouched: Untouched = "left-out"

    def __post_init__(self) -> None:
        if not 0 <= self.share <= HALF or self.untouched not in ("left-out", "zeros"):
            raise InputError(
                f"the trimmed mean is invalid: got a share of {self.share}, clients that did not "
                f"choose a key as {self.untouched!r}; expected a share from 0 to 0.5, and left-out "
                "or zeros; trim more than the share of clients that may lie"
            )

    @property
    def about(self) -> AggregationAbout:
        """Everything is in the clear."""
        return _MEDIAN if self.share == HALF else _TRIMMED

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> TrimmedMean:
        """Returns itself: floats are sorted as they are."""
        return self

    def price(self, load: Workload) -> SumPrice:
        """Returns what a round costs: the trainer holds all updates, and sorts them."""
        plain, sent = PLAIN.price(load), load.cohort * PLAIN.price(load).bytes_up
        held = 2 * sent + load.distinct_keys * load.slice_bytes
        seconds = {
            "trainer": sum(plain.seconds_by.values()) + sent / measured(ServiceSpeeds).sorting
        }
        return replace(plain, name=self.about.name, seconds_by=seconds, server_memory=held)

    def add(self, request: SumRequest) -> SumResult:
        """Makes one update of those of a round."""
        self._check(request)
        up, sent = sent_bytes(request), request.sent
        if not sent:
            return SumResult(None, up, seen_by=self.about.seen_by())
        of_clients = [rows_of(request.layout, one) for one in sent]
        rows = tuple(
            self._reduce(part, len(sent), request.over) for part in zip(*of_clients, strict=True)
        )
        return SumResult(rows, up, count_choosers(request), seen_by=self.about.seen_by())

    def _check(self, request: SumRequest) -> None:
        if self.untouched == "zeros" and request.over == "choosers":
            raise InputError(
                "clients that did not choose a key cannot both count and not count: got zeros for "
                "them, and a mean over choosers; expected a mean over the cohort; choose one"
            )
        if request.blocks is not None:
            raise InputError(
                f"updates that were added up before they were sorted: got {len(request.blocks)} "
                "sums; expected the update of each client; declare adds_in_blocks=False"
            )

    def _reduce(self, part: Sequence[RowsOfClient], clients: int, over: Over) -> RowUpdate:
        """One part: its distinct keys, ascending, and the row of each."""
        keys = np.concatenate([own for own, _ in part])
        rows = np.concatenate([own for _, own in part])
        order = np.argsort(keys, kind="stable")
        distinct, starts, counts = np.unique(keys[order], return_index=True, return_counts=True)
        found = np.empty((len(distinct), rows.shape[1]), np.float32)
        for n, places in _by_count(counts, rows.shape[1]):
            values = rows[order[starts[places][:, None] + np.arange(n)]]  # (places, n, width)
            values.sort(axis=1)
            if self.untouched == "zeros":
                mean, weight = _mean_with_zeros(values, clients, self.share), clients
            else:
                cut = trimmed_count(self.share, n)
                mean, weight = values[:, cut : n - cut].mean(axis=1, dtype=np.float64), n
            factor = {"cohort": weight / clients, "choosers": 1.0, "nothing": float(weight)}[over]
            found[places] = mean * factor
        return RowUpdate(distinct, found)


MEDIAN = TrimmedMean(HALF)
"""The median of each number, over those who chose the key."""


def _by_count(counts: NDArray[np.int64], width: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Places of keys that equally many clients chose, in pieces that are sorted at once."""
    for n in np.unique(counts).tolist():
        same = np.flatnonzero(counts == n)
        step = max(1, _PIECE // max(1, n * width))
        for start in range(0, len(same), step):
            yield n, same[start : start + step]


def _mean_with_zeros(
    values: NDArray[np.float32], clients: int, share: float
) -> NDArray[np.float64]:
    """The trimmed mean of sorted values (keys, n, width) and of zeros that fill up the cohort: they
    stand between the negative values and the others."""
    n, cut = values.shape[1], trimmed_count(share, clients)
    rank = np.arange(n)[None, :, None] + (clients - n) * (values >= 0)
    kept = np.where((rank >= cut) & (rank < clients - cut), values, np.float32(0))
    total: NDArray[np.float64] = kept.sum(axis=1, dtype=np.float64)
    return total / (clients - 2 * cut)


@dataclass(frozen=True)
class NormAlarm:
    """Wraps a sum in the clear: counts updates much longer than the median one, and says so.

    Args:
        inner: the sum; what it returns is not changed.
        times: the multiple of the median norm, of the updates that are added, above which one
            counts.

    Raises:
        InputError: the sum does not see updates, or the multiple is below 1.
    """

    inner: Aggregation = PLAIN
    times: float = 5.0

    def __post_init__(self) -> None:
        about = about_of(self.inner)
        if about.inputs != "checked" or not self.times >= 1:
            raise InputError(
                f"an alarm that cannot ring: got {self.times:g} times the median norm, around "
                f"{about.name}; expected 1 or more, around a sum in the clear; leave it out where "
                "nobody sees updates"
            )

    @property
    def about(self) -> AggregationAbout:
        """What the sum declares; it needs norms, too."""
        return replace(about_of(self.inner), needs_norms=True)

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> NormAlarm:
        """Returns itself around the sum with that ring."""
        return replace(self, inner=self.inner.with_ring(ring, noise))

    def price(self, load: Workload) -> SumPrice:
        """Returns what the sum costs; a norm is one pass over an update that is read anyway."""
        return self.inner.price(load)

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round, and counts."""
        norms = [one.norm for one in request.sent if one.norm is not None]
        limit = self.times * float(np.median(norms)) if norms else np.inf
        found = sum(norm > limit for norm in norms)
        if found:
            _LOG.warning(
                "round %d: %d of %d updates are longer than %g times the median norm",
                *(request.seed_path[2], found, len(norms), self.times),
            )
        return replace(added(self.inner.add, request), outliers=found)
