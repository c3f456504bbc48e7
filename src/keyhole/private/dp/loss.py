"""What rounds of one mechanism cost: epsilon for a delta, by `dp-accounting`.

The library's events say less than they seem to. What each of our cases becomes:

| sampling | neighbours | event |
|---|---|---|
| poisson | add-or-remove | Poisson-sampled Gaussian with z |
| poisson | replace-one | the same; its PLD shifts by -C and +C itself (RDP does not know it) |
| fixed | replace-one | drawn without replacement, with **z / 2** (RDP; PLD: truncated Poisson) |
| fixed | add-or-remove | Poisson-sampled Gaussian with **z / 2** |
| separated | add-or-remove | one Gaussian with z for the whole run, nothing gained by sampling |
| separated | replace-one | one Gaussian with **z / 2** |

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
from math import inf
from typing import Any, Literal, get_args

import numpy as np

from keyhole.errors import InputError

__all__ = ["Mechanism", "Method", "Neighbours", "Sampling", "epsilon_of"]

Sampling = Literal["poisson", "fixed", "separated"]
"""How cohorts come about. poisson: every client takes part or not, for itself, with probability
cohort / population, so that the size of a cohort varies. fixed: exactly `cohort` clients, drawn
without replacement. separated: in any way, but no client twice within a number of rounds."""

Neighbours = Literal["add-or-remove", "replace-one"]
"""Which two populations may not be told apart: with and without one client, or with one client's
data exchanged for any other data. Where cohorts are scheduled ("separated"), a client that is not
there keeps its turns, and adds nothing in them."""

Method = Literal["pld", "rdp"]
"""Privacy loss distributions (tight, up to a second a query) or Renyi divergences (looser)."""

# Rounded up to multiples of the interval, a loss is bounded from above with any of them; the wide
# one is off by thousandths and ten times as fast. Below this epsilon we take the narrow one.
_WIDE, _NARROW, _LARGE_EPSILON = 1e-3, 1e-4, 1.0


@dataclass(frozen=True)
class Mechanism:
    """What a round does, as far as privacy is concerned: a noisy sum over a cohort of clients.

    Args:
        sampling: how the cohort came about.
        population: clients that cohorts are drawn from.
        cohort: planned size of a cohort; under Poisson sampling the size expected.
        noise_multiplier: z: standard deviation of the noise on the sum over the clipping norm. Of
            correlated noise, see `correlated.py`; of thresholded rows, see `adafest.py`.
        neighbours: the relation that the guarantee is about.
        method: how losses are composed; "" takes "rdp" for fixed cohorts under replace-one (what
            the library has a proof for) and "pld" else.
        planned_rounds: of a separated run, for which its noise was scaled; 0 for the others, which
            may go on as long as there is budget.
        failure: the probability, a round, of an event in which the round tells about the client
            what noise does not cover (see `withholding.py`): taken off delta, round by round, of a
            separated run for all planned rounds at once.

    Raises:
        InputError: numbers that cannot be, or a method without an answer.
    """

    sampling: Sampling
    population: int
    cohort: int
    noise_multiplier: float
    neighbours: Neighbours
    method: Method | Literal[""] = ""
    planned_rounds: int = 0
    failure: float = 0.0

    def __post_init__(self) -> None:
        for name, kinds in (("sampling", Sampling), ("neighbours", Neighbours)):
            if getattr(self, name) not in get_args(kinds):
                raise _unknown(name, getattr(self, name), get_args(kinds))
        if not 1 <= self.cohort <= self.population or not 0 <= self.noise_multiplier < inf:
            raise InputError(
                "a mechanism that cannot be",
                got=f"{self.cohort} of {self.population} clients, noise {self.noise_multiplier}",
                allowed="1 to all clients, and noise of 0 or more, finite",
                fix="check cohort, population and noise_multiplier",
            )
        if not 0 <= self.failure <= 1:
            raise _unknown("probability", self.failure, ("0 to 1",))
        if (self.sampling == "separated") != (self.planned_rounds >= 1):
            raise InputError(
                "a separated run is planned as a whole, others are not",
                got=f"{self.planned_rounds} planned rounds with {self.sampling} sampling",
                allowed="1 or more if separated, else 0",
                fix="pass the rounds of the strategy of the correlated noise",
            )
        if not self.method:
            object.__setattr__(self, "method", "rdp" if self._is_replaced_of_fixed else "pld")
        if self.method not in get_args(Method):
            raise _unknown("method", self.method, get_args(Method))
        if (self.sampling, self.neighbours, self.method) == ("poisson", "replace-one", "rdp"):
            raise _unknown("method", "rdp for poisson and replace-one", ("pld",))

    @property
    def _is_replaced_of_fixed(self) -> bool:
        return self.sampling == "fixed" and self.neighbours == "replace-one"

    @property
    def probability(self) -> float:
        """With which a given client is in a given cohort, where cohorts are drawn."""
        return self.cohort / self.population

    @property
    def accounted_multiplier(self) -> float:
        """Standard deviation over the most that the sum can move: what the library is told."""
        is_whole = self.sampling == "poisson" or (
            self.sampling == "separated" and self.neighbours == "add-or-remove"
        )
        return self.noise_multiplier if is_whole else self.noise_multiplier / 2


def epsilon_of(mechanism: Mechanism, rounds: int, delta: float) -> float:
    """The epsilon of `rounds` rounds for a delta: an upper bound.

    A separated mechanism is charged as a whole with its first round, since its noise was scaled for
    all rounds in which a client may take part; beyond the rounds it was planned for, epsilon is
    infinite.

    Raises:
        InputError: a delta outside (0, 1), or `dp-accounting` is not installed.

    >>> paper = Mechanism("fixed", 342_477, 50, 1.0, "replace-one")
    >>> round(epsilon_of(paper, 1500, 1e-6), 2)
    3.88
    """
    if not 0 < delta < 1:
        raise InputError(
            "a delta that cannot be",
            got=delta,
            allowed="between 0 and 1",
            fix="take less than one over the number of clients",
        )
    if rounds <= 0:
        return 0.0
    is_beyond = mechanism.sampling == "separated" and rounds > mechanism.planned_rounds
    if mechanism.noise_multiplier == 0 or is_beyond:
        return inf
    left = delta - (mechanism.planned_rounds or rounds) * mechanism.failure
    return _epsilon(replace(mechanism, failure=0.0), rounds, left) if left > 0 else inf


@lru_cache(maxsize=1 << 14)  # a pure function of numbers, asked again in every round
def _epsilon(mechanism: Mechanism, rounds: int, delta: float) -> float:
    z = mechanism.accounted_multiplier
    if mechanism.sampling == "separated":
        # Far from where delta is met, the search of the library takes logarithms of zero.
        with np.errstate(divide="ignore"):
            return float(_library().get_epsilon_gaussian(z, delta))
    if mechanism.method == "rdp":
        return _epsilon_by_rdp(mechanism, rounds, delta)
    wide = _composed(mechanism, _WIDE, rounds, delta)
    return wide if wide > _LARGE_EPSILON else _composed(mechanism, _NARROW, rounds, delta)


def _epsilon_by_rdp(mechanism: Mechanism, rounds: int, delta: float) -> float:
    orders, divergences = _divergences_of_a_round(mechanism)
    return float(_library().rdp.compute_epsilon(orders, rounds * divergences, delta)[0])


@lru_cache(maxsize=64)  # a third of a second for cohorts of a fixed size
def _divergences_of_a_round(mechanism: Mechanism) -> tuple[Any, Any]:
    dp = _library()
    noise = dp.GaussianDpEvent(mechanism.accounted_multiplier)
    if mechanism.neighbours == "replace-one":
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(mechanism.population, mechanism.cohort, noise)
    else:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(mechanism.probability, noise)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event)
    return accountant.orders, accountant.rdp


def _composed(mechanism: Mechanism, interval: float, rounds: int, delta: float) -> float:
    loss = _loss_of_a_round(mechanism, interval)
    return float(loss.self_compose(rounds).get_epsilon_for_delta(delta))


@lru_cache(maxsize=8)  # a second to make, some megabytes to keep
def _loss_of_a_round(mechanism: Mechanism, interval: float) -> Any:
    dp = _library()
    losses = dp.pld.privacy_loss_distribution
    relations = dp.NeighboringRelation
    if mechanism.sampling == "fixed" and mechanism.neighbours == "replace-one":
        # Everyone is drawn, then all but a cohort put aside: cohorts of a fixed size. This one
        # takes the multiplier as it is and halves it itself.
        return losses.from_truncated_subsampled_gaussian_mechanism(
            mechanism.population,
            1.0,
            mechanism.cohort,
            mechanism.noise_multiplier,
            value_discretization_interval=interval,
            neighboring_relation=relations.REPLACE_ONE,
        )
    is_replaced = mechanism.neighbours == "replace-one"
    return losses.from_gaussian_mechanism(
        mechanism.accounted_multiplier,
        value_discretization_interval=interval,
        sampling_prob=mechanism.probability,
        neighboring_relation=relations.REPLACE_ONE if is_replaced else relations.ADD_OR_REMOVE_ONE,
    )


def _library() -> Any:
    try:
        import dp_accounting  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "privacy cannot be accounted for",
            got="no dp-accounting",
            allowed="dp-accounting 0.6 or newer",
            fix="pip install 'keyhole[dp]'",
        ) from error
    return dp_accounting


def _unknown(what: str, got: object, allowed: tuple[str, ...]) -> InputError:
    return InputError(
        f"no such {what}",
        got=repr(got),
        allowed=", ".join(map(repr, allowed)),
        fix=f"name the {what} that really runs",
    )
