"""Adds noise to a noisily chosen set of rows (DP-AdaFEST): a release stays sparse, and private.

Noise on all rows makes every released row differ from zero. Here every key's number of clients gets
noise first; keys whose noisy count reaches a threshold are kept, and only their rows get noise and
are released. Rows of rare keys are lost. Keys that nobody asked for are kept too, each with the
probability that noise alone reaches the threshold: without them, being kept would betray a client.

A client changes up to m counts by one, so that counts have an L2 sensitivity of sqrt(m) and need
noise of s1 sqrt(m). With m = 1000 that is 32 s1 clients: it can work for cohorts of thousands and
not for 50.

The kept keys and their noisy rows are private for everyone who sees nothing else. Counts and rows
before the noise are not: they belong inside the secure sum, on one server that is trusted with
them, or in an enclave.

Reference: Ghazi et al., "Sparsity-Preserving Differentially Private Training of Large Embedding
Models", 2023, Algorithm 1; there the unit is an example, here a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, inf, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.privacy.gaussian import add_noise, add_ring_noise, normal
from keyhole.arrays import Array, KeyArray
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ShapeError

_MIN_DEVIATIONS = 3  # of noise that a key of the whole cohort must stand above zero


@dataclass(frozen=True)
class AdaFest:
    """How counts and rows are made private.

    Args:
        cohort: N, planned.
        max_keys: m: distinct keys of one client, at the most. The server must refuse more; the
            guarantee rests on it.
        count_multiplier: s1: noise on counts over sqrt(m).
        row_multiplier: s2: noise on rows over the clipping norm.
        threshold: tau, in clients; -infinity keeps all keys and never looks at the counts.

    Raises:
        InputError: multipliers below zero, or a cohort so small that no key can stand out of the
            noise on its count.

    >>> AdaFest(cohort=50, max_keys=1000, count_multiplier=2.2, row_multiplier=0.55, threshold=5)
    Traceback (most recent call last):
    ...
    keyhole.errors.InputError: a cohort too small for thresholded rows: got 50 clients against \
