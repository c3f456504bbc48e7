"""Computes mean and deviation over trials, and words numbers as readers see them.

The deviation is the sample standard deviation (divided by n - 1): five trials are a sample of the
trials one could make. The paper says "standard deviation" and not which; with five trials the other
one would be 11 % smaller. One trial has no deviation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """A number over trials.

    Args:
        mean: over the trials.
        deviation: sample standard deviation; None for one trial.
        trials: how many were averaged, 1 or more.
    """

    mean: float
    deviation: float | None
    trials: int


@dataclass(frozen=True)
class Curve:
    """A number over rounds and trials.

    Args:
        rounds: how many rounds were done, ascending.
        spreads: the number after each of them; every one is over the same trials.
    """

    rounds: tuple[int, ...] = ()
    spreads: tuple[Spread, ...] = ()

    @property
    def mean(self) -> tuple[float, ...]:
        """The means, one for each of `rounds`."""
        return tuple(spread.mean for spread in self.spreads)

    @property
    def deviation(self) -> tuple[float, ...]:
        """The deviations, one for each of `rounds`; zero where there is one trial."""
        return tuple(spread.deviation or 0.0 for spread in self.spreads)


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


def mean_curve(trials: Sequence[Mapping[int, float]]) -> Curve:
    """Returns the curve over the rounds that every trial has a value for.

    Args:
        trials: rounds done -> value, for each trial.

    >>> mean_curve([{1: 0.0, 2: 0.2}, {1: 1.0}])
    Curve(rounds=(1,), spreads=(Spread(mean=0.5, deviation=0.7071067811865476, trials=2),))
    """
    if not trials:
        return Curve()
    common = set(trials[0]).intersection(*trials[1:])
    rounds = tuple(sorted(common))
    spreads = (spread_of([trial[done] for trial in trials]) for done in rounds)
    return Curve(rounds, tuple(spread for spread in spreads if spread is not None))


NOTHING = "-"
"""Stands where there is no number."""

_SHARES = ("accuracy", "recall", "precision")


def is_share(metric: str) -> bool:
    """Whether a metric lies in 0..1 and is written in percent.

    >>> is_share("recall_at_5"), is_share("loss")
    (True, False)
    """
    return any(word in metric for word in _SHARES)


def metric_name(metric: str) -> str:
    """Returns a metric's name in words.

    >>> metric_name("recall_at_5"), metric_name("accuracy_without_oov")
    ('recall@5', 'accuracy without oov')
    """
    return metric.replace("_at_", "@").replace("_", " ")


def write_number(value: float) -> str:
    """Returns a setting as one would write it.

    >>> write_number(10000.0), write_number(0.001), write_number(2.5)
    ('10,000', '0.001', '2.5')
    """
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def write_share(value: float) -> str:
    """Returns a relative size, with the paper's two decimals unless they would hide the size.

    >>> write_share(0.5098), write_share(0.0010), write_share(1.0)
    ('0.51', '0.0010', '1.00')
    """
    if 0 < value < 0.05:
        return f"{value:.4f}" if value >= 0.0005 else f"{value:.1e}"
    return f"{value:.2f}"


def write_spread(spread: Spread | None, metric: str) -> str:
    """Returns mean ± deviation, in percent with the paper's two decimals where it is a share.

    >>> write_spread(Spread(0.7502, 0.0092, 5), "accuracy")
    '75.02 ± 0.92'
    >>> write_spread(Spread(1.25, None, 1), "loss")
    '1.250'
    """
    if spread is None:
        return NOTHING
    if not math.isfinite(spread.mean):
        return "not finite"
    scale, digits = (100, 2) if is_share(metric) else (1, 3)
    mean = f"{spread.mean * scale:.{digits}f}"
    if spread.deviation is None:
        return mean
    return f"{mean} ± {spread.deviation * scale:.{digits}f}"
