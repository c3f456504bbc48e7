"""Makes sums differentially private: clipped updates, added up by any aggregation, with noise.

The unit is one client with all its data. The guarantee is about the models that a run releases, for
everyone who sees all of them. `Privacy` states the promise, `PrivateSum` keeps it, and
`rounds/account.py` says what has been spent of it.

Clipping bounds what one client moves: the L2 norm of the vector that is added up, the parts that
everyone receives and the selected rows together. Clipping them apart would allow each of them C.
The bound holds for sums, and for means over the planned cohort; it does not hold for means in which
each row is divided by the number of clients that asked for it, where one client more moves the rows
of all others.

Hidden: whether one client took part, up to (epsilon, delta). Not hidden: what servers see before
the noise is added, which secure sums are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isnan, log, sqrt
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import (
    Aggregation,
    AggregationAbout,
    ClientResult,
    Rounding,
    SumRequest,
    SumResult,
    about_of,
    added,
    check_declares_noise,
    derived,
    rows_of,
)
from keyhole.aggregation.privacy.correlated import Strategy, add_correlated_noise
from keyhole.aggregation.privacy.noise import AdaFest, add_noise, noise_room, threshold_rows
from keyhole.arrays import KeyArray, Tree
from keyhole.errors import InputError
from keyhole.primitives.deselect import divide
from keyhole.primitives.layout import Layout, Part, max_keys_of
from keyhole.sampling import Cohorts
from keyhole.server.inputs import clip, norm
from keyhole.server.row_sums import Over, RowUpdate, no_update

NoiseKind: TypeAlias = Literal["all-rows", "thresholded", "correlated"]
"""Noise on all rows; on those whose noisy count reaches a threshold (DP-AdaFEST); on all rows, so
that it cancels over rounds (DP-FTRL)."""


@dataclass(frozen=True)
class Privacy:
    """What a run promises about one client.

    Args:
        clip: C, the L2 clipping norm of one client's update.
        noise: z, standard deviation of the noise on a sum over C.
        delta: for which epsilon is stated; below one over the population.
        budget: max epsilon; a round that would spend more does not start.
        threshold: of "thresholded": noisy counts below it drop a row, in clients.
        rounds: of "correlated": for how many the noise is planned.
        bands: of "correlated": number of bands of the noise-correlation matrix (a banded inverse,
            BandMF); 0 for all rounds (the square root).
    """

    clip: float
    noise: float
    delta: float = 1e-6
    budget: float | None = None
    kind: NoiseKind = "all-rows"
    threshold: float = 10.0
    rounds: int = 0
    bands: int = 0

    def __post_init__(self) -> None:
        if self.kind not in get_args(NoiseKind) or isnan(self.threshold):
            allowed = f"{', '.join(get_args(NoiseKind))}; a threshold that is a number"
            raise InputError(
                f"no such kind of noise: got {self.kind}, threshold {self.threshold}; "
                f"expected {allowed}; choose one of them"
            )
        if not (self.clip > 0 and 0 <= self.noise < inf) or (self.noise and self.clip == inf):
            raise InputError(
                f"clip and noise are inconsistent: got clip {self.clip}, noise "
                f"{self.noise}; expected a clip above 0, finite where there is noise; "
                "noise of 0 or more; take the median norm of an update as clip, and "
                "noise from `noise_for`"
            )

    def strategy(self, cohorts: Cohorts) -> Strategy:
        """Returns the strategy of correlated noise."""
        separation = min(self.rounds, cohorts.separation)
        kind: Literal["full", "banded-inverse"] = "banded-inverse" if self.bands else "full"
        return Strategy(self.rounds, separation, kind, self.bands)


@dataclass(frozen=True)
class PrivateSum:
    """Adds up clipped updates by another aggregation, with noise on the sum.

    A sum is divided by the planned cohort, no matter who arrived: what it is divided by must not
    depend on one client. Nor may the step to which secure sums round, which all other updates meet:
    their ring is made for the largest cohort that can be drawn, not for the one that was.
    """

    inner: Aggregation
    privacy: Privacy
    cohorts: Cohorts

    def check(self, layout: Layout, keys_per_client: Mapping[str, int], over: Over) -> None:
        """Raises InputError where no round of a run could be added up, before one is made."""
        _check_divisor(over)
        if about_of(self.inner).min_per_key:
            raise InputError(
                "rows that are dropped by counts which no account covers: got min_per_key "
                f"{about_of(self.inner).min_per_key}, and privacy; expected one of the two; leave "
                "it out, or take --dp-kind thresholded"
            )
        ring = about_of(self.ready_inner()).ring
        if ring is not None and self.privacy.clip < inf:
            step = ring.for_clients(self.cohorts.asked).rounding
            norm_before_rounding(self.privacy.clip, step, layout.client_size(**keys_per_client))
        if self.privacy.kind == "thresholded":
            self._fest(layout, keys_per_client)
        if self.privacy.kind == "correlated":
            self.privacy.strategy(self.cohorts)

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round."""
        _check_divisor(request.over)
        if request.blocks is not None:
            raise InputError(
                f"updates that were added up before they were clipped: got {len(request.blocks)} "
                "sums; expected the update of each client; add up in blocks only where nothing is "
                "promised"
            )
        needs_counts = self.privacy.kind == "thresholded" and self.privacy.noise > 0
        ready = self.ready_inner()
        ring = about_of(ready).ring
        results = [self._clipped(request, one, ring) for one in request.results]
        inner = replace(request, results=results, over="nothing", with_counts=needs_counts)
        summed = added(ready.add, inner)
        opens_empty = about_of(self.inner).min_clients == 0
        if opens_empty and not request.sent:  # that nobody came must not show either
            summed = replace(summed, rows=tuple(map(no_update, request.layout.parts)), error=None)
        if summed.rows is None:  # what that tells is charged for: see `account.py`
            self._check_may_fail(request, summed)
            return summed
        noisy = self._with_noise(request, summed)
        size = self.cohorts.size
        return replace(
            summed, rows=tuple(RowUpdate(u.keys, divide(u.rows, size)) for u in noisy), counts=None
        )

    def _check_may_fail(self, request: SumRequest, summed: SumResult) -> None:
        """Raises InputError for a sum that was not opened and had declared that it would be: the
        account has charged nothing for that."""
        about, sent = about_of(self.inner), len(request.sent)
        is_enough = about.hides_dropouts or sent == len(request.results)
        needed = about.min_clients_for(len(request.results), request.goal)
        if not is_enough or about.failure is None or sent < needed:
            return
        if about.failure(request.layout, request.keys_per_client, self.cohorts) == 0:
            raise InputError(
                f"a sum that was not opened although it declares that it always is: got {sent} "
                f"clients, {about.name}: {summed.error}; expected a sum, or a `failure` in its "
                "`about` that says how often there is none; declare it, and start a new run: the "
                "account of this one is too small"
            )

    def _clipped(
        self, request: SumRequest, one: ClientResult, ring: Rounding | None
    ) -> ClientResult:
        """The result, shortened to C less what rounding to a ring can add."""
        if one.update is None:
            return one
        limit = self.privacy.clip
        if ring is not None and limit < inf:
            counts = {name: len(z) for name, z in one.keys.items()}
            entries = request.layout.client_size(**counts)
            limit = norm_before_rounding(limit, ring.fixed_point(request).rounding, entries)
        return clip_update(request.layout, one, limit)

    def ready_inner(self) -> Aggregation:
        """Returns the aggregation with a ring that holds clipped updates, and with the noise of its
        parties where they add it to their shares themselves.

        Raises:
            InputError: its `about` does not declare, before or after, that the promise is kept.
        """
        check_declares_noise(self.inner)
        about, privacy = about_of(self.inner), self.privacy
        if about.ring is None or privacy.clip == inf:
            return self.inner
        ring = replace(about.ring, clip=privacy.clip, minimum=max_asked(self.cohorts))
        if not self._is_noise_of_parties:
            return self._with_ring(ring)
        ring = replace(ring, room=noise_room(privacy.noise, parties=about.servers))
        return self._with_ring(ring, privacy.noise * privacy.clip)

    def _with_ring(self, ring: Rounding, noise: float = 0.0) -> Aggregation:
        if not hasattr(self.inner, "with_ring"):
            raise InputError(
                "a sum whose ring cannot be made for clipped updates: got "
                f"{about_of(self.inner).name}; expected an aggregation with the method "
                "`with_ring`; add it: a wrapper returns itself around the inner `with_ring`"
            )
        ready = self.inner.with_ring(ring, noise)
        _check_same_sum(self.inner, ready, ring, noise)
        return ready

    @property
    def _is_noise_of_parties(self) -> bool:
        """Other noise than that on all rows needs counts or earlier rounds, which no party has."""
        by_parties = about_of(self.inner).noise == "by_parties"
        return by_parties and self.privacy.kind == "all-rows"

    def _with_noise(self, request: SumRequest, summed: SumResult) -> Sequence[RowUpdate]:
        assert summed.rows is not None
        if not self.privacy.noise or self._is_noise_of_parties:
            return summed.rows
        counts = summed.counts or tuple(np.empty(0, np.int64) for _ in summed.rows)
        return [
            self._noisy_part(request, place, part, update, counts[place])
            for place, (part, update) in enumerate(
                zip(request.layout.parts, summed.rows, strict=True)
            )
        ]

    def _noisy_part(
        self,
        request: SumRequest,
        place: int,
        part: Part,
        update: RowUpdate,
        counts: NDArray[np.int64],
    ) -> RowUpdate:
        """The sum of one part with noise on all its rows, or on those that are kept."""
        privacy, prg = self.privacy, derived(b"noise", request.seed_path, place)
        sd = privacy.noise * privacy.clip
        if privacy.kind == "thresholded" and part.product.factors:
            fest, size = self._fest(request.layout, request.keys_per_client), part.space.num_keys
            rows = update.keys, counts, update.rows
            return threshold_rows(fest, size, *rows, privacy.clip, prg)
        if privacy.kind == "thresholded":
            sd = AdaFest.split(privacy.noise)[1] * privacy.clip
        keys: KeyArray = np.arange(part.space.num_keys)
        dense = np.zeros((len(keys), part.slice_size), np.float32)
        dense[update.keys] = update.rows
        if privacy.kind == "correlated":
            secret = derived(b"correlated", (*request.seed_path[:2], 0), place).bytes(16)
            strategy = privacy.strategy(self.cohorts)
            return RowUpdate(
                keys, add_correlated_noise(dense, strategy, request.seed_path[2], sd, secret)
            )
        return RowUpdate(keys, add_noise(dense, sd, prg))

    def _fest(self, layout: Layout, keys_per_client: Mapping[str, int]) -> AdaFest:
        """Noise on the counts of all parts that are cut: a client touches keys of each of them."""
        limit = zip(layout.parts, max_keys_of(layout, keys_per_client), strict=True)
        touched = sum(m for part, m in limit if part.product.factors)
        counted, rows = AdaFest.split(self.privacy.noise)
        return AdaFest(self.cohorts.size, max(1, touched), counted, rows, self.privacy.threshold)


