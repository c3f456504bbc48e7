"""Accounts for a run's privacy: what its rounds have told about one client.

`Account` holds what really ran against what was planned: as many clients as were to be asked, and
with correlated noise none of them back too soon (`Participation`). What a sum tells by not being
opened is in it, as the aggregation declares it.

A sum may be withheld because too few clients came (`odds_of_deciding`). Everybody sees that no
model came of such a round, and no noise covers that. Where each client is drawn for itself, one
client more can be the one with which a sum is opened. Given that exactly one was missing, which has
probability b, the two populations differ where that client is drawn, which has probability q, and
nowhere else: apart from an event of probability q b, the round is the one that was accounted for.
Told of that event, nobody learns less; so rounds cost what they cost without it, and T q b more in
delta.

Of cohorts of a fixed size nothing is to be charged: how many come does not depend on whose data one
of them has, if clients do not drop out because of their data.

**Who is drawn.** That a client may not have been drawn makes a round cheaper, but only for those
who cannot know: `Drawn`. Where cohorts are simulated in one process, the account is that of their
sampler, for a run whose cohorts stay secret. Over a service, the slice service and the aggregators
see who takes part, so that every client counts in each round that it may have been in: in all, or
where cohorts are cyclic, or devices that check in rest between two rounds, once in `separation`,
which `Attendance` holds them to. Nothing is ever counted for the drawing of devices that check in:
who waits is up to them and to the service, and no uniform sample. Where a secret of
the run draws them, those who see only models are told besides what it costs for them
(`epsilon_unseen`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, isfinite, lgamma, log, log1p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import Aggregation, about_of, check_declares_noise
from keyhole.aggregation.privacy.accountant import Accountant, Mechanism, epsilon_of
from keyhole.aggregation.privacy.mechanism import Privacy
from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.rounds.cohorts import Drawn
from keyhole.rounds.record import RoundRecord
from keyhole.sampling import UNCOUNTED, Cohorts

_NEVER = -1
_AT_FIRST = 1 << 20  # clients that there is room for before more than these are met
_APART = ("cyclic", "check-in")  # cohorts that keep two rounds of a client `separation` apart


class Participation:
    """Notes the last round of every client, and refuses those that are back too soon: less than
    `separation` rounds after their last.

    >>> took_part = Participation(population=4, separation=2)
    >>> took_part.record(np.array([0, 3]), 0)
    >>> took_part.record(np.array([1, 2]), 1)
    >>> took_part.record(np.array([0, 3]), 2)
    """

    def __init__(self, population: int, separation: int) -> None:
        if population < 1 or separation < 1:
            raise InputError(
                f"separation and population must be positive: got {separation} rounds, "
                f"{population} clients; expected 1 or more of each; pass those of the strategy and "
                "of the population"
            )
        self.separation, self._population = separation, population
        self._last = np.full(min(population, _AT_FIRST), _NEVER, np.int64)

    def __repr__(self) -> str:
        return f"Participation({self._population} clients, separation={self.separation})"

    def record(self, clients: NDArray[np.int64], round_index: int) -> None:
        """Notes a cohort, before its sum is used. Who drops out has taken part.

        Raises InputError where one of them is back too soon, or named twice, or unknown: nothing is
        noted, and the round must not be released.
        """
        is_known = bool(((clients >= 0) & (clients < self._population)).all())
        if is_known and (more := int(clients.max(initial=-1)) + 1 - len(self._last)) > 0:
            self._last = np.pad(self._last, (0, more + len(self._last)), constant_values=_NEVER)
        last = self._last[clients] if is_known else np.empty(0, np.int64)
        rested = (last == _NEVER) | (round_index - last >= self.separation)
        too_soon = int(np.count_nonzero(~rested))
        if not is_known or too_soon or len(np.unique(clients)) != len(clients):
            odd = "clients that are unknown or named twice"
            if too_soon:
                odd = f"{too_soon} of {len(clients)} clients back too soon"
            raise InputError(
                f"a cohort that the account does not know: got {odd}; expected clients "
                f"whose last round is {self.separation} rounds ago or more; draw cohorts that take "
                "turns"
            )
        self._last[clients] = round_index


def odds_of_deciding(population: int, probability: float, minimum: int) -> float:
    """Returns the probability q b that a client is in a round, and that the others are one too few.

        q b,    b = C(n - 1, t - 1) q^(t-1) (1 - q)^(n-t)

    Args:
        population: n, clients, each drawn for itself.
        probability: q, with which each takes part to the end.
        minimum: t, clients below which nothing is released.

    >>> f"{odds_of_deciding(342_477, 50 / 342_477, minimum=2):.1g}"
    '1e-24'
    >>> odds_of_deciding(2, 0.5, minimum=2)  # the other one came, alone
    0.25
    """
    others, missing = population - 1, minimum - 1
    if minimum <= 0 or missing > others or probability <= 0:
        return 0.0
    if probability >= 1:
        return float(missing == others)
    ways = lgamma(others + 1) - lgamma(missing + 1) - lgamma(others - missing + 1)
    odds = ways + missing * log(probability) + (others - missing) * log1p(-probability)
    return probability * exp(odds)


@dataclass(frozen=True)
class Account:
    """What the rounds of a run spend; the relation follows from how clients are drawn."""

    privacy: Privacy
    cohorts: Cohorts
    failure: float = 0.0
    drawn: Drawn = "simulated"
    unseen: Mechanism | None = None  # a round for those who do not see who takes part

    @staticmethod
    def of(
        privacy: Privacy,
        cohorts: Cohorts,
        aggregate: Aggregation,
        layout: Layout,
        keys_per_client: Mapping[str, int],
        drawn: Drawn = "simulated",
    ) -> Account:
        """Returns the account of a run that adds updates up in this way."""
        check_declares_noise(aggregate)
        _check_cohorts(privacy, cohorts, aggregate)
        about = about_of(aggregate)
        assert about.min_clients is not None  # `check_declares_noise`
        assert about.failure is not None
        # With the client a sum may fail, and without it: either can give it away.
        undone = 2 * about.failure(layout, keys_per_client, cohorts)
        if privacy.kind == "correlated":
            undone *= privacy.strategy(cohorts).participations / privacy.rounds
            return Account(privacy, cohorts, undone, drawn)
        if cohorts.sampling in _APART or drawn == "named":
            return Account(privacy, cohorts, undone, drawn)
        failure = undone * cohorts.asked / cohorts.population
        if cohorts.sampling == "poisson":
            minimum = max(cohorts.min_updates, about.min_clients)
            stays = (1 - cohorts.lost_before) * (1 - cohorts.lost_after)
            share = stays * cohorts.asked / cohorts.population
            failure += odds_of_deciding(cohorts.population, share, minimum)
        if drawn == "simulated":
            return Account(privacy, cohorts, failure, drawn)
        return Account(privacy, cohorts, undone, drawn, _sampled(privacy, cohorts, failure))

    def check(self, t: int) -> None:
        """Raises BudgetError if round t would spend more than there is."""
        self._after(t).check()

    def describe(self, t: int, asked: Sequence[int], arrived: int) -> dict[str, Any]:
        """Returns the fields of `PrivacySpent` after round t, with `arrived` updates in its sum; an
        epsilon without bound is None.
        """
        accountant, made_for = self._after(t), self._mechanism()
        is_poisson = self.cohorts.sampling == "poisson"
        accountant.record(
            made_for.sampling,
            cohort=made_for.cohort if is_poisson else len(set(asked)),
            arrived=arrived,
            noise_multiplier=self.privacy.noise,
        )
        spent = asdict(accountant.spent())
        told: dict[str, Any] = {
            "epsilon": _or_none(spent["epsilon"]),
            "drawn": self.drawn,
            "participations": made_for.participations(t + 1),
        }
        if self.unseen is not None:
            told["epsilon_unseen"] = _or_none(epsilon_of(self.unseen, t + 1, self.privacy.delta))
        return spent | told

    def _after(self, rounds: int) -> Accountant:
        """The accountant after `rounds` rounds, which were those of the plan: each was held against
        it when it was made, and a run only goes on with the plan it began with."""
        accountant = Accountant(self._mechanism(), self.privacy.delta, self.privacy.budget)
        made_for = accountant.mechanism
        for _ in range(rounds):
            accountant.record(
                made_for.sampling,
                cohort=made_for.cohort,
                arrived=0,
                noise_multiplier=made_for.noise_multiplier,
            )
        return accountant

    def _mechanism(self) -> Mechanism:
        cohorts, rounds = self.cohorts, self.privacy.rounds
        is_uncounted = cohorts.population == UNCOUNTED
        population = cohorts.asked if is_uncounted else cohorts.population
        made = population, cohorts.asked, self.privacy.noise
        if self.privacy.kind == "correlated":
            return Mechanism("separated", *made, "add-or-remove", "", rounds, self.failure)
        if cohorts.sampling in _APART or self.drawn != "simulated":
            known = Mechanism("participation", *made, "add-or-remove", failure=self.failure)
            return replace(known, separation=cohorts.separation)
        return _sampled(self.privacy, cohorts, self.failure)


def _sampled(privacy: Privacy, cohorts: Cohorts, failure: float) -> Mechanism:
    """A round of cohorts that nobody knows."""
    made = cohorts.population, cohorts.asked, privacy.noise
    if cohorts.sampling == "poisson":
        return Mechanism("poisson", *made, "add-or-remove", failure=failure)
    return Mechanism("fixed", *made, "replace-one", failure=failure)


def _or_none(epsilon: float) -> float | None:
    """JSON has no infinity."""
    return epsilon if isfinite(epsilon) else None


class Attendance:
    """Who took part in the rounds of a run: held against its promise before a round is applied.

    Without privacy nothing is promised, and all may come.
    """

    def __init__(
        self, privacy: Privacy | None, cohorts: Cohorts, past: Iterable[RoundRecord] = ()
    ) -> None:
        self._privacy, self._next = privacy, 0
        self._took_part: Participation | None = None
        if privacy is not None and cohorts.sampling in _APART:
            is_planned = privacy.kind == "correlated"
            separation = privacy.strategy(cohorts).separation if is_planned else cohorts.separation
            self._took_part = Participation(cohorts.population, separation)
        for record in past:
            self.admit(record)

    def admit(self, record: RoundRecord) -> None:
        """Notes a round, before its sum is used.

        Raises InputError where it was made without noise or account, or somebody is back too soon:
        it must not be applied.
        """
        if self._privacy is None:
            return
        if not record.privacy:
            raise InputError(
                f"rounds that keep no promise about a client: got round {record.round} without "
                "noise and account; expected synchronous rounds in process; leave privacy out, or "
                "let `Synchronous` make the rounds"
            )
        if self._took_part is not None:
            if record.round != self._next:
                raise InputError(
                    f"nobody knows any more who took part: got round {record.round} after "
                    f"{self._next} known ones; expected the records of all rounds, for cohorts "
                    "that take turns; restore records.jsonl, or start a new run"
                )
            self._took_part.record(np.array(record.clients, np.int64), record.round)
        self._next = record.round + 1


def _check_cohorts(privacy: Privacy, cohorts: Cohorts, aggregate: Aggregation) -> None:
    if privacy.kind == "correlated" and cohorts.sampling != "cyclic":
        raise InputError(
            f"noise and sampling that do not belong together: got {privacy.kind} noise with "
            f"{cohorts.sampling} cohorts; expected correlated noise with cyclic cohorts; change "
            "one of them: an account of another sampler would be wrong"
        )
    if cohorts.over_selection > 1 and cohorts.sampling != "fixed":
        # Who comes first keeps another out: a sum moves by 2 C, and noise is made for C.
        raise InputError(
            "cohorts in which one client takes the place of another: got over-selection of "
            f"{cohorts.over_selection:g} with {cohorts.sampling} cohorts; expected 1, or fixed "
            "cohorts, whose account is that of a client replaced; ask no more clients than are "
            "waited for"
        )
    loses = cohorts.lost_before > 0 or cohorts.lost_after > 0
    if loses and cohorts.sampling == "poisson" and not about_of(aggregate).hides_dropouts:
        raise InputError(
            "a sum that tells by not being opened who dropped out: got poisson cohorts that lose "
            "clients, added up by one server; expected cohorts of a fixed size, two servers, or no "
            "loss; change one of them: there is no account of this"
        )
