"""Differential privacy of a run: what it promises about one client.

The unit is one client with all its data. The guarantee is about the models that a run releases, for
whoever sees all of them; what servers see on the way is what secure sums are for. `private_sum.py`
keeps the promise, `account.py` says what has been spent of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias, get_args

from keyhole.errors import InputError
from keyhole.private.dp.correlated import Strategy
from keyhole.training.cohort import Cohorts

__all__ = ["NoiseKind", "Privacy"]

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