def _check_same_sum(inner: Aggregation, ready: Aggregation, ring: Rounding, noise: float) -> None:
    """Raises InputError unless `ready` is `inner` with this ring and this noise of its parties."""

    def stated(about: AggregationAbout) -> dict[str, object]:
        return {name: getattr(about, name) for name in _KEPT}

    wanted = stated(about_of(inner)) | {"ring": ring, "noise_added": noise}
    found = stated(about_of(ready))
    wrong = [f"{name}={found[name]}" for name in _KEPT if found[name] != wanted[name]]
    if type(ready) is not type(inner):
        wrong = [type(ready).__name__]
    if wrong:
        expected = f"{type(inner).__name__} with ring={ring}, noise_added={noise:g}, else unchanged"
        raise InputError(
            f"a sum that does not add up as privacy was promised: got {', '.join(wrong)} from "
            f"`with_ring` of {about_of(inner).name}; expected {expected}; return the same class "
            "with both, and state them in its `about`"
        )


_KEPT = ("ring", "noise", "noise_added", "servers", "min_clients", "hides_dropouts")


def max_asked(cohorts: Cohorts) -> int:
    """Returns the max cohort size; of Poisson cohorts, the size that one in 2^64 reaches.

    By Bernstein: P(X >= mu + a) <= exp(-a^2 / (2 (mu + a / 3))).

    >>> max_asked(Cohorts(10**6, 50)), max_asked(Cohorts(10**6, 50, "poisson"))
    (50, 134)
    """
    if cohorts.sampling != "poisson":
        return cohorts.asked
    bits = 64 * log(2)
    above = bits / 3 + sqrt((bits / 3) ** 2 + 2 * bits * cohorts.asked)
    return min(cohorts.population, ceil(cohorts.asked + above))


