"""Computes what rounds of one mechanism cost: epsilon for a delta, by `dp-accounting`.

`Accountant` says how much a run has told about one client, and whether another round fits. The
guarantee is about the released models and all that is computed from them: a person who sees all of
them, and knows all other clients, learns little about whether one client took part, or with which
data. Not covered: what a server sees on the way, which private select and secure sums are for. The
sums that a sketch shows to the server are covered only if noise was added before.

The library's events say less than they seem to. What each of our cases becomes:

| sampling | neighbours | event |
|---|---|---|
| poisson | add-or-remove | Poisson-sampled Gaussian with z |
| poisson | replace-one | the same; its PLD shifts by -C and +C itself (RDP does not know it) |
| fixed | replace-one | drawn without replacement, with **z / 2** (RDP; PLD: truncated Poisson) |
| fixed | add-or-remove | Poisson-sampled Gaussian with **z / 2** |
| separated | add-or-remove | one Gaussian with z for the whole run, nothing gained by sampling |
| separated | replace-one | one Gaussian with **z / 2** |
| participation | add-or-remove | Gaussians with z, one for each round that a client may be in |
| participation | replace-one | Gaussians with **z / 2**, likewise |

"participation" gains nothing by sampling, and so holds against those who see who takes part: k
Gaussians one after the other, each chosen with all before it in sight, are one with z / sqrt(k).

z / 2 with fixed-size cohorts and replace-one: the library passes the multiplier on as "standard
deviation over sensitivity", and replacing a client moves a sum of clipped updates by 2 C.

z / 2 with fixed-size cohorts and add-or-remove: with n clients, one of them, x, is in a cohort of N
with probability q = N / n; else there is another one, r, in its place. Given the other N - 1
members and r, the sum without x is around r, and with x it is around r with probability 1 - q and
around x with q: a Poisson-sampled Gaussian whose shift |x - r| is up to 2 C. The hockey-stick
divergence is jointly convex, so that averaging over the others makes it no larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isclose
from typing import Any, Final, Literal, get_args

import numpy as np

from keyhole.errors import BudgetError, InputError

Sampling = Literal["poisson", "fixed", "separated", "participation"]
"""How cohorts come about. poisson: every client takes part or not, for itself, with probability
cohort / population, so that the size of a cohort varies. fixed: exactly `cohort` clients, drawn
without replacement. separated: in any way, but no client twice within a number of rounds, with
noise that was planned for all of them. participation: in any way, known to everybody; a client
counts in every round that it may have been in."""

Neighbours = Literal["add-or-remove", "replace-one"]
"""Which two populations may not be told apart: with and without one client, or with one client's
data exchanged for any other data. Where cohorts are known ("separated", "participation"), a client
that is not there keeps its turns, and adds nothing in them."""

Method = Literal["pld", "rdp"]
"""Privacy loss distributions (tight, up to a second a query) or Renyi divergences (looser)."""

# Rounded up to multiples of the interval, a loss is bounded from above with any of them; the wide
# one is off by thousandths and ten times as fast. Below this epsilon we take the narrow one.
_WIDE, _NARROW, _LARGE_EPSILON = 1e-3, 1e-4, 1.0


@dataclass(frozen=True)
class Mechanism:
    """What a round does, as far as privacy is concerned: a noisy sum over a cohort of clients.

    Args:
        cohort: planned size of a cohort; under Poisson sampling the size expected.
        noise_multiplier: z: standard deviation of the noise on the sum over the clipping norm. Of
            correlated noise, see `correlated.py`; of thresholded rows, see `noise.py`.
        method: how losses are composed; "" takes "rdp" for fixed cohorts under replace-one (what
            the library has a proof for) and "pld" else.
        planned_rounds: of a separated run, for which its noise was scaled; 0 for the others, which
            may go on as long as there is budget.
        failure: the probability, a round, of an event in which the round tells about the client
            what noise does not cover (see `rounds/account.py`): taken off delta, round by round, or
            of a separated run for all planned rounds at once; of participation, in a round that
            the client is in.
        separation: of participation: rounds from one part of a client to its next, at least, as
            the sampler was held to; 1 where a client may be in every round.
    """

    sampling: Sampling
    population: int
    cohort: int
    noise_multiplier: float
    neighbours: Neighbours
    method: Method | Literal[""] = ""
    planned_rounds: int = 0
    failure: float = 0.0
    separation: int = 1

    def __post_init__(self) -> None:
        for name, kinds in (("sampling", Sampling), ("neighbours", Neighbours)):
            if getattr(self, name) not in get_args(kinds):
                raise _unknown(name, getattr(self, name), get_args(kinds))
        if not 1 <= self.cohort <= self.population or not 0 <= self.noise_multiplier < inf:
            raise InputError(
                f"cohort, population and noise do not make a mechanism: got {self.cohort} of "
                f"{self.population} clients, noise {self.noise_multiplier}; expected 1 to all "
                "clients, and noise of 0 or more, finite; check cohort, population and "
                "noise_multiplier"
            )
        if not 0 <= self.failure <= 1:
            raise _unknown("probability", self.failure, ("0 to 1",))
        if (self.sampling == "separated") != (self.planned_rounds >= 1):
            raise InputError(
                f"a separated run is planned as a whole, others are not: got {self.planned_rounds} "
                f"planned rounds with {self.sampling} sampling; expected 1 or more if separated, "
                "else 0; pass the rounds of the strategy of the correlated noise"
            )
        if self.separation < 1 or (self.separation > 1 and self.sampling != "participation"):
            raise _unknown("separation", self.separation, ("1", "more with participation"))
        if not self.method:
            is_proven = (self.sampling, self.neighbours) == ("fixed", "replace-one")
            object.__setattr__(self, "method", "rdp" if is_proven else "pld")
        if self.method not in get_args(Method):
            raise _unknown("method", self.method, get_args(Method))
        if (self.sampling, self.neighbours, self.method) == ("poisson", "replace-one", "rdp"):
            raise _unknown("method", "rdp for poisson and replace-one", ("pld",))

    @property
    def probability(self) -> float:
        """With which a given client is in a given cohort, where cohorts are drawn."""
        return self.cohort / self.population

    def participations(self, rounds: int) -> int:
        """Returns the rounds, of this many, that one client may have been in."""
        return -(-rounds // self.separation)

    @property
    def accounted_multiplier(self) -> float:
        """Standard deviation over the most that the sum can move: what the library is told."""
        is_known = self.sampling in ("separated", "participation")
        is_whole = self.sampling == "poisson" or (is_known and self.neighbours == "add-or-remove")
        return self.noise_multiplier if is_whole else self.noise_multiplier / 2


def epsilon_of(mechanism: Mechanism, rounds: int, delta: float) -> float:
    """Returns the epsilon of `rounds` rounds for a delta: an upper bound.

    A separated mechanism is charged as a whole with its first round, since its noise was scaled for
    all rounds in which a client may take part; beyond the rounds it was planned for, epsilon is
    infinite.

    >>> paper = Mechanism("fixed", 342_477, 50, 1.0, "replace-one")
    >>> round(epsilon_of(paper, 1500, 1e-6), 2)
    3.88
    """
    if not 0 < delta < 1:
        raise InputError(
            f"delta must be in (0, 1): got {delta}; expected between 0 and 1; take less than one "
            "over the number of clients"
        )
    if rounds <= 0:
        return 0.0
    is_beyond = mechanism.sampling == "separated" and rounds > mechanism.planned_rounds
    if gaussian_cost(mechanism.accounted_multiplier) == inf or is_beyond:
        return inf
    left = delta - mechanism.participations(mechanism.planned_rounds or rounds) * mechanism.failure
    return _epsilon(replace(mechanism, failure=0.0), rounds, left) if left > 0 else inf


def gaussian_cost(z: float) -> float:
    """Returns 1 / z^2, what a Gaussian with noise multiplier z costs; infinite where there is no
    noise, or so little of it that no number holds the cost.

    >>> gaussian_cost(0.5), gaussian_cost(0.0), gaussian_cost(1e-160)
    (4.0, inf, inf)
    """
    square = z * z if z > 0 else 0.0
    return 1 / square if square else inf


def gaussian_epsilon(cost: float, delta: float) -> float:
    """Returns the epsilon of Gaussians one after the other, for a delta.

    Args:
        cost: the sum of 1 / z^2 over all of them, z being the standard deviation of the noise over
            the most that one client moves a sum; infinite where one had no noise. Adaptively
            composed they are one Gaussian with 1 / sqrt(cost) (Dong, Roth, Su, 2019).

    >>> round(gaussian_epsilon(1.0, 1e-6), 2), gaussian_epsilon(0.0, 1e-6)
    (4.89, 0.0)
    """
    if cost == 0:
        return 0.0
    if cost == inf:
        return inf
    # Far from where delta is met, the search of the library takes logarithms of zero.
    with np.errstate(divide="ignore"):
        return float(_library().get_epsilon_gaussian(cost**-0.5, delta))


@lru_cache(maxsize=1 << 14)  # a pure function of numbers, asked again in every round
def _epsilon(mechanism: Mechanism, rounds: int, delta: float) -> float:
    z = mechanism.accounted_multiplier
    if mechanism.sampling == "participation":
        return gaussian_epsilon(mechanism.participations(rounds) / z**2, delta)
    if mechanism.sampling == "separated":
        return gaussian_epsilon(z**-2, delta)
    if mechanism.method == "rdp":
        orders, divergences = _divergences_of_a_round(mechanism)
        return float(_library().rdp.compute_epsilon(orders, rounds * divergences, delta)[0])

    def composed(interval: float) -> float:
        losses = _loss_of_a_round(mechanism, interval).self_compose(rounds)
        return float(losses.get_epsilon_for_delta(delta))

    wide = composed(_WIDE)
    return wide if wide > _LARGE_EPSILON else composed(_NARROW)


@lru_cache(maxsize=64)  # a third of a second for cohorts of a fixed size
def _divergences_of_a_round(mechanism: Mechanism) -> tuple[Any, Any]:
    dp = _library()
    noise = dp.GaussianDpEvent(mechanism.accounted_multiplier)
    if mechanism.neighbours == "replace-one":
        event = dp.SampledWithoutReplacementDpEvent(mechanism.population, mechanism.cohort, noise)
    else:
        event = dp.PoissonSampledDpEvent(mechanism.probability, noise)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=_relation(mechanism)).compose(event)
    return accountant.orders, accountant.rdp


@lru_cache(maxsize=8)  # a second to make, some megabytes to keep
def _loss_of_a_round(mechanism: Mechanism, interval: float) -> Any:
    losses = _library().pld.privacy_loss_distribution
    if mechanism.sampling == "fixed" and mechanism.neighbours == "replace-one":
        # Everyone is drawn, then all but a cohort put aside: cohorts of a fixed size. This one
        # takes the multiplier as it is and halves it itself.
        return losses.from_truncated_subsampled_gaussian_mechanism(
            mechanism.population,
            1.0,
            mechanism.cohort,
            mechanism.noise_multiplier,
            value_discretization_interval=interval,
            neighboring_relation=_relation(mechanism),
        )
    return losses.from_gaussian_mechanism(
        mechanism.accounted_multiplier,
        value_discretization_interval=interval,
        sampling_prob=mechanism.probability,
        neighboring_relation=_relation(mechanism),
    )


def _relation(mechanism: Mechanism) -> Any:
    relations = _library().NeighboringRelation
    is_replaced = mechanism.neighbours == "replace-one"
    return relations.REPLACE_ONE if is_replaced else relations.ADD_OR_REMOVE_ONE


def _library() -> Any:
    try:
        import dp_accounting  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "privacy cannot be accounted for: got no dp-accounting; expected dp-accounting 0.6 or "
            "newer; pip install 'keyhole[dp]'"
        ) from error
    return dp_accounting


def _unknown(what: str, got: object, allowed: tuple[str, ...]) -> InputError:
    return InputError(
        f"no such {what}: got {got!r}; expected {', '.join(map(repr, allowed))}; name the "
        f"{what} that really runs"
    )


@dataclass(frozen=True)
class PrivacySpent:
    """What a run has spent after some rounds: goes into the record of every round.

    Args:
        epsilon: upper bound; infinity if a round ran that could not be accounted for.
        unit: what is protected: one client, with all its data.
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
        budget: max epsilon to spend; None sets no bound.

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
                f"delta or budget guarantee nothing: got delta {delta}, budget {budget}; expected "
                f"delta below 1 / {mechanism.population} clients, a budget above 0; take a smaller "
                "delta, 1e-6 for instance"
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
        """Returns the epsilon of the rounds that ran, or of a run of `rounds` rounds in all."""
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
                f"a round that would spend too much privacy: got epsilon {after:.4g} after "
                f"{self._rounds + rounds} rounds; expected {self.budget:g} at delta "
                f"{self.delta:g}; stop here, or plan with more noise, smaller cohorts or fewer "
                "rounds"
            )

    def record(
        self, sampling: Sampling, *, cohort: int, arrived: int, noise_multiplier: float
    ) -> None:
        """Adds a round that ran, also one whose result was thrown away after it was seen.

        Clients that drop out change nothing: the noise was made for the planned cohort, and the sum
        is divided by it.

        Args:
            arrived: clients whose updates are in the sum.

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
        # A Poisson cohort may be larger than expected, and a client counts regardless of others;
        # no other may.
        is_small = sampling in ("poisson", "participation") or arrived <= cohort
        if not (is_known and is_noisy and is_small):
            self._unaccounted += 1
            raise InputError(
                f"a round that is not the one accounted for: got {sampling} cohort of {cohort}, "
                f"{arrived} arrived, noise {noise_multiplier}; expected {made_for.sampling} cohort "
                f"of {made_for.cohort}, no more arrived, noise {made_for.noise_multiplier} or "
                "more; make an accountant for the sampler and the noise that run; this run has no "
                "guarantee any more"
            )

    def spent(self) -> PrivacySpent:
        """Returns what the rounds so far have spent."""
        return PrivacySpent(
            self.epsilon(),
            self.delta,
            self._rounds,
            self.unit,
            self.mechanism.neighbours,
            self.mechanism.sampling,
            self.mechanism.noise_multiplier,
        )


_MAX_NOISE = 2.0**20
_TOLERANCE = 1e-3  # of the multiplier: a thousandth more noise than needed is not seen


@lru_cache(maxsize=256)  # a pure function of numbers that takes seconds
def noise_for(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    sampling: Sampling,
    population: int,
    cohort: int,
    neighbours: Neighbours,
    method: Method | None = None,
) -> float:
    """Returns the smallest noise multiplier whose `rounds` rounds stay within (epsilon, delta).

    Found by halving, to a thousandth from above. With privacy loss distributions that takes some
    seconds; the answer is kept.

    All that is not said here is as in `Mechanism`.

    Raises:
        InputError: numbers out of range, or no noise below 2^20 is enough.

    >>> run = {"sampling": "poisson", "population": 10**6, "cohort": 10**4, "method": "rdp"}
    >>> round(noise_for(2.0, 1e-8, 1000, neighbours="add-or-remove", **run), 2)
    1.23
    """
    if not epsilon > 0 or rounds < 1:
        raise _impossible(epsilon, rounds)

    def is_enough(noise: float) -> bool:
        planned = rounds if sampling == "separated" else 0
        mechanism = Mechanism(
            sampling, population, cohort, noise, neighbours, method or "", planned
        )
        return epsilon_of(mechanism, rounds, delta) <= epsilon

    high = 1.0
    while not is_enough(high):
        high *= 2
        if high > _MAX_NOISE:
            raise _impossible(epsilon, rounds)
    low = high / 2
    while is_enough(low):
        low, high = low / 2, low
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _impossible(epsilon: float, rounds: int) -> InputError:
    return InputError(
        f"a budget that no noise keeps to: got epsilon {epsilon} for {rounds} rounds; expected an "
        "epsilon above 0 for one round or more; raise epsilon or delta"
    )
