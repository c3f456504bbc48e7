"""Differential privacy of a run: clipped updates, noise on their sum, and an account of both.

The unit is one client with all its data. The guarantee is about the models that a run releases, for
whoever sees all of them; what servers see on the way is what secure sums are for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.delivery.assembly import most_keys_of
from keyhole.errors import InputError
from keyhole.primitives.aggregate import divide
from keyhole.primitives.parts import Part
from keyhole.private.dp.accounting import Accountant
from keyhole.private.dp.adafest import AdaFest, threshold_rows
from keyhole.private.dp.clipping import norm, norm_before_rounding
from keyhole.private.dp.correlated import Strategy, add_correlated_noise
from keyhole.private.dp.gaussian import add_noise, noise_room
from keyhole.private.dp.loss import Mechanism
from keyhole.server.updates import RowUpdate, no_update
from keyhole.training.aggregation.contract import Adding, Aggregation, Contribution, Summed
from keyhole.training.aggregation.parts import rows_of
from keyhole.training.aggregation.rounding import derived
from keyhole.training.aggregation.secure import SecureSum
from keyhole.training.aggregation.two_servers import TwoServers
from keyhole.training.aggregation.union import UnionSum
from keyhole.training.cohort import Cohorts
from keyhole.types import KeyArray

__all__ = ["NoiseKind", "Privacy", "PrivateSum"]

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

    def __post_init__(self) -> None:
        if not (self.clip > 0 and 0 <= self.noise < inf) or (self.noise and self.clip == inf):
            raise InputError(
                "privacy that cannot be",
                got=f"clip {self.clip}, noise {self.noise}",
                allowed="a clip above 0, finite where there is noise; noise of 0 or more",
                fix="take the median norm of an update as clip, and noise from `noise_for`",
            )

    def accountant(self, cohorts: Cohorts, arrived: Sequence[int] = ()) -> Accountant:
        """The account of a run; the relation follows from the sampler.

        Args:
            cohorts: how they were drawn.
            arrived: of each round that ran, how many updates were in its sum.
        """
        accountant = Accountant(self._mechanism(cohorts), self.delta, self.budget)
        made_for = accountant.mechanism
        for count in arrived:
            accountant.record(
                made_for.sampling,
                cohort=cohorts.asked,
                arrived=count,
                noise_multiplier=self.noise,
            )
        return accountant

    def check(self, cohorts: Cohorts, t: int) -> None:
        """Raises BudgetError if round t would spend more than there is."""
        self.accountant(cohorts, [0] * t).check()

    def describe(self, cohorts: Cohorts, t: int, arrived: int) -> dict[str, Any]:
        """What the run has spent after round t, in whose sum so many updates are."""
        return asdict(self.accountant(cohorts, [*[0] * t, arrived]).spent())

    def strategy(self, cohorts: Cohorts) -> Strategy:
        """Of correlated noise."""
        return Strategy(self.rounds, min(self.rounds, cohorts.separation))

    def _mechanism(self, cohorts: Cohorts) -> Mechanism:
        if (self.kind == "correlated") != (cohorts.sampling == "cyclic"):
            raise InputError(
                "noise and sampling that do not belong together",
                got=f"{self.kind} noise with {cohorts.sampling} cohorts",
                allowed="correlated noise with cyclic cohorts, other noise with fixed or poisson",
                fix="change one of them: an account of another sampler would be wrong",
            )
        drawn = cohorts.population, cohorts.asked, self.noise
        if cohorts.sampling == "cyclic":
            return Mechanism("separated", *drawn, "add-or-remove", planned_rounds=self.rounds)
        if cohorts.sampling == "poisson":
            return Mechanism("poisson", *drawn, "add-or-remove")
        return Mechanism("fixed", *drawn, "replace-one")


@dataclass(frozen=True)
class PrivateSum:
    """An aggregation of clipped updates, with noise on the sum.

    A sum is divided by the planned cohort, whoever arrived: what it is divided by must not depend
    on one client.

    Args:
        inner: adds up.
        privacy: how much noise.
        cohorts: of the run.
    """

    inner: Aggregation
    privacy: Privacy
    cohorts: Cohorts

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        if adding.over != "cohort":
            raise InputError(
                "a mean whose divisor tells who took part",
                got=f"sums over {adding.over}",
                allowed="cohort",
                fix="divide by the cohort where privacy is promised",
            )
        is_thresholded = self.privacy.kind == "thresholded"
        contributions = [self._clipped(adding, one) for one in adding.contributions]
        inner = replace(
            adding, contributions=contributions, over="nothing", with_counts=is_thresholded
        )
        summed = self._ready_inner()(inner)
        if summed.rows is None and not adding.sent:  # that nobody came must not show either
            summed = replace(summed, rows=tuple(map(no_update, adding.layout.parts)), error=None)
        if summed.rows is None:
            return summed
        noisy = self._with_noise(adding, summed)
        size = self.cohorts.size
        return replace(
            summed, rows=tuple(RowUpdate(u.keys, divide(u.rows, size)) for u in noisy), counts=None
        )

    def _clipped(self, adding: Adding, one: Contribution) -> Contribution:
        if one.update is None:
            return one
        most = self._most(adding, one)

        def length(update: Any) -> float:
            rows = rows_of(adding.layout, replace(one, update=update))
            return norm({str(i): own for i, (_, own) in enumerate(rows)})

        update, found, factor = one.update, length(one.update), 1.0
        while found > most:  # rounding may lengthen it again: a little shorter then
            factor *= most / found * (1 - 2.0**-20)
            update = tree.map_leaves(lambda leaf, by=factor: leaf * np.float32(by), one.update)
            found = length(update)
        return replace(one, update=update)

    def _most(self, adding: Adding, one: Contribution) -> float:
        """C, less what rounding to a ring can add."""
        ready = self._ready_inner()
        if not isinstance(ready, SecureSum | TwoServers | UnionSum) or self.privacy.clip == inf:
            return self.privacy.clip
        counts = {name: len(z) for name, z in one.keys.items()}
        entries = adding.layout.client_size(**counts)
        step = ready.rounding.fixed_point(adding).rounding
        return norm_before_rounding(self.privacy.clip, step, entries)

    def _ready_inner(self) -> Aggregation:
        """The aggregation with a ring that holds clipped updates; of two servers, also the noise
        that they add to their shares themselves. Others have it added to the sum."""
        inner, privacy = self.inner, self.privacy
        if not isinstance(inner, SecureSum | TwoServers | UnionSum) or privacy.clip == inf:
            return inner
        rounding = replace(inner.rounding, clip=privacy.clip)
        if not isinstance(inner, TwoServers) or privacy.kind != "all-rows":
            return replace(inner, rounding=rounding)
        rounding = replace(rounding, room=noise_room(privacy.noise, parties=2))
        return replace(inner, rounding=rounding, noise=privacy.noise * privacy.clip)

    def _with_noise(self, adding: Adding, summed: Summed) -> Sequence[RowUpdate]:
        assert summed.rows is not None
        has_noise = isinstance(self.inner, TwoServers) and self.privacy.kind == "all-rows"
        if not self.privacy.noise or (has_noise and adding.sent):
            return summed.rows
        counts = summed.counts or tuple(np.empty(0, np.int64) for _ in summed.rows)
        most = most_keys_of(adding.layout, adding.keys_per_client)
        touched = sum(
            m for part, m in zip(adding.layout.parts, most, strict=True) if part.product.factors
        )
        return [
            self._noisy_part(adding, place, part, update, counts[place], touched)
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
        touched: int,
    ) -> RowUpdate:
        """The sum of one part with noise on all its rows, or on those that are kept."""
        privacy, prg = self.privacy, derived(b"noise", adding.place, place)
        sd = privacy.noise * privacy.clip
        if privacy.kind == "thresholded" and part.product.factors:
            counted, rows = AdaFest.split(privacy.noise)
            fest = AdaFest(self.cohorts.size, max(1, touched), counted, rows, privacy.threshold)
            kept = threshold_rows(
                fest, part.space.num_keys, update.keys, counts, update.rows, privacy.clip, prg
            )
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
