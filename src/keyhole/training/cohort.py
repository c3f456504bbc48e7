"""Cohorts: who takes part in a round, and who is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf
from typing import Literal

import numpy as np

from keyhole.errors import InputError
from keyhole.training.randomness import Place, generator

__all__ = ["Cohorts", "check_count", "sample_cohort", "sample_dropouts"]


@dataclass(frozen=True)
class Cohorts:
    """How cohorts are sampled and what befalls them.

    Args:
        population: how many clients there are.
        size: N, how many updates a round waits for.
        sampling: "fixed" draws without replacement; "poisson" takes each client with probability
            asked / population, so a cohort's size varies; "cyclic" goes through the population in
            one random order, so that every client rests as long as it can.
        over_selection: how many times more clients are asked than are waited for; the round closes
            with the first `size` that answer.
        least: with fewer updates when it closes, a round makes no step; 0 takes what has come.
        lost_before: probability that a client drops out before its slices arrive.
        lost_after: probability that it drops out after, before its update is sent.

    Raises:
        InputError: a number is out of range, or a cohort is larger than the population.
    """

    population: int
    size: int
    sampling: Literal["fixed", "poisson", "cyclic"] = "fixed"
    over_selection: float = 1.0
    least: int = 0
    lost_before: float = 0.0
    lost_after: float = 0.0

    def __post_init__(self) -> None:
        check_count("population", self.population, 1)
        check_count("size", self.size, 0)
        check_count("least", self.least, 0)
        if not 1 <= self.over_selection < inf:
            raise InputError(
                "over_selection asks fewer clients than the round waits for",
                got=self.over_selection,
                allowed="1 or more",
                fix="1.3 asks 30 % more",
            )
        if not 1 <= self.asked <= self.population:
            raise InputError(
                "cohort does not fit the population",
                got=f"{self.asked} clients asked",
                allowed=f"1..{self.population}",
                fix="choose a smaller cohort or over-selection",
            )
        if self.sampling not in ("fixed", "poisson", "cyclic"):
            raise InputError(
                "no such way to sample a cohort",
                got=self.sampling,
                allowed="fixed, poisson or cyclic",
                fix="choose one of them",
            )
        if self.least > self.size:
            raise InputError(
                "a round can never have the least number of updates",
                got=self.least,
                allowed=f"0..{self.size}, as it closes with {self.size}",
                fix="ask for fewer",
            )
        for name in ("lost_before", "lost_after"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is not a probability",
                    got=getattr(self, name),
                    allowed="0..1",
                    fix="give the share of clients that drop out there",
                )

    @property
    def asked(self) -> int:
        """How many clients a round asks, on average if sampling is Poisson."""
        return ceil(self.size * self.over_selection - 1e-9)

    @property
    def separation(self) -> int:
        """Rounds from one part of a client to its next, where sampling is cyclic."""
        return self.population // self.asked


def check_count(name: str, value: object, least: int) -> None:
    """Raises InputError unless `value` is a whole number of at least `least`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise InputError(
            f"{name} is out of range",
            got=value,
            allowed=f"a whole number from {least}",
            fix="choose another",
        )


def sample_cohort(cohorts: Cohorts, seed: int, trial: int, t: int) -> tuple[int, ...]:
    """Returns the clients asked in round t; a function of (seed, trial, t) alone.

    >>> sorted(sample_cohort(Cohorts(population=5, size=5), seed=0, trial=0, t=0))
    [0, 1, 2, 3, 4]
    """
    count = cohorts.asked
    if cohorts.sampling == "cyclic":
        order = generator(seed, trial, Place.COHORT).permutation(cohorts.population)
        start = t % cohorts.separation * count
        return tuple(order[start : start + count].tolist())
    rng = generator(seed, trial, Place.COHORT, t)
    if cohorts.sampling == "poisson":
        count = int(rng.binomial(cohorts.population, count / cohorts.population))
    return tuple(rng.choice(cohorts.population, size=count, replace=False).tolist())


def sample_dropouts(
    clients: Sequence[int], probability: float, seed: int, trial: int, stage: Place, t: int
) -> list[int]:
    """Returns those of `clients` that drop out at a stage of round t.

    Each client's fate is its own: it does not depend on who else was asked.
    """
    if probability == 0:
        return []
    return [c for c in clients if generator(seed, trial, stage, t, c).random() < probability]
