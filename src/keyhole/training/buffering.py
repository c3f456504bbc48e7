"""Buffering: how asynchronous rounds go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.errors import InputError

__all__ = ["Buffering", "exponential", "fade", "no_delay"]


def fade(staleness: int) -> float:
    """Weighs an update by its age: 1 / sqrt(1 + s), as Nguyen et al. do."""
    return float((1.0 + staleness) ** -0.5)


def no_delay(_: np.random.Generator) -> float:
    """Every client answers at once."""
    return 0.0


def exponential(rng: np.random.Generator) -> float:
    """Clients take a random time of mean 1: most are quick, some take long."""
    return float(rng.exponential())


@dataclass(frozen=True)
class Buffering:
    """How asynchronous rounds go.

    Args:
        concurrency: clients at work at any time.
        goal: updates that a step waits for.
        most_staleness: an update older than this many steps is left out.
        weight: staleness -> factor of an update.
        duration: rng -> how long a client takes, 0 or more, in any unit.

    Raises:
        InputError: a number is out of range.
    """

    concurrency: int
    goal: int
    most_staleness: int = 20
    weight: Callable[[int], float] = fade
    duration: Callable[[np.random.Generator], float] = no_delay

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("goal", 1), ("most_staleness", 0)):
            if getattr(self, name) < least:
                raise InputError(
                    f"{name} is out of range",
                    got=getattr(self, name),
                    allowed=f"{least} or more",
                    fix="choose another",
                )

    def draw_duration(self, rng: np.random.Generator) -> float:
        """How long a client takes; refuses what is no length of time."""
        drawn = float(self.duration(rng))
        if not 0 <= drawn < float("inf"):
            raise InputError(
                "a client's duration is out of range",
                got=drawn,
                allowed="a finite number from 0",
                fix="let duration return how long a client takes",
            )
        return drawn
