"""Finds the noise that a budget needs."""

from __future__ import annotations

from functools import lru_cache

from keyhole.aggregation.privacy.accountant import (
    Mechanism,
    Method,
    Neighbours,
    Sampling,
    epsilon_of,
)
from keyhole.errors import InputError

_MAX_NOISE = 2.0**20
_TOLERANCE = 1e-3  # of the multiplier: a thousandth more noise than needed is not seen


@lru_cache(maxsize=256)  # a pure function of numbers that takes seconds
def noise_for(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    sampling: Sampling,
    population: int,
    cohort: int,
    neighbours: Neighbours,
    method: Method | None = None,
) -> float:
    """The smallest noise multiplier whose `rounds` rounds stay within (epsilon, delta).

    Found by halving, to a thousandth from above. With privacy loss distributions that takes some
    seconds; the answer is kept.

    Args:
        epsilon: above 0.
        delta: below one over the population.
        rounds: 1 or more.
        sampling: how cohorts come about; see `Mechanism` for this and what follows.
        population: clients.
        cohort: planned size of a cohort.
        neighbours: the relation.
        method: None takes that of `Mechanism`.

    Raises:
        InputError: numbers out of range, or no noise below 2^20 is enough.

    >>> run = {"sampling": "poisson", "population": 10**6, "cohort": 10**4, "method": "rdp"}
    >>> round(noise_for(2.0, 1e-8, 1000, neighbours="add-or-remove", **run), 2)
    1.23
    """
    if not epsilon > 0 or rounds < 1:
        raise _impossible(epsilon, rounds)

    def is_enough(noise: float) -> bool:
        planned = rounds if sampling == "separated" else 0
        mechanism = Mechanism(
            sampling, population, cohort, noise, neighbours, method or "", planned
        )
        return epsilon_of(mechanism, rounds, delta) <= epsilon

    high = 1.0
    while not is_enough(high):
        high *= 2
        if high > _MAX_NOISE:
            raise _impossible(epsilon, rounds)
    low = high / 2
    while is_enough(low):
        low, high = low / 2, low
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _impossible(epsilon: float, rounds: int) -> InputError:
    return InputError(
        "a budget that no noise keeps to",
        got=f"epsilon {epsilon} for {rounds} rounds",
        allowed="an epsilon above 0 for one round or more",
        fix="raise epsilon or delta",
    )
