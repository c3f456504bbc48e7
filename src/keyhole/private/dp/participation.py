"""Who took part when: correlated noise protects clients that do not come back too soon."""

from __future__ import annotations

import json

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import InputError, StorageError

__all__ = ["Participation"]

_NEVER = -1


class Participation:
    """The last round of every client; the server that draws cohorts keeps it.

    Args:
        population: clients, numbered from 0.
        separation: rounds from one part of a client to its next, at least.

    >>> took_part = Participation(population=4, separation=2)
    >>> took_part.record(np.array([0, 3]), 0)
    >>> took_part.eligible(1), took_part.eligible(2)
    (array([1, 2]), array([0, 1, 2, 3]))
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

    def eligible(self, round_index: int) -> NDArray[np.int64]:
        """The clients that may take part in a round, ascending: draw its cohort from them."""
        return np.flatnonzero(self._may_come(round_index)).astype(np.int64)

    def record(self, clients: NDArray[np.int64], round_index: int) -> None:
        """Notes a cohort, before any of its updates is used. Who drops out has taken part.

        Raises:
            InputError: one of them is back too soon, or named twice, or unknown. Nothing is noted,
                and the round must not run.
        """
        is_known = bool(((clients >= 0) & (clients < len(self._last))).all())
        too_soon = 0
        if is_known:
            too_soon = int(np.count_nonzero(~self._may_come(round_index)[clients]))
        if not is_known or too_soon or len(np.unique(clients)) != len(clients):
            raise InputError(
                "a cohort that correlated noise does not protect",
                got=f"{too_soon} of {len(clients)} clients back too soon"
                if too_soon
                else "clients that are unknown or named twice",
                allowed=f"clients whose last round is {self.separation} rounds ago or more",
                fix="draw cohorts from eligible()",
            )
        self._last[clients] = round_index

    def _may_come(self, round_index: int) -> NDArray[np.bool_]:
        may: NDArray[np.bool_] = round_index - self._last >= self.separation
        may |= self._last == _NEVER
        return may

    def to_json(self) -> str:
        """The state, from which `from_json` goes on."""
        return json.dumps({"separation": self.separation, "last": self._last.tolist()})

    @staticmethod
    def from_json(text: str) -> Participation:
        """Reads a state that `to_json` wrote.

        Raises:
            StorageError: it is damaged.
        """
        try:
            state = json.loads(text)
            last = np.array(state["last"], np.int64)
            found = Participation(len(last), int(state["separation"]))
            found._last[...] = last
        except (ValueError, KeyError, TypeError, InputError) as error:
            raise StorageError(
                "the record of who took part cannot be read",
                got=f"{len(text)} characters",
                allowed="what to_json wrote",
                fix="restore the file; without it nobody knows who may come back",
            ) from error
        return found