noise of 69.6 on every count; expected more than 209 clients, three standard deviations; ...
    """

    cohort: int
    max_keys: int
    count_multiplier: float
    row_multiplier: float
    threshold: float

    def __post_init__(self) -> None:
        if not (0 <= self.count_multiplier < inf and 0 <= self.row_multiplier < inf):
            raise InputError(
                "noise multipliers are out of range",
                got=f"multipliers {self.count_multiplier} and {self.row_multiplier}",
                allowed="0 or more, and finite",
                fix="take them from AdaFest.split",
            )
        if self.max_keys < 1 or self.threshold != self.threshold:
            raise InputError(
                "the threshold or the number of keys is invalid",
                got=f"{self.max_keys} keys of a client, threshold {self.threshold}",
                allowed="1 key or more, and a threshold that is a number",
                fix="pass the most keys that a client may ask for",
            )
        minimum = _MIN_DEVIATIONS * self.count_sd
        if self.threshold > -inf and self.count_sd > 0 and self.cohort <= minimum:
            raise InputError(
                "a cohort too small for thresholded rows",
                got=f"{self.cohort} clients against noise of {self.count_sd:.1f} on every count",
                allowed=f"more than {minimum:.0f} clients, three standard deviations",
                fix="put noise on all rows, take larger cohorts, or let clients ask for fewer keys",
            )

    @staticmethod
    def split(noise_multiplier: float, ratio: float = 4.0) -> tuple[float, float]:
        """Multipliers for counts and rows that together cost what one of `noise_multiplier` does.

            1 / z^2 = 1 / s1^2 + 1 / s2^2,    s1 = ratio s2

        >>> AdaFest.split(1.0)  # 3.1 % more noise on rows than without counts
        (4.12310..., 1.03077...)
        """
        rows = noise_multiplier * sqrt(1 + ratio**-2)
        return ratio * rows, rows

    @property
    def count_sd(self) -> float:
        """Standard deviation of the noise on a count, in clients."""
        return self.count_multiplier * sqrt(self.max_keys)

    @property
    def noise_multiplier(self) -> float:
        """The one Gaussian that costs as much as both: what the accountant is told."""
        if self.threshold == -inf:
            return self.row_multiplier
        if not self.count_multiplier or not self.row_multiplier:
            return 0.0
        return 1 / sqrt(self.count_multiplier**-2 + self.row_multiplier**-2)

    @property
    def false_share(self) -> float:
        """The probability that a key that nobody asked for is kept."""
        if self.threshold == -inf or not self.count_sd:
            return float(self.threshold <= 0)
        return 0.5 * erfc(self.threshold / self.count_sd / sqrt(2))


@dataclass(frozen=True)
class Thresholded:
    """What may be released. It does not say which of the keys nobody asked for.

    Args:
        keys: (n,) ascending.
        rows: (n, width), noisy sums.
    """

    keys: KeyArray
    rows: Array


def threshold_rows(
    settings: AdaFest,
    num_keys: int,
    keys: KeyArray,
    counts: NDArray[np.int64],
    rows: Array,
    clip: float,
    prg: Prg,
) -> Thresholded:
    """Chooses keys by noisy counts and adds noise to their sums.

    Args:
        settings: noise and threshold.
        num_keys: K.
        keys: (n,) ascending and distinct: those that somebody asked for.
        counts: (n,) clients that asked for each.
        rows: (n, width) their sums: floats, or elements of a ring.
        clip: C in the units of the rows (in a ring, times its scale): no client's whole update is
            longer, nor has it more than `max_keys` keys.
        prg: where all noise comes from.

    Returns:
        Kept keys and noisy rows; zero plus noise for those that nobody asked for.

    Raises:
        ShapeError: keys that are not ascending or beyond K, or other numbers of counts and rows.
    """
    kept = keep_keys(settings, num_keys, keys, counts, prg)
    if len(rows) != len(keys):
        raise _unfit(len(keys), len(counts), len(rows), num_keys)
    chosen = np.zeros((len(kept), *rows.shape[1:]), rows.dtype)
    places = np.searchsorted(kept, keys)
    is_kept = np.zeros(len(keys), np.bool_)
    inside = places < len(kept)
    is_kept[inside] = kept[places[inside]] == keys[inside]
    chosen[places[is_kept]] = rows[is_kept]
    add = add_noise if rows.dtype.kind == "f" else add_ring_noise
    return Thresholded(kept, add(chosen, settings.row_multiplier * clip, prg, out=chosen))


def keep_keys(
    settings: AdaFest, num_keys: int, keys: KeyArray, counts: NDArray[np.int64], prg: Prg
) -> KeyArray:
    """The keys whose noisy count reaches the threshold, ascending.

    Of keys that nobody asked for, those that are kept are drawn directly, each with `false_share`:
    the same as noise on a zero for each of them, in time that does not grow with K.

    Raises:
        ShapeError: see `threshold_rows`.
    """
    is_ascending = len(keys) < 2 or bool((np.diff(keys) > 0).all())
    is_inside = not len(keys) or (keys[0] >= 0 and keys[-1] < num_keys)
    if len(keys) != len(counts) or not (is_ascending and is_inside):
        raise _unfit(len(keys), len(counts), None, num_keys)
    if settings.threshold == -inf:
        return np.arange(num_keys, dtype=np.int64)
    noisy = counts + settings.count_sd * normal(prg, len(counts))
    found = keys[noisy >= settings.threshold]
    ranks = _draw_positions(num_keys - len(keys), settings.false_share, prg)
    # The rank-th key that is not among `keys`: all those of them go before it that leave no more
    # than `rank` others below them.
    absent = ranks + np.searchsorted(keys - np.arange(len(keys)), ranks, side="right")
    return np.sort(np.concatenate([found, absent])).astype(np.int64, copy=False)


def _draw_positions(count: int, share: float, prg: Prg) -> KeyArray:
    """Each of 0..count-1 with probability `share`, ascending: by the gaps between them, which are
    geometric, floor(ln u / ln(1 - share))."""
    if share <= 0 or count <= 0:
        return np.empty(0, np.int64)
    if share >= 1:
        return np.arange(count, dtype=np.int64)
    found, last = [], -1.0
    while last < count:
        size = 16 + int(1.1 * count * share)
        u = ((prg.words(size) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        # Gaps beyond the end are all alike, and must not overflow in the sum.
        gaps = np.minimum(np.floor(np.log(u) / log1p(-share)), count)
        positions = last + np.cumsum(gaps + 1)
        found.append(positions[positions < count])
        last = float(positions[-1])
    return np.concatenate(found).astype(np.int64)


def _unfit(keys: int, counts: int, rows: int | None, num_keys: int) -> ShapeError:
    return ShapeError(
        "keys, counts and rows that do not belong together",
        got=f"{keys} keys, {counts} counts" + (f", {rows} rows" if rows is not None else ""),
        allowed=f"one of each, for distinct ascending keys below {num_keys}",
        fix="pass what the secure sum decoded",
    )
