"""Mixing: the requests of many clients in one order that nobody can foresee.

The relay knows which client sent which sealed request, and nothing of what is in it. It shuffles
what it has collected, so that the order in which the gateway sees requests tells nothing about who
sent them. How much that hides depends on how many clients are mixed: alone, a client is not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from keyhole.errors import ServiceError
from keyhole.private.prg import Prg

__all__ = ["Forward", "Relay"]

Forward: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Takes sealed requests to the gateway; returns an answer to each, in their order."""


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
        sealed = [one for batch in batches for one in batch]
        order = [int(place) for place in self._prg.permutation(len(sealed))]
        answers = self._forward([sealed[place] for place in order])
        if len(answers) != len(sealed):
            raise ServiceError(
                "the gateway leaves requests without an answer",
                got=f"{len(answers)} answers",
                allowed=f"{len(sealed)}",
                fix="ask anew; check that both sides are of one version",
            )
        by_place = dict(zip(order, answers, strict=True))
        found = iter(by_place[place] for place in range(len(sealed)))
        return [[next(found) for _ in batch] for batch in batches]
