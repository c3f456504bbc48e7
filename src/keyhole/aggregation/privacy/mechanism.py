"""Differential privacy of a run: what it promises about one client.

The unit is one client with all its data. The guarantee is about the models that a run releases, for
whoever sees all of them; what servers see on the way is what secure sums are for. `private_sum.py`
keeps the promise, `account.py` says what has been spent of it.

Private sums: clipped updates, added up by any aggregation, with noise on the sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log, sqrt
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import Adding, Aggregation, Contribution, Summed, derived
from keyhole.aggregation.masked.method import SecureSum
from keyhole.aggregation.privacy.clipping import norm_before_rounding
from keyhole.aggregation.privacy.correlated import Strategy, add_correlated_noise
from keyhole.aggregation.privacy.gaussian import add_noise, noise_room
from keyhole.aggregation.privacy.thresholded import AdaFest, threshold_rows
from keyhole.aggregation.two_servers.method import TwoServers, clip_update
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
        clip: C, the most that one client's whole update may measure (Euclidean).
        noise: z, standard deviation of the noise on a sum over C.
        delta: for which epsilon is stated; below one over the population.
        budget: the most epsilon that may be spent; a round that would spend more does not start.
        kind: how noise is laid.
        threshold: of "thresholded": noisy counts below it drop a row, in clients.
        rounds: of "correlated": for how many the noise is planned.
        bands: of "correlated": noise takes back that of so many rounds, its own among them (a
            banded inverse); 0 for all rounds (the square root).

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
                "privacy that cannot be",
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
    """An aggregation of clipped updates, with noise on the sum.

    A sum is divided by the planned cohort, whoever arrived: what it is divided by must not depend
    on one client. Nor may the step to which secure sums round, which all other updates meet: their
    ring is made for the largest cohort that can be drawn, not for the one that was.

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
        ready = self.ready_inner()
        if isinstance(ready, SecureSum | TwoServers) and self.privacy.clip < inf:
            step = ready.rounding.for_clients(self.cohorts.asked).rounding
            norm_before_rounding(self.privacy.clip, step, layout.client_size(**keys_per_client))
        if self.privacy.kind == "thresholded":
            self._fest(layout, keys_per_client)
        if self.privacy.kind == "correlated":
            self.privacy.strategy(self.cohorts)

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        _check_divisor(adding.over)
        if adding.blocks is not None:
            raise InputError(
                "updates that were added up before they were clipped",
                got=f"{len(adding.blocks)} sums",
                allowed="the update of each client",
                fix="add up in blocks only where nothing is promised",
            )
        needs_counts = self.privacy.kind == "thresholded" and self.privacy.noise > 0
        contributions = [self._clipped(adding, one) for one in adding.contributions]
        inner = replace(
            adding, contributions=contributions, over="nothing", with_counts=needs_counts
        )
        summed = self.ready_inner()(inner)
        is_open = not isinstance(self.inner, SecureSum | TwoServers)
        if is_open and not adding.sent:  # that nobody came must not show either
            summed = replace(summed, rows=tuple(map(no_update, adding.layout.parts)), error=None)
        if summed.rows is None:  # what that tells is charged for: see `account.py`
            return summed
        noisy = self._with_noise(adding, summed)
        size = self.cohorts.size
        return replace(
            summed, rows=tuple(RowUpdate(u.keys, divide(u.rows, size)) for u in noisy), counts=None
        )

    def _clipped(self, adding: Adding, one: Contribution) -> Contribution:
        if one.update is None:
            return one
        return clip_update(adding.layout, one, self._limit(adding, one))

    def _limit(self, adding: Adding, one: Contribution) -> float:
        """C, less what rounding to a ring can add."""
        ready = self.ready_inner()
        if not isinstance(ready, SecureSum | TwoServers) or self.privacy.clip == inf:
            return self.privacy.clip
        counts = {name: len(z) for name, z in one.keys.items()}
        entries = adding.layout.client_size(**counts)
        step = ready.rounding.fixed_point(adding).rounding
        return norm_before_rounding(self.privacy.clip, step, entries)

    def ready_inner(self) -> Aggregation:
        """The aggregation with a ring that holds clipped updates; of two servers, also the noise
        that they add to their shares themselves. Others have it added to the sum."""
        inner, privacy = self.inner, self.privacy
        if not isinstance(inner, SecureSum | TwoServers) or privacy.clip == inf:
            return inner
        rounding = replace(inner.rounding, clip=privacy.clip, minimum=max_asked(self.cohorts))
        if not isinstance(inner, TwoServers) or privacy.kind != "all-rows":
            return replace(inner, rounding=rounding)
        rounding = replace(rounding, room=noise_room(privacy.noise, parties=2))
        return replace(inner, rounding=rounding, noise=privacy.noise * privacy.clip)

    def _with_noise(self, adding: Adding, summed: Summed) -> Sequence[RowUpdate]:
        assert summed.rows is not None
        has_noise = isinstance(self.inner, TwoServers) and self.privacy.kind == "all-rows"
        if not self.privacy.noise or has_noise:
            return summed.rows
        counts = summed.counts or tuple(np.empty(0, np.int64) for _ in summed.rows)
        return [
            self._noisy_part(adding, place, part, update, counts[place])
            for place, (part, update) in enumerate(
                zip(adding.layout.parts, summed.rows, strict=True)
            )
        ]

    def _noisy_part(
        self,
        adding: Adding,
        place: int,
        part: Part,
        update: RowUpdate,
        counts: NDArray[np.int64],
    ) -> RowUpdate:
        """The sum of one part with noise on all its rows, or on those that are kept."""
        privacy, prg = self.privacy, derived(b"noise", adding.place, place)
        sd = privacy.noise * privacy.clip
        if privacy.kind == "thresholded" and part.product.factors:
            fest, size = self._fest(adding.layout, adding.keys_per_client), part.space.num_keys
            kept = threshold_rows(fest, size, update.keys, counts, update.rows, privacy.clip, prg)
            return RowUpdate(kept.keys, kept.rows)
        if privacy.kind == "thresholded":
            sd = AdaFest.split(privacy.noise)[1] * privacy.clip
        keys: KeyArray = np.arange(part.space.num_keys)
        dense = np.zeros((len(keys), part.slice_size), np.float32)
        dense[update.keys] = update.rows
        if privacy.kind == "correlated":
            secret = derived(b"correlated", (*adding.place[:2], 0), place).bytes(16)
            strategy = privacy.strategy(self.cohorts)
            return RowUpdate(
                keys, add_correlated_noise(dense, strategy, adding.place[2], sd, secret)
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
