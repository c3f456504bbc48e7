"""Computes what a paper prints of repeated trials: means, 95 % intervals, paired differences.

Trials of an arm are a sample of the trials one could make. Their deviation is the sample standard
deviation (divided by n - 1); the interval of their mean is Student's, with n - 1 degrees of
freedom. Two arms that share a seed meet the same clients in a trial of the same number, so that
their difference is taken trial by trial: what a trial's clients do to both arms cancels out.

One trial has no deviation and no interval.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

LEVEL = 0.95
"""The confidence level of every interval that the library prints or draws."""


@dataclass(frozen=True)
class Spread:
    """A number over trials.

    Args:
        deviation: sample standard deviation; None for one trial.
    """

    mean: float
    deviation: float | None
    trials: int

    @property
    def half_width(self) -> float | None:
        """Half the 95 % interval of the mean; None for one trial.

        >>> round(Spread(0.0, 1.0, 5).half_width, 4)  # 2.7764 / sqrt(5)
        1.2417
        """
        if self.deviation is None:
            return None
        return t_quantile(LEVEL, self.trials - 1) * self.deviation / math.sqrt(self.trials)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Both ends of the 95 % interval of the mean; None for one trial."""
        half = self.half_width
        return None if half is None else (self.mean - half, self.mean + half)

    def over(self, number: float) -> Spread:
        """Returns the spread of the values over a number.

        >>> Spread(1.0, 0.5, 3).over(2.0)
        Spread(mean=0.5, deviation=0.25, trials=3)
        """
        deviation = None if self.deviation is None else self.deviation / number
        return Spread(self.mean / number, deviation, self.trials)


def spread_of(values: Sequence[float]) -> Spread | None:
    """Returns mean and sample standard deviation, or None of no values.

    A value that is not finite makes both so: a trial that diverged is never left out.

    >>> spread_of([1.0, 2.0, 3.0])
    Spread(mean=2.0, deviation=1.0, trials=3)
    >>> spread_of([0.5])
    Spread(mean=0.5, deviation=None, trials=1)
    """
    if not values:
        return None
    if not all(math.isfinite(value) for value in values):
        return Spread(math.nan, math.nan if len(values) > 1 else None, len(values))
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def spreads_of(trials: Sequence[Mapping[str, float]]) -> dict[str, Spread]:
    """Returns the spread of each number that the first of some trials has.

    >>> spreads_of([{"auc": 1.0}, {"auc": 3.0}])["auc"].mean
    2.0
    """
    names = trials[0] if trials else {}
    found = {name: spread_of([trial[name] for trial in trials]) for name in names}
    return {name: spread for name, spread in found.items() if spread is not None}


@dataclass(frozen=True)
class Difference:
    """What one arm has more than another, over trials that both have.

    Args:
        spread: of the differences, trial by trial.
        p_value: of Student's paired test, two-sided: how often a difference as large or larger
            would come about if the arms were equal; None for one trial.
    """

    spread: Spread
    p_value: float | None


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference | None:
    """Returns the mean of `second - first`, with its interval and p-value; None of no trials.

    Args:
        first: one value for each trial.
        second: the other arm's values, in the same order of trials.

    >>> found = paired_difference([1.0, 2.0, 3.0], [2.0, 4.0, 4.5])
    >>> found.spread.mean, round(found.p_value, 4)
    (1.5, 0.0351)
    """
    spread = spread_of([b - a for a, b in zip(first, second, strict=True)])
    if spread is None:
        return None
    if spread.deviation is None or math.isnan(spread.mean):
        return Difference(spread, None)
    if spread.deviation == 0:
        return Difference(spread, 1.0 if spread.mean == 0 else 0.0)
    t = spread.mean / (spread.deviation / math.sqrt(spread.trials))
    return Difference(spread, max(0.0, 1 - t_within(abs(t), spread.trials - 1)))


@dataclass(frozen=True)
class ArmTrials:
    """What the finished trials of an arm have reached.

    Args:
        met: what decides which clients a trial of a number meets: the seed and the data.
        metrics: number of a trial -> metric -> value on the test split.
    """

    met: Any
    metrics: Mapping[int, Mapping[str, float]]


def differences(first: ArmTrials, second: ArmTrials) -> dict[str, Difference]:
    """Returns metric -> what the second arm has more than the first, over the trials that both have
    finished; nothing where these met other clients.

    >>> told = {0: {"auc": 0.5}, 1: {"auc": 0.75}}
    >>> differences(ArmTrials("a", told), ArmTrials("a", told))["auc"].spread
    Spread(mean=0.0, deviation=0.0, trials=2)
    >>> differences(ArmTrials("a", told), ArmTrials("b", told))
    {}
    """
    both = sorted(first.metrics.keys() & second.metrics)
    if not both or first.met != second.met:
        return {}
    told = [arm.metrics[number] for arm in (first, second) for number in both]
    shared = [name for name in told[0] if all(name in each for each in told)]
    found = {
        name: paired_difference(*([arm.metrics[n][name] for n in both] for arm in (first, second)))
        for name in shared
    }
    return {name: difference for name, difference in found.items() if difference is not None}


NUMBERS = (
    *("mean", "low", "high", "deviation", "trials"),
    *("difference", "difference_low", "difference_high", "p_value", "pairs"),
)
"""The names of what `numbers_of` returns."""


def numbers_of(spread: Spread | None, difference: Difference | None) -> dict[str, float | None]:
    """Returns a spread and a difference as plain numbers by the names of `NUMBERS`, for a file;
    None where there is none."""
    more = difference.spread if difference else None
    values = (
        *(_ends(spread)),
        *((spread.deviation, spread.trials) if spread else (None, None)),
        *(_ends(more)),
        *((difference.p_value, difference.spread.trials) if difference else (None, None)),
    )
    return dict(zip(NUMBERS, values, strict=True))


def _ends(spread: Spread | None) -> tuple[float | None, float | None, float | None]:
    """Mean, and both ends of its interval."""
    if spread is None:
        return None, None, None
    return spread.mean, *(spread.interval or (None, None))


def t_within(t: float, degrees: int) -> float:
    """Returns the probability that Student's t lies in -t..t.

    Args:
        t: 0 or more.
        degrees: of freedom, 1 or more; a whole number, for which the sum is finite.

    Abramowitz and Stegun, Handbook of Mathematical Functions (1964), 26.7.3 and 26.7.4.

    >>> round(t_within(12.7062, 1), 6), round(t_within(2.776445, 4), 6)
    (0.95, 0.95)
    """
    angle, is_odd = math.atan(t / math.sqrt(degrees)), degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(1 + is_odd, degrees - 2, 2):
        term *= k / (k + 1) * math.cos(angle) ** 2
        total += term
    within = math.sin(angle) * total
    return (angle + within) * 2 / math.pi if is_odd else within


@cache
def t_quantile(level: float, degrees: int) -> float:
    """Returns the t for which Student's lies in -t..t with that probability, by bisection.

    >>> round(t_quantile(0.95, 4), 4)
    2.7764
    """
    low, high = 0.0, 1.0
    while t_within(high, degrees) < level:
        low, high = high, 2 * high
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if t_within(middle, degrees) < level else (low, middle)
    return high
