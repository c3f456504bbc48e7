"""Mixing: the requests of many clients in one order that nobody can foresee.

The relay knows which client sent which sealed request, and nothing of what is in it. It shuffles
what it has collected, so that the order in which the gateway sees requests tells nothing about who
sent them. How much that hides depends on how many clients are mixed: alone, a client is not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keyhole.errors import ServiceError
from keyhole.private.prg import Prg

__all__ = ["Forward", "Mixed", "Relay", "mix"]

Forward: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Takes sealed requests to the gateway; returns an answer to each, in their order."""


@dataclass(frozen=True, repr=False)
class Mixed:
    """Requests of many clients in one order, and the way back.

    Args:
        requests: as they are forwarded.
        places: where each of them stood, clients one after the other.
        counts: requests of each client.
    """

    requests: list[bytes]
    places: Sequence[int]
    counts: Sequence[int]

    def __repr__(self) -> str:
        """Who sent which request is what mixing hides."""
        return f"Mixed({len(self.requests)} requests of {len(self.counts)} clients)"

    def hand_back(self, answers: Sequence[bytes]) -> list[list[bytes]]:
        """Returns to each client its answers, in the order of its requests.

        Args:
            answers: one to each of `requests`, in their order.

        Raises:
            ServiceError: there are more or fewer answers than requests.
        """
        if len(answers) != len(self.requests):
            raise ServiceError(
                "the gateway leaves requests without an answer",
                got=f"{len(answers)} answers",
                allowed=f"{len(self.requests)}",
                fix="ask anew; check that both sides are of one version",
            )
        by_place = dict(zip(self.places, answers, strict=True))
        found = iter(by_place[place] for place in range(len(answers)))
        return [[next(found) for _ in range(count)] for count in self.counts]


def mix(batches: Sequence[Sequence[bytes]], prg: Prg) -> Mixed:
    """Returns the requests of all clients in an order that nobody can foresee.

    Args:
        batches: sealed requests by client.
        prg: of the order.
    """
    sealed = [one for batch in batches for one in batch]
    places = prg.permutation(len(sealed)).tolist()
    return Mixed([sealed[place] for place in places], places, [len(batch) for batch in batches])


class Relay:
    """Stands between clients and one gateway, in process.

    Args:
        forward: to the gateway, such as `Gateway.answer_many`.
        prg: of the order; a fresh one if None. Given by tests only.
    """

    def __init__(self, forward: Forward, prg: Prg | None = None) -> None:
        self._forward, self._prg = forward, prg or Prg.fresh()

    def forward_many(self, batches: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        """Forwards what clients sent, mixed; returns to each client its answers in its order.

        Args:
            batches: sealed requests by client.

        Raises:
            ServiceError: the gateway gives more or fewer answers than it was asked for.
        """
        mixed = mix(batches, self._prg)
        return mixed.hand_back(self._forward(mixed.requests))
