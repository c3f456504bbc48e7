"""Says what a table of popular keys saves private retrieval, and how many keys it drops.

Under a law of popularity that is assumed, of Zipf: key k of 1..K is chosen in proportion to k^-s,
and the popular ones are the first. A client's m different keys are taken to be those that arrive
first of independent streams with these rates, so that key k is among them with the probability
1 - exp(-L k^-s), L such that these sum to m. `tests/planner/test_popular.py` holds the numbers to
clients that are drawn, and placed as clients place their keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from keyhole.delivery.popular import PLACES_A_KEY
from keyhole.errors import InputError
from keyhole.pricing import Workload

_EXACT = 1 << 16  # keys that are summed one by one; those behind in groups that grow
_GROWTH = 1.001


@dataclass(frozen=True)
class Zipf:
    """Clients that choose keys by Zipf's law.

    Args:
        exponent: s; 0 draws all keys alike, words of a language are near 1.

    >>> load = Workload(100_000, 1_000, 2_000, cohort=50, popular=(10_000, 900))
    >>> round(Zipf(load, 1.0).dropped, 3)
    0.251
    """

    load: Workload
    exponent: float

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 10:
            raise InputError(
                f"no exponent of a law of popularity: got {self.exponent}; expected 0..10; words "
                "are near 1"
            )

    @cached_property
    def _groups(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The last key of each group, and how many it has."""
        num_keys = self.load.num_keys
        exact = np.arange(1, min(num_keys, _EXACT) + 1, dtype=np.float64)
        steps = int(np.log(max(num_keys / _EXACT, 1)) / np.log(_GROWTH)) + 1
        further = np.unique(np.ceil(_EXACT * _GROWTH ** np.arange(1, steps + 1)))
        ends = np.concatenate([exact, further[further < num_keys], [float(num_keys)]])
        ends = np.unique(ends)
        return ends, np.diff(ends, prepend=0.0)

    @cached_property
    def _chosen(self) -> NDArray[np.float64]:
        """How many keys a client chooses in each group, on average."""
        ends, counts = self._groups
        rates = (ends - (counts - 1) / 2) ** -self.exponent
        low, high = 0.0, 1.0
        while self._sum(high * rates) < self.load.keys_per_client * (1 - 1e-9) and high < 1e300:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            is_below = self._sum(middle * rates) < self.load.keys_per_client
            low, high = (middle, high) if is_below else (low, middle)
        found: NDArray[np.float64] = counts * -np.expm1(-high * rates)
        return found

    def _sum(self, rates: NDArray[np.float64]) -> float:
        return float((self._groups[1] * -np.expm1(-rates)).sum())

    @property
    def popular(self) -> float:
        """How many of a client's keys are popular, on average."""
        count = 0 if self.load.popular is None else self.load.popular[0]
        ends, _ = self._groups
        return float(np.interp(count, [0.0, *ends], [0.0, *np.cumsum(self._chosen)]))

    @property
    def dropped(self) -> float:
        """The share of a client's keys that are dropped: those beyond what each table is asked for,
        and of those asked of the whole one all but one in each place. One server may have more
        places, and drop fewer."""
        if self.load.popular is None:
            return 0.0
        m, slots = self.load.keys_per_client, self.load.popular[1]
        other = m - min(self.popular, slots)
        asked, places = min(other, m - slots), PLACES_A_KEY * (m - slots)
        placed = places * -np.expm1(asked * np.log1p(-1 / places)) if places else 0.0
        return float((other - placed) / m)
