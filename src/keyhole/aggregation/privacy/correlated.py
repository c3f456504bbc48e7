"""Correlates noise over rounds (DP-FTRL): a round takes back part of the noise of earlier ones.

Training adds up all rounds, so that what hurts is the noise in the prefix sums. With the matrix of
prefix sums A = B C, rounds release the sums x_t plus row t of C^-1 Z, Z being independent Gaussian
noise: as private as releasing C x + Z, and with much smaller noise A C^-1 Z in the prefix sums. C
is the square root of A: a lower triangular Toeplitz matrix with

    r_0 = 1,  r_k = r_{k-1} (2k - 1) / (2k),    C^-1:  s_0 = 1,  s_k = s_{k-1} (2k - 3) / (2k).

It may be cut to its first bands, or its inverse may; the latter needs the noise of only that many
rounds. Nothing is gained by sampling, so that cohorts may come about in any way, as long as no
client takes part twice within `separation` rounds: `Participation` holds every round to that.

Noise of earlier rounds is not stored: it is drawn again from seeds that follow from one secret.
A party that knows that secret can take all noise away.

References: Fichtenberger, Henzinger, Upadhyay, "Constant matters", 2023 (the square root);
Kalinin and Lampert, "Banded Square Root Matrix Factorization", 2024 (bands, sensitivity).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from math import inf, sqrt
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.privacy.noise import normal
from keyhole.arrays import Array
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.errors import InputError, ShapeError

_CHUNK = 1 << 14  # numbers at a time: all rounds of them, one after the other


@dataclass(frozen=True)
class Strategy:
    """How the noise of rounds belongs together.

    Args:
        rounds: T, planned; there is no noise for more.
        separation: b: rounds from one part of a client to its next, at least. T is one part only.
        kind: "full", or "banded" (the first bands of C), or "banded-inverse" (those of C^-1).
        bands: how many; 0 for "full".

    >>> strategy = Strategy(rounds=1500, separation=1500)
    >>> round(strategy.gain, 1)  # the noise in prefix sums, against independent noise
    8.5
    """

    rounds: int
    separation: int
    kind: Literal["full", "banded", "banded-inverse"] = "full"
    bands: int = 0

    def __post_init__(self) -> None:
        is_banded = self.kind in ("banded", "banded-inverse")
        is_sound = 1 <= self.bands <= self.rounds if is_banded else self.bands == 0
        if not 1 <= self.separation <= self.rounds or not (is_banded or self.kind == "full"):
            is_sound = False
        if not is_sound:
            raise InputError(
                f"the noise strategy is invalid: got {self.rounds} rounds, separation "
                f"{self.separation}, {self.kind!r} with {self.bands} bands; expected "
                "separation and bands of 1 to rounds; 'full' with none, 'banded' or "
                "'banded-inverse'; check rounds, separation, kind and bands"
            )

    @property
    def participations(self) -> int:
        """Rounds in which one client can take part, at the most."""
        return -(-self.rounds // self.separation)

    @cached_property
    def coefficients(self) -> NDArray[np.float64]:
        """The first column of C, (T,): no negative ones, none larger than the one before."""
        if self.kind == "banded-inverse":
            return inverse_of(self.inverse)
        return _cut(square_root(self.rounds), self.bands)

    @cached_property
    def inverse(self) -> NDArray[np.float64]:
        """The first column of C^-1, (T,)."""
        if self.kind == "banded":
            return inverse_of(self.coefficients)
        k = np.arange(1, self.rounds)
        return _cut(np.cumprod(np.append(1.0, (2 * k - 3) / (2 * k))), self.bands)

    @cached_property
    def sensitivity(self) -> float:
        """The most that one client moves C x, for updates of norm 1.

        Columns of C with non-negative entries that fall downwards overlap most if the client takes
        part in rounds 0, b, 2b, ... with the same update each time (Kalinin and Lampert, 2024,
        theorem 2).
        """
        total = np.zeros(self.rounds)
        for first in range(0, self.rounds, self.separation):
            total[first:] += self.coefficients[: self.rounds - first]
        return float(np.linalg.norm(total))

    @property
    def reach(self) -> float:
        """The most that the noise of a round can be, over that of one independent normal number:
        `noise_room(noise_multiplier * reach)` is the room it takes in a ring."""
        return self.sensitivity * float(np.abs(self.inverse).sum())

    @property
    def gain(self) -> float:
        """Root mean square noise in prefix sums of independent noise, over that of this strategy,
        at the same privacy without sampling."""
        rows = np.cumsum(np.square(np.cumsum(self.inverse)))
        return sqrt(self.participations * (self.rounds + 1) / 2 / float(rows.mean())) / (
            self.sensitivity
        )


def add_correlated_noise(
    values: Array, strategy: Strategy, round_index: int, sd: float, secret: bytes
) -> Array:
    """Adds the noise of a round to every number of a sum.

        C^-1 Z in row t: sum over k <= t of s_k Z_{t-k},   Z of standard deviation sd sensitivity

    Args:
        values: floats, or uint32 or uint16 of a ring (the noise is rounded): any shape, the same in
            all rounds, since noise takes back that of the same place.
        round_index: t, from 0.
        sd: noise multiplier times clipping norm (in a ring, times its scale). The sensitivity of
            the strategy is multiplied in here, so that the whole run costs one Gaussian with this
            multiplier (`Mechanism("separated", ...)`).
        secret: 16 bytes of the whole run, from `Prg.fresh().bytes(16)`; to be kept for as long as
            the run goes on, and from everyone else for ever.
    """
    _check(values, strategy, round_index, sd)
    out = np.array(values, order="C")
    if sd == 0:
        return out
    weights = sd * strategy.sensitivity * strategy.inverse[: round_index + 1]
    streams = [
        (weight, Prg(_seed(secret, round_index - back)))
        for back, weight in enumerate(weights)
        if weight
    ]
    flat = out.reshape(-1)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        noise = np.zeros(len(part))
        for weight, stream in streams:
            noise += weight * normal(stream, len(part))
        if part.dtype.kind == "f":
            part[...] = part + noise
        else:
            part += np.rint(noise).astype(np.int64).astype(part.dtype)
    return out


def square_root(rounds: int) -> NDArray[np.float64]:
    """r_0 to r_{T-1}: the coefficients of 1 / sqrt(1 - x).

    >>> square_root(4)
    array([1.    , 0.5   , 0.375 , 0.3125])
    """
    k = np.arange(1, rounds)
    return np.cumprod(np.append(1.0, (2 * k - 1) / (2 * k)))


def inverse_of(coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the coefficients of one over a power series that begins with 1, as many as there are.

    >>> inverse_of(square_root(4))
    array([ 1.    , -0.5   , -0.125 , -0.0625])
    """
    inverse = np.zeros(len(coefficients))
    inverse[0] = 1.0
    for t in range(1, len(inverse)):
        inverse[t] = -coefficients[1 : t + 1] @ inverse[t - 1 :: -1]
    inverse.setflags(write=False)
    return inverse


def _cut(coefficients: NDArray[np.float64], bands: int) -> NDArray[np.float64]:
    if bands:
        coefficients[bands:] = 0
    coefficients.setflags(write=False)
    return coefficients


def _seed(secret: bytes, round_index: int) -> bytes:
    """Of the independent noise of one round."""
    place = round_index.to_bytes(8, "little")
    return blake2b(place, key=secret, digest_size=SEED_BYTES, person=b"keyhole noise").digest()


def _check(values: Array, strategy: Strategy, round_index: int, sd: float) -> None:
    if not 0 <= round_index < strategy.rounds:
        raise InputError(
            f"a round that the noise was not planned for: got round {round_index}; expected 0 to "
            f"{strategy.rounds - 1}; end the run, or plan one with more rounds"
        )
    if not 0 <= sd < inf:
        raise InputError(
            f"the standard deviation of the noise is out of range: got {sd}; expected 0 or more, "
            "and finite; multiply noise multiplier and clipping norm again"
        )
    if values.dtype.kind != "f" and values.dtype not in (np.uint16, np.uint32):
        raise ShapeError(
            f"numbers of another kind: got {values.dtype}; expected floating point, uint16 or "
            "uint32; add noise to sums of updates, or to their shares in a ring"
        )