def _check_divisor(over: Over) -> None:
    if over != "cohort":
        raise InputError(
            f"a mean whose divisor tells who took part: got sums over {over}; expected cohort; "
            "divide by the cohort where privacy is promised"
        )


def norm_before_rounding(limit: float, step: float, entries: int) -> float:
    """Returns the norm to clip to, so that an update is no longer than C after it became integers.

    Stochastic rounding moves every number that is not zero by less than one step, so that it can
    lengthen a vector by less than step sqrt(entries). That is nothing in a ring of 32 bits, and can
    be more than C itself in one of 16.

    Args:
        limit: C, to which the noise is scaled.
        step: 1 / scale, `FixedPoint.rounding`.
        entries: numbers of one update that may be other than zero: m times the width of a row, and
            all that is broadcast.

    >>> norm_before_rounding(1.0, 2.0**-25, 500_000)
    0.99997...
    """
    left = limit - step * sqrt(entries)
    if not left > 0:
        raise InputError(
            f"a ring too coarse for differential privacy: got {entries} numbers, rounded by up to "
            f"{step:.3g} each, against a norm of {limit:g}; expected steps below "
            f"{limit / sqrt(max(1, entries)):.3g}; take the ring of 32 bits, a larger clipping "
            "norm, or fewer keys"
        )
    return left


def clip_update(layout: Layout, one: ClientResult, limit: float) -> ClientResult:
    """Returns the result, shortened to an L2 norm of `limit`, all parts together; rows of equal
    keys count as the one that they are added up to."""

    def length(update: Tree) -> float:
        rows = rows_of(layout, replace(one, update=update))
        return norm({str(i): own for i, (_, own) in enumerate(rows)})

    return replace(one, update=clip(one.update, limit, length))
