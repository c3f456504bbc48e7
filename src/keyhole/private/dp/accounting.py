"""The account of a run: how much it has told about one client, and whether another round fits.

The guarantee is about the released models (and whatever is computed from them): whoever sees all of
them, and knows all other clients, learns little about whether one client took part, or with which
data. It says nothing about what a server sees on the way. That is what private select and secure
sums are for; the sums that a sketch or a union of keys shows to the server are covered only if
noise was added before they were shown.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from math import inf, isclose
from typing import Final, Literal

from keyhole.errors import BudgetError, InputError, StorageError
from keyhole.private.dp.loss import Mechanism, Neighbours, Sampling, epsilon_of

__all__ = ["Accountant", "PrivacySpent"]

_VERSION = 1
_RELATIONS: Final[dict[Neighbours, str]] = {
    "add-or-remove": "added or removed",
    "replace-one": "with its data replaced by any other",
}
_SAMPLINGS: Final[dict[Sampling, str]] = {
    "poisson": "each client drawn for itself, {cohort} of {population} expected",
    "fixed": "exactly {cohort} of {population} clients drawn without replacement",
    "separated": "{cohort} of {population} clients, none again before the separation is over",
}


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent after some rounds: goes into the record of every round.

    Args:
        epsilon: upper bound; infinity if a round ran that could not be accounted for.
        delta: for which it holds.
        rounds: that ran.
        unit: what is protected: one client, with all its data.
        neighbours: the relation.
        sampling: the sampler that ran.
        noise_multiplier: standard deviation of the noise on a sum over the clipping norm.
    """

    epsilon: float
    delta: float
    rounds: int
    unit: Literal["client"]
    neighbours: Neighbours
    sampling: Sampling
    noise_multiplier: float


