"""Random numbers as a function of where they are used, not of when.

Outcomes: how a client's part in a round ends.

Cohorts: who takes part in a round, and who is lost on the way.

The stream of clients that asynchronous rounds start: cohort after cohort, without end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, inf
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from keyhole.errors import InputError


class Stream(IntEnum):
    """Streams of random numbers, by what they are for: the word between the trial and the round."""

    COHORT = 1
    LOST_BEFORE = 2
    LOST_AFTER = 3
    KEYS = 4
    CLIENT = 5
    DEVICE = 6
    DURATION = 7
    ROUND_KEYS = 8
    MODEL = 9


def generator(seed: int, *seed_path: int) -> np.random.Generator:
    """Returns the generator of one use in a run, such as (trial, Stream.CLIENT, round, client).

    Two arms of a comparison that ask for the same path draw the same numbers, in whatever order
    and on however many workers they run.

    Args:
        seed: of the run, 0 or more.
        seed_path: whole numbers, 0 or more.

    >>> generator(7, 0, 3).integers(100) == generator(7, 0, 3).integers(100)
    np.True_
    """
    path: Any = (seed, *seed_path)
    if min(path) >= 0 and max(path) < 1 << 32:  # the words that NumPy makes of them, at once
        path = np.array(path, np.uint32)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(path)))


Outcome: TypeAlias = Literal["sent", "lost_before", "lost_after", "late", "refused", "empty"]
"""Only what was sent is added up. A client is lost before its slices arrive, or after; it answers
late; or its update is refused."""


Sampling: TypeAlias = Literal["fixed", "poisson", "cyclic", "check-in"]
"""How cohorts are drawn; see `Cohorts`."""

UNCOUNTED = 1 << 40
"""Stands for the number of devices that may check in, which nobody knows; clients are numbered
below it."""


@dataclass(frozen=True)
class Cohorts:
    """Client sampling and simulated dropout.

    Args:
        population: how many clients there are; `UNCOUNTED` where devices check in.
        size: N, how many updates a round waits for.
        sampling: "fixed" draws without replacement; "poisson" takes each client with probability
            asked / population, so a cohort's size varies; "cyclic" goes through the population in
            one random order, so that every client rests as long as it can; "check-in" draws from
            the devices that wait, of any names.
        over_selection: how many times more clients are asked than are waited for; the round closes
            with the first `size` that answer.
        min_updates: a round that closes with fewer updates makes no step; 0 takes what has come.
        lost_before: probability that a client drops out before its slices arrive.
        lost_after: probability that it drops out after, before its update is sent.
        min_waiting: of devices that check in, how many must wait before a round is drawn; 0 for as
            many as are asked.
        rest: rounds that a device which checks in sits out after each that it was drawn for.

    Raises:
        InputError: a number is out of range, or a cohort is larger than the population.
    """

    population: int
    size: int
    sampling: Sampling = "fixed"
    over_selection: float = 1.0
    min_updates: int = 0
    lost_before: float = 0.0
    lost_after: float = 0.0
    min_waiting: int = 0
    rest: int = 0

    def __post_init__(self) -> None:
        check_count("population", self.population, 1)
        check_count("size", self.size, 0)
        for name in ("min_updates", "min_waiting", "rest"):
            check_count(name, getattr(self, name), 0)
        if not 1 <= self.over_selection < inf:
            raise InputError(
                "over_selection asks fewer clients than the round waits for: got "
                f"{self.over_selection}; expected 1 or more; 1.3 asks 30 % more"
            )
        if not 1 <= self.asked <= self.population:
            raise InputError(
                f"cohort does not fit the population: got {self.asked} clients asked; expected "
                f"1..{self.population}; choose a smaller cohort or over-selection"
            )
        if self.sampling not in get_args(Sampling):
            raise InputError(
                f"no such way to sample a cohort: got {self.sampling}; expected "
                f"{', '.join(get_args(Sampling))}; choose one of them"
            )
        if self.min_updates > self.size:
            raise InputError(
                f"a round can never reach min_updates: got {self.min_updates}; expected "
                f"0..{self.size}, as it closes with {self.size}; ask for fewer"
            )
        for name in ("lost_before", "lost_after"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(
                    f"{name} is not a probability: got {getattr(self, name)}; expected 0..1; give "
                    "the share of clients that drop out there"
                )

    @property
    def asked(self) -> int:
        """How many clients a round asks, on average if sampling is Poisson."""
        return ceil(self.size * self.over_selection - 1e-9)

    @property
    def separation(self) -> int:
        """Rounds from one part of a client to its next at the least; cyclic sampling keeps all of
        them that far apart."""
        if self.sampling == "cyclic":
            return self.population // self.asked
        return self.rest + 1

    @property
    def needed(self) -> int:
        """How many devices must wait before a round is drawn from them."""
        return max(self.asked, self.min_waiting)


def check_count(name: str, value: object, min_updates: int) -> None:
    """Raises InputError unless `value` is a whole number of at least `min_updates`."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < min_updates:
        raise InputError(
            f"{name} is out of range: got {value}; expected a whole number from {min_updates}; "
            "choose another"
        )


def sample_cohort(cohorts: Cohorts, seed: int, trial: int, t: int) -> tuple[int, ...]:
    """Returns the clients asked in round t; a function of (seed, trial, t) alone.

    >>> sorted(sample_cohort(Cohorts(population=5, size=5), seed=0, trial=0, t=0))
    [0, 1, 2, 3, 4]
    """
    count = cohorts.asked
    if cohorts.sampling == "cyclic":
        order = generator(seed, trial, Stream.COHORT).permutation(cohorts.population)
        start = t % cohorts.separation * count
        return tuple(order[start : start + count].tolist())
    rng = generator(seed, trial, Stream.COHORT, t)
    if cohorts.sampling == "poisson":
        count = int(rng.binomial(cohorts.population, count / cohorts.population))
    return tuple(rng.choice(cohorts.population, size=count, replace=False).tolist())


def sample_dropouts(
    clients: Sequence[int], probability: float, seed: int, trial: int, stage: Stream, t: int
) -> list[int]:
    """Returns those of `clients` that drop out at a stage of round t.

    Each client's outcome is its own: it does not depend on who else was asked.
    """
    if probability == 0:
        return []
    return [c for c in clients if generator(seed, trial, stage, t, c).random() < probability]


@dataclass
class ClientStream:
    """Who starts next; a function of the cohorts that `draw` gives for 0, 1, 2 and so on, and of
    who could not start."""

    cohorts: Cohorts
    draw: Callable[[int], Sequence[int]]
    drawn: int = 0  # of the stream, so far

    def take(self, count: int, busy: AbstractSet[int]) -> list[int]:
        """Returns the next clients that can start; fewer than `count` if no more are left.

        Those that are `busy` are passed over, since they are at work or had their part in this
        round: a client takes part in a round once.
        """
        found: list[int] = []
        passed_over = set(busy)
        while len(found) < count and len(passed_over) < self.cohorts.population:
            t, place = divmod(self.drawn, self.cohorts.asked)
            for client in self.draw(t)[place:]:
                if len(found) == count:
                    break
                self.drawn += 1
                if client not in passed_over:
                    passed_over.add(client)
                    found.append(client)
        return found
