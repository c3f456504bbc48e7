"""Makes sums differentially private: clipped updates, added up by any aggregation, with noise.

The unit is one client with all its data. The guarantee is about the models that a run releases, for
everyone who sees all of them. `Privacy` states the promise, `PrivateSum` keeps it, and
`rounds/account.py` says what has been spent of it.

Hidden: whether one client took part, up to (epsilon, delta). Not hidden: what servers see before
the noise is added, which secure sums are for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log, sqrt
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import (
    Aggregation,
    ClientResult,
    Rounding,
    SumRequest,
    SumResult,
    about_of,
    check_declares_noise,
    derived,
)
from keyhole.aggregation.privacy.clipping import clip_update, norm_before_rounding
from keyhole.aggregation.privacy.correlated import Strategy, add_correlated_noise
from keyhole.aggregation.privacy.gaussian import add_noise, noise_room
from keyhole.aggregation.privacy.thresholded import AdaFest, threshold_rows
from keyhole.arrays import KeyArray
from keyhole.errors import InputError
from keyhole.primitives.deselect import divide
from keyhole.primitives.layout import Layout, Part, max_keys_of
from keyhole.sampling import Cohorts
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
        budget: the most epsilon that may be spent; a round that would spend more does not start.
        kind: how noise is laid.
        threshold: of "thresholded": noisy counts below it drop a row, in clients.
        rounds: of "correlated": for how many the noise is planned.
        bands: of "correlated": number of bands of the noise-correlation matrix (a banded inverse,
            BandMF); 0 for all rounds (the square root).

    Raises:
        InputError: a number is out of range.
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
        if self.kind not in get_args(NoiseKind) or not self.threshold == self.threshold:
            raise InputError(
                "no such kind of noise",
                got=f"{self.kind}, threshold {self.threshold}",
                allowed=f"{', '.join(get_args(NoiseKind))}; a threshold that is a number",
                fix="choose one of them",
            )
        if not (self.clip > 0 and 0 <= self.noise < inf) or (self.noise and self.clip == inf):
            raise InputError(
                "clip and noise are inconsistent",
                got=f"clip {self.clip}, noise {self.noise}",
                allowed="a clip above 0, finite where there is noise; noise of 0 or more",
                fix="take the median norm of an update as clip, and noise from `noise_for`",
            )

    def strategy(self, cohorts: Cohorts) -> Strategy:
        """Of correlated noise."""
        separation = min(self.rounds, cohorts.separation)
        kind: Literal["full", "banded-inverse"] = "banded-inverse" if self.bands else "full"
        return Strategy(self.rounds, separation, kind, self.bands)


@dataclass(frozen=True)
class PrivateSum:
    """Adds up clipped updates by another aggregation, with noise on the sum.

    A sum is divided by the planned cohort, no matter who arrived: what it is divided by must not
    depend on one client. Nor may the step to which secure sums round, which all other updates meet:
    their ring is made for the largest cohort that can be drawn, not for the one that was.

    Args:
        inner: adds up.
        privacy: how much noise.
        cohorts: of the run.
    """

    inner: Aggregation
    privacy: Privacy
    cohorts: Cohorts

    def check(self, layout: Layout, keys_per_client: Mapping[str, int], over: Over) -> None:
        """Raises InputError where no round of a run could be added up, before one is made."""
        _check_divisor(over)
        check_declares_noise(self.inner)
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
                "updates that were added up before they were clipped",
                got=f"{len(request.blocks)} sums",
                allowed="the update of each client",
                fix="add up in blocks only where nothing is promised",
            )
        needs_counts = self.privacy.kind == "thresholded" and self.privacy.noise > 0
        results = [self._clipped(request, one) for one in request.results]
        inner = replace(request, results=results, over="nothing", with_counts=needs_counts)
        summed = self.ready_inner().add(inner)
        always_opens = about_of(self.inner).min_clients == 0
        if always_opens and not request.sent:  # that nobody came must not show either
            summed = replace(summed, rows=tuple(map(no_update, request.layout.parts)), error=None)
        if summed.rows is None:  # what that tells is charged for: see `account.py`
            return summed
        noisy = self._with_noise(request, summed)
        size = self.cohorts.size
        return replace(
            summed, rows=tuple(RowUpdate(u.keys, divide(u.rows, size)) for u in noisy), counts=None
        )

    def _clipped(self, request: SumRequest, one: ClientResult) -> ClientResult:
        if one.update is None:
            return one
        return clip_update(request.layout, one, self._limit(request, one))

    def _limit(self, request: SumRequest, one: ClientResult) -> float:
        """C, less what rounding to a ring can add."""
        ring = about_of(self.ready_inner()).ring
        if ring is None or self.privacy.clip == inf:
            return self.privacy.clip
        counts = {name: len(z) for name, z in one.keys.items()}
        entries = request.layout.client_size(**counts)
        step = ring.fixed_point(request).rounding
        return norm_before_rounding(self.privacy.clip, step, entries)

    def ready_inner(self) -> Aggregation:
        """Returns the aggregation with a ring that holds clipped updates, and with the noise of its
        parties where they add it to their shares themselves."""
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
                "a sum whose ring cannot be made for clipped updates",
                got=about_of(self.inner).name,
                allowed="an aggregation with the method `with_ring`",
                fix="add it: a wrapper returns itself around the inner `with_ring`",
            )
        return self.inner.with_ring(ring, noise)

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
        privacy, prg = self.privacy, derived(b"noise", request.place, place)
        sd = privacy.noise * privacy.clip
        if privacy.kind == "thresholded" and part.product.factors:
            fest, size = self._fest(request.layout, request.keys_per_client), part.space.num_keys
            kept = threshold_rows(fest, size, update.keys, counts, update.rows, privacy.clip, prg)
            return RowUpdate(kept.keys, kept.rows)
        if privacy.kind == "thresholded":
            sd = AdaFest.split(privacy.noise)[1] * privacy.clip
        keys: KeyArray = np.arange(part.space.num_keys)
        dense = np.zeros((len(keys), part.slice_size), np.float32)
        dense[update.keys] = update.rows
        if privacy.kind == "correlated":
            secret = derived(b"correlated", (*request.place[:2], 0), place).bytes(16)
            strategy = privacy.strategy(self.cohorts)
            return RowUpdate(
                keys, add_correlated_noise(dense, strategy, request.place[2], sd, secret)
            )
        return RowUpdate(keys, add_noise(dense, sd, prg, out=dense))

    def _fest(self, layout: Layout, keys_per_client: Mapping[str, int]) -> AdaFest:
        """Noise on the counts of all parts that are cut: a client touches keys of each of them."""
        limit = zip(layout.parts, max_keys_of(layout, keys_per_client), strict=True)
        touched = sum(m for part, m in limit if part.product.factors)
        counted, rows = AdaFest.split(self.privacy.noise)
        return AdaFest(self.cohorts.size, max(1, touched), counted, rows, self.privacy.threshold)


def max_asked(cohorts: Cohorts) -> int:
    """The most clients of a round; of Poisson cohorts, the number that one in 2^64 reaches.

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
            "a mean whose divisor tells who took part",
            got=f"sums over {over}",
            allowed="cohort",
            fix="divide by the cohort where privacy is promised",
        )
