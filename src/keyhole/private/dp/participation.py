"""Who took part when: correlated noise protects clients that do not come back too soon."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError

__all__ = ["Participation"]

_NEVER = -1


class Participation:
    """The last round of every client; whoever makes the rounds keeps it.

    Args:
        population: clients, numbered from 0.
        separation: rounds from one part of a client to its next, at least.

    >>> took_part = Participation(population=4, separation=2)
    >>> took_part.record(np.array([0, 3]), 0)
    >>> took_part.record(np.array([1, 2]), 1)
    >>> took_part.record(np.array([0, 3]), 2)
    """

    def __init__(self, population: int, separation: int) -> None:
        if population < 1 or separation < 1:
            raise InputError(
                "a separation that cannot be",
                got=f"{separation} rounds, {population} clients",
                allowed="1 or more of each",
                fix="pass those of the strategy and of the population",
            )
        self.separation = separation
        self._last = np.full(population, _NEVER, np.int64)

    def __repr__(self) -> str:
        return f"Participation({len(self._last)} clients, separation={self.separation})"

    def record(self, clients: NDArray[np.int64], round_index: int) -> None:
        """Notes a cohort, before its sum is used. Who drops out has taken part.

        Raises:
            InputError: one of them is back too soon, or named twice, or unknown. Nothing is noted,
                and the round must not be released.
        """
        is_known = bool(((clients >= 0) & (clients < len(self._last))).all())
        too_soon = int(np.count_nonzero(self._is_too_soon(clients, round_index))) if is_known else 0
        if not is_known or too_soon or len(np.unique(clients)) != len(clients):
            raise InputError(
                "a cohort that correlated noise does not protect",
                got=f"{too_soon} of {len(clients)} clients back too soon"
                if too_soon
                else "clients that are unknown or named twice",
                allowed=f"clients whose last round is {self.separation} rounds ago or more",
                fix="draw cohorts that take turns",
            )
        self._last[clients] = round_index

    def _is_too_soon(self, clients: NDArray[np.int64], round_index: int) -> NDArray[np.bool_]:
        last = self._last[clients]
        too_soon: NDArray[np.bool_] = (last != _NEVER) & (round_index - last < self.separation)
        return too_soon
