"""Audits a mechanism by canaries: does it keep what its epsilon promises?

A mechanism runs many times with and without one client, the canary, whose update points in one
direction. Somebody who knows that direction guesses from the release which of the two it was. If
the mechanism is (epsilon, delta)-private, the rates of wrong guesses a and b of any such guess obey

    1 - b <= e^epsilon a + delta,    1 - a <= e^epsilon b + delta,

so that guesses that are too good prove a larger epsilon. An audit finds mistakes, such as noise
that is too small; it never proves privacy.

Reference: Jagielski, Ullman, Oprea, "Auditing Differentially Private Machine Learning", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf, log

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.errors import InputError

_MIN_RUNS = 20


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Args:
        epsilon: a lower bound: the mechanism's is no smaller, with the confidence asked for; 0 if
            nothing was found.
        missed: runs with the canary in which it was not seen.
        false_alarms: runs without it in which it was.
        runs: of each kind, on which the guess was judged.
    """

    epsilon: float
    missed: int
    false_alarms: int
    runs: int


def audit(
    mechanism: Callable[[Sequence[Array], Prg], Array],
    updates: Sequence[Array],
    canary: Array,
    delta: float,
    prg: Prg,
    runs: int = 1000,
    confidence: float = 0.95,
) -> Audit:
    """Runs a mechanism with and without a canary and bounds its epsilon from below.

    Args:
        mechanism: from the updates of clients, and a source of noise, to what is released.
        canary: update of the one in question, as large as the clipping norm allows.
        prg: every run gets a stream of its own from it.
        runs: with and without the canary, each.
    """
    flat = np.asarray(canary, np.float64).reshape(-1)

    def score(world: Sequence[Array]) -> float:
        return float(flat @ np.asarray(mechanism(world, Prg(prg.bytes(SEED_BYTES)))).reshape(-1))

    present = np.array([score([*updates, canary]) for _ in range(runs)])
    absent = np.array([score(list(updates)) for _ in range(runs)])
    return epsilon_from_scores(present, absent, delta, confidence)


def epsilon_from_scores(
    present: NDArray[np.float64],
    absent: NDArray[np.float64],
    delta: float,
    confidence: float = 0.95,
) -> Audit:
    """Bounds epsilon from below by scores that are larger if the canary is there.

    The first half of the scores chooses from where on the canary counts as seen, and which of the
    two inequalities is used; the second half is judged. Had both used the same scores, the bound
    would be too large.
    """
    runs = len(present)
    if runs < _MIN_RUNS or len(absent) != runs or not (0 <= delta < 1 and 0 < confidence < 1):
        raise InputError(
            f"an audit that can show nothing: got {runs} and {len(absent)} runs, delta {delta}, "
            f"confidence {confidence}; expected {_MIN_RUNS} runs or more of each kind, delta and "
            "confidence below 1; let it run a thousand times"
        )
    half = runs // 2
    # Each of the two rates is bounded with half of the error that is allowed.
    error = (1 - confidence) / 2
    threshold, is_of_alarms = _best_guess(present[:half], absent[:half], delta, error)
    missed = int(np.count_nonzero(present[half:] < threshold))
    alarms = int(np.count_nonzero(absent[half:] >= threshold))
    bounds = _bounds(missed, alarms, runs - half, delta, error)
    return Audit(max(0.0, bounds[0 if is_of_alarms else 1]), missed, alarms, runs - half)


@lru_cache(maxsize=1 << 12)  # a pure function of numbers; thresholds that lie close ask it again
def upper_rate(hits: int, runs: int, error: float) -> float:
    """Returns the largest rate that would give so few hits with probability `error` (Clopper,
    Pearson).

    >>> round(upper_rate(0, 100, 0.05), 4)  # 1 - 0.05^(1/100)
    0.0295
    """
    if hits >= runs:
        return 1.0
    k = np.arange(hits + 1)
    factorials = np.cumsum(np.log(np.arange(1, runs + 1)))
    factorials = np.append(0.0, factorials)  # logarithms of 0! to runs!
    ways = factorials[runs] - factorials[k] - factorials[runs - k]
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        logs = ways + k * log(rate) + (runs - k) * np.log1p(-rate)
        low, high = (rate, high) if np.exp(logs).sum() > error else (low, rate)
    return high


def _best_guess(
    present: NDArray[np.float64], absent: NDArray[np.float64], delta: float, error: float
) -> tuple[float, bool]:
    """The threshold, and the inequality, with the largest bound on these scores."""
    best, found = -inf, (inf, True)
    both = np.concatenate([present, absent])
    for threshold in np.unique(np.quantile(both, np.linspace(0.01, 0.99, 51))):
        missed = int(np.count_nonzero(present < threshold))
        alarms = int(np.count_nonzero(absent >= threshold))
        for at, bound in enumerate(_bounds(missed, alarms, len(present), delta, error)):
            if bound > best:
                best, found = bound, (float(threshold), at == 0)
    return found


def _bounds(missed: int, alarms: int, runs: int, delta: float, error: float) -> tuple[float, float]:
    """Epsilon by either inequality; -infinity if it says nothing."""
    a, b = upper_rate(alarms, runs, error), upper_rate(missed, runs, error)
    return (
        log((1 - delta - b) / a) if 1 - delta - b > 0 else -inf,
        log((1 - delta - a) / b) if 1 - delta - a > 0 else -inf,
    )
