"""Draws Gaussian noise, for floats and for integers of a ring, on all rows or on some of them.

**What it is.** Two words of 64 bits give two numbers by the formula of Box and Muller,

    r = sqrt(-2 ln u),  u = (2 floor(w / 2) + 1) / 2^64,    r cos(2 pi v),  r sin(2 pi v),
    v = floor(w' / 2^11) / 2^53,

in doubles, each within 2^-46 of the exact value of the formula. Integers are sd times that, rounded
to the nearest. An integer plus such noise is the rounded sum of the integer and a real Gaussian, so
that the ring, like everything else that is computed from the sum, loses no privacy: the accounting
of the continuous Gaussian holds for it.

**Where it differs from a Gaussian.** (1) No number lies beyond 9.42 standard deviations. Of real
ones, a pair reaches that radius with probability 2^-64, so that the missing tail of n numbers has
less than n 2^-65: 2^-39 for 5 x 10^7 of them. Add that to delta. (2) Words and doubles are no
reals: they move a number by less than 2^-46 sd, and the steps of u by another 2^-60 sd on average.
The integer it is rounded to becomes another one where it lies that near to the middle between two:
a share of 2^-45 sd of the numbers, 2^-20 at sd = 2^25. No proof here turns that into a delta.
(3) Noise on floats is exact in none of its bits: a person who sees the sum in full precision can
learn from which float values it may have come (Mironov, 2012). Where the sum is released to people
who would try, add integers in the ring.

**Who may know the noise.** A party that knows the seed can take the noise away. With two servers,
each adds noise of the full standard deviation from a seed of its own, so that the sum is protected
against either of them; others see sqrt(2) times the noise, which the accountant does not count.

**Noise on some rows (DP-AdaFEST).** Noise on all rows makes every released row differ from zero.
So every key's number of clients gets noise first; keys whose noisy count reaches a threshold are
kept, and only their rows get noise and are released. Rows of rare keys are lost. Keys that nobody
asked for are kept too, each with the probability that noise alone reaches the threshold: without
them, being kept would betray a client.

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

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, erfc, inf, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ShapeError
from keyhole.server.row_sums import RowUpdate

LARGEST = sqrt(128 * log(2))
"""Max standard deviations that a number can be away from zero: 9.42."""

_CHUNK = 1 << 14  # numbers at a time: their words and results stay in the second-level cache
_RING = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}
_MAX_RING_SD = {2: 2.0**11, 4: 2.0**27}  # 9.42 of them stay below half of the ring


def normal(prg: Prg, shape: int | tuple[int, ...]) -> NDArray[np.float64]:
    """Returns numbers of the normal distribution with mean 0 and standard deviation 1.

    Args:
        prg: where they come from: 16 bytes for every two of them. The same seed gives the same
            numbers on the same machine; another library of mathematics may differ in the last bit.

    >>> normal(Prg(bytes(16)), 3).round(3)
    array([ 0.725,  1.55 , -0.837])
    """
    from keyhole.aggregation import loops  # a device draws no noise and never loads numba

    out = np.empty(shape, np.float64)
    flat = out.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        loops.box_muller(prg.words(len(part) + len(part) % 2), part)
    return out


def add_noise(values: Array, sd: float, prg: Prg) -> Array:
    """Adds Gaussian noise to every number of a plain sum in place, and returns it.

    Args:
        values: contiguous floats: all rows, also those that nobody asked for, since their being
            zero would say so.
        sd: standard deviation: the noise multiplier times the clipping norm; 0 adds nothing.
    """
    _check_sd(sd, inf)
    if values.dtype.kind != "f":
        raise _unfit_for_noise(values, "floating point")
    for part in _chunks(values, sd):
        part[...] = part + sd * normal(prg, len(part))
    return values


def add_ring_noise(sums: Array, sd: float, prg: Prg) -> Array:
    """Adds rounded Gaussian noise in place to every element of a sum or a share in a ring, and
    returns it.

    Args:
        sums: contiguous uint32 or uint16: all rows, also those that nobody asked for.
        sd: standard deviation in units of the ring: multiplier times clipping norm times scale; 0
            adds nothing. `noise_room` says how much of the ring it takes.

    >>> add_ring_noise(np.zeros(4, np.uint32), 3.0, Prg(bytes(16))).view(np.int32)
    array([ 2,  5, -3,  3], dtype=int32)
    """
    if sums.dtype != _RING.get(sums.dtype.itemsize):
        raise _unfit_for_noise(sums, "uint16 or uint32")
    _check_sd(sd, _MAX_RING_SD[sums.dtype.itemsize])
    from keyhole.aggregation import loops

    for part in _chunks(sums, sd):
        loops.add_rounded(normal(prg, len(part)), sd, part)
    return sums


def _chunks(values: Array, sd: float) -> Iterator[Array]:
    """The numbers of an array to which there is noise to add, some at a time."""
    if not values.flags.c_contiguous:  # noise would be added to a copy
        raise _unfit_for_noise(values, "a contiguous array")
    flat = values.reshape(-1)
    for start in range(0, len(flat) if sd > 0 else 0, _CHUNK):
        yield flat[start : start + _CHUNK]


def noise_room(noise_multiplier: float, parties: int = 1) -> int:
    """Returns how many clients more a ring must have room for, so that noise cannot make a sum
    overflow: the `cohort` of `FixedPoint` is the planned cohort and this.

    Args:
        parties: that add noise: 2 where both servers do.

    >>> noise_room(1.0, parties=2)
    20
    """
    return parties * ceil(LARGEST * noise_multiplier) if noise_multiplier else 0


def _check_sd(sd: float, limit: float) -> None:
    if not 0 <= sd < inf or sd > limit:
        allowed = "0 or more, and finite" if limit == inf else f"0 to {limit:g} in this ring"
        raise InputError(
            f"the standard deviation of the noise is out of range: got {sd:g}; "
            f"expected {allowed}; multiply noise multiplier, clipping norm and scale "
            "again"
        )


def _unfit_for_noise(values: Array, allowed: str) -> ShapeError:
    return ShapeError(
        f"numbers of another kind: got {values.dtype}, contiguous: {values.flags.c_contiguous}; "
        f"expected {allowed}; use add_noise for floats and add_ring_noise for a ring"
    )


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
                f"noise multipliers are out of range: got multipliers {self.count_multiplier} and "
                f"{self.row_multiplier}; expected 0 or more, and finite; take them from "
                "AdaFest.split"
            )
        if self.max_keys < 1 or self.threshold != self.threshold:
            raise InputError(
                f"the threshold or the number of keys is invalid: got {self.max_keys} keys of a "
                f"client, threshold {self.threshold}; expected 1 key or more, and a threshold that "
                "is a number; pass the most keys that a client may ask for"
            )
        minimum = _MIN_DEVIATIONS * self.count_sd
        if self.threshold > -inf and self.count_sd > 0 and self.cohort <= minimum:
            raise InputError(
                f"a cohort too small for thresholded rows: got {self.cohort} clients against noise "
                f"of {self.count_sd:.1f} on every count; expected more than {minimum:.0f} clients, "
                "three standard deviations; put noise on all rows, take larger cohorts, or let "
                "clients ask for fewer keys"
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


def threshold_rows(
    settings: AdaFest,
    num_keys: int,
    keys: KeyArray,
    counts: NDArray[np.int64],
    rows: Array,
    clip: float,
    prg: Prg,
) -> RowUpdate:
    """Chooses keys by noisy counts and adds noise to their sums.

    Args:
        keys: (n,) ascending and distinct: those that somebody asked for.
        counts: (n,) clients that asked for each.
        rows: (n, width) their sums: floats, or elements of a ring.
        clip: C in the units of the rows (in a ring, times its scale): no client's whole update is
            longer, nor has it more than `max_keys` keys.

    Returns:
        Kept keys, ascending, and noisy rows; zero plus noise for those that nobody asked for, which
        it does not tell apart.
    """
    kept = keep_keys(settings, num_keys, keys, counts, prg)
    if len(rows) != len(keys):
        raise _unfit(len(keys), len(counts), len(rows), num_keys)
    chosen = np.zeros((len(kept), *rows.shape[1:]), rows.dtype)
    is_kept = np.isin(keys, kept)
    chosen[np.searchsorted(kept, keys[is_kept])] = rows[is_kept]
    add = add_noise if rows.dtype.kind == "f" else add_ring_noise
    return RowUpdate(kept, add(chosen, settings.row_multiplier * clip, prg))


def keep_keys(
    settings: AdaFest, num_keys: int, keys: KeyArray, counts: NDArray[np.int64], prg: Prg
) -> KeyArray:
    """Returns the keys whose noisy count reaches the threshold, ascending.

    Of keys that nobody asked for, those that are kept are drawn directly, each with `false_share`:
    the same as noise on a zero for each of them, in time that does not grow with K.
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
    got = f"{keys} keys, {counts} counts" + (f", {rows} rows" if rows is not None else "")
    return ShapeError(
        f"keys, counts and rows that do not belong together: got {got}; expected one "
        f"of each, for distinct ascending keys below {num_keys}; pass what the secure "
        "sum decoded"
    )