class Accountant:
    """Adds up what the rounds of a run cost, and refuses a round that costs too much.

    Args:
        mechanism: what every round does. A round that did something else is refused, and makes the
            run one without a guarantee.
        delta: below one over the population: a mechanism that published one client at random would
            have a delta of that.
        budget: the most epsilon to spend; None sets no bound.

    Raises:
        InputError: a delta or a budget that cannot be.

    >>> mechanism = Mechanism("fixed", 342_477, 50, 1.0, "replace-one")
    >>> accountant = Accountant(mechanism, delta=1e-6, budget=4.0)
    >>> accountant.check()  # before a round starts
    >>> accountant.record("fixed", cohort=50, arrived=47, noise_multiplier=1.0)  # when it ran
    >>> accountant.rounds, round(accountant.epsilon(1500), 2)
    (1, 3.88)
    """

    unit: Final = "client"

    def __init__(self, mechanism: Mechanism, delta: float, budget: float | None = None) -> None:
        if not 0 < delta < 1 / mechanism.population or (budget is not None and not budget > 0):
            raise InputError(
                "a guarantee that says nothing",
                got=f"delta {delta}, budget {budget}",
                allowed=f"delta below 1 / {mechanism.population} clients, a budget above 0",
                fix="take a smaller delta, 1e-6 for instance",
            )
        self.mechanism = mechanism
        self.delta = delta
        self.budget = budget
        self._rounds = 0
        self._unaccounted = 0

    def __repr__(self) -> str:
        return (
            f"Accountant(unit={self.unit!r}, neighbours={self.mechanism.neighbours!r}, "
            f"sampling={self.mechanism.sampling!r}, delta={self.delta}, rounds={self._rounds})"
        )

    @property
    def rounds(self) -> int:
        """Rounds that ran."""
        return self._rounds

    def epsilon(self, rounds: int | None = None) -> float:
        """The epsilon of the rounds that ran, or of a run of `rounds` rounds in all."""
        if self._unaccounted:
            return inf
        return epsilon_of(self.mechanism, self._rounds if rounds is None else rounds, self.delta)

    def check(self, rounds: int = 1) -> None:
        """Asks before a round starts whether there is privacy left for it.

        Args:
            rounds: that are to follow; a whole run can be checked before its first round.

        Raises:
            BudgetError: it would spend more than the budget. Nothing was spent on the question.
        """
        if self.budget is None:
            return
        after = self.epsilon(self._rounds + rounds)
        if after > self.budget:
            raise BudgetError(
                "a round that would spend too much privacy",
                got=f"epsilon {after:.4g} after {self._rounds + rounds} rounds",
                allowed=f"{self.budget:g} at delta {self.delta:g}",
                fix="stop here, or plan with more noise, smaller cohorts or fewer rounds",
            )

    def record(
        self, sampling: Sampling, *, cohort: int, arrived: int, noise_multiplier: float
    ) -> None:
        """Adds a round that ran, also one whose result was thrown away after it was seen.

        Clients that drop out change nothing: the noise was made for the planned cohort, and the sum
        is divided by it.

        Args:
            sampling: the sampler that drew the cohort.
            cohort: planned size, or the one expected.
            arrived: clients whose updates are in the sum.
            noise_multiplier: of the noise that was added.

        Raises:
            InputError: that is not the mechanism of this accountant. The round ran all the same, so
                that from now on epsilon is infinite.
        """
        self._rounds += 1
        made_for = self.mechanism
        is_known = (sampling, cohort) == (made_for.sampling, made_for.cohort)
        is_noisy = noise_multiplier >= made_for.noise_multiplier or isclose(
            noise_multiplier, made_for.noise_multiplier, rel_tol=1e-9
        )
        # A Poisson cohort may be larger than expected; no other may.
        is_small = sampling == "poisson" or arrived <= cohort
        if not (is_known and is_noisy and is_small):
            self._unaccounted += 1
            raise InputError(
                "a round that is not the one accounted for",
                got=f"{sampling} cohort of {cohort}, {arrived} arrived, noise {noise_multiplier}",
                allowed=f"{made_for.sampling} cohort of {made_for.cohort}, no more arrived, noise "
                f"{made_for.noise_multiplier} or more",
                fix="make an accountant for the sampler and the noise that run; this run has no "
                "guarantee any more",
            )

    def spent(self) -> PrivacySpent:
        """What the rounds so far have spent."""
        return PrivacySpent(
            self.epsilon(),
            self.delta,
            self._rounds,
            self.unit,
            self.mechanism.neighbours,
            self.mechanism.sampling,
            self.mechanism.noise_multiplier,
        )

    def describe(self) -> str:
        """The guarantee in a sentence or two, with its unit and its relation."""
        made = self.mechanism
        drawn = _SAMPLINGS[made.sampling].format(
            cohort=f"{made.cohort:,}", population=f"{made.population:,}"
        )
        return (
            f"({self.epsilon():.3g}, {self.delta:g})-differential privacy after {self._rounds} "
            f"rounds for one client, all its data, {_RELATIONS[made.neighbours]}; {drawn}; noise "
            f"of {made.noise_multiplier:g} times the clipping norm; by {made.method.upper()}. It "
            "covers the released models, not what servers see on the way."
        )

    def to_json(self) -> str:
        """The state, from which `from_json` goes on."""
        return json.dumps(
            {
                "version": _VERSION,
                "unit": self.unit,
                "mechanism": asdict(self.mechanism),
                "delta": self.delta,
                "budget": self.budget,
                "rounds": self._rounds,
                "unaccounted": self._unaccounted,
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Accountant:
        """Reads a state that `to_json` wrote.

        Raises:
            StorageError: it is damaged, or of another version or unit.
        """
        try:
            state = json.loads(text)
            if (state["version"], state["unit"]) != (_VERSION, Accountant.unit):
                raise ValueError
            accountant = Accountant(
                Mechanism(**state["mechanism"]), state["delta"], state["budget"]
            )
            accountant._rounds = _count(state["rounds"])
            accountant._unaccounted = _count(state["unaccounted"])
        except (ValueError, KeyError, TypeError, InputError) as error:
            raise StorageError(
                "the account of a run cannot be read",
                got=f"{len(text)} characters",
                allowed=f"what to_json of version {_VERSION} wrote",
                fix="restore the file; a run without its account has no guarantee",
            ) from error
        return accountant


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError
    return value
