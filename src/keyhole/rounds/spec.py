"""Plans a run: what stays the same in every round, and what two runs must share to be one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args

import numpy as np

from keyhole.aggregation.base import Aggregation, about_of
from keyhole.aggregation.plain import PLAIN
from keyhole.aggregation.privacy.mechanism import Privacy, PrivateSum
from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import OnDemand
from keyhole.errors import InputError
from keyhole.identity import identity_of
from keyhole.keys.budget import DeviceClass
from keyhole.primitives.layout import Layout
from keyhole.rounds.account import Account
from keyhole.rounds.clients import check_keys_per_client
from keyhole.rounds.machine import Buffering
from keyhole.sampling import Cohorts, check_count
from keyhole.server.row_sums import Over


def exponential(rng: np.random.Generator) -> float:
    """Clients take a random time of mean 1: most are quick, some take long."""
    return float(rng.exponential())


@dataclass(frozen=True)
class Plan:
    """What stays the same in every round of a run.

    Args:
        cohorts: who takes part.
        keys_per_client: key space -> most keys of a client; a client may choose fewer.
        devices: kinds of device; each client has one for good, and its memory bounds its keys too.
        seed: of everything random.
        trial: which repetition; both arms of a comparison use the same.
        over: what sums are divided by: the cohort (Eq. 5) or those who chose the key.
        delivery: how slices travel.
        aggregate: how updates are added up.
        privacy: what the run promises about one client; None promises nothing.
        buffering: asynchronous rounds; None for synchronous ones.
        shared_keys: all clients of a round draw their keys from the same random numbers: random
            keys are the same for everybody, "fixed" in section 5.3, while keys that only depend on
            a client's data stay as they are. Of asynchronous rounds, those draw the same who
            start in one round.
        for_devices: what devices are told of the run, as `RunSpec.for_devices` returns it.

    Raises:
        InputError: `over` or a number is not allowed, or asynchronous rounds do not go with the
            rest.
    """

    cohorts: Cohorts
    keys_per_client: Mapping[str, int]
    devices: tuple[DeviceClass, ...] = ()
    seed: int = 0
    trial: int = 0
    over: Over = "cohort"
    delivery: Delivery = field(default_factory=OnDemand)
    aggregate: Aggregation = PLAIN
    privacy: Privacy | None = None
    buffering: Buffering | None = None
    shared_keys: bool = False
    for_devices: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.over not in get_args(Over):
            raise InputError(
                "no such divisor", got=self.over, allowed=get_args(Over), fix="choose one of them"
            )
        for name in ("seed", "trial"):
            check_count(name, getattr(self, name), 0)
        if self.buffering is not None:
            self._check_stream(self.buffering)
        for name, m in self.keys_per_client.items():
            check_count(f"keys_per_client of {name!r}", m, 0)

    @property
    def is_in_clear(self) -> bool:
        """Whether updates are added up as they are, so that sums of some of them can be, too."""
        return self.privacy is None and about_of(self.aggregate).is_in_clear

    def for_clients(self) -> Plan:
        """Returns it without what the server alone needs, so that it can be sent to clients."""
        return replace(self, delivery=OnDemand(), aggregate=PLAIN, privacy=None, buffering=None)

    def describe(self) -> dict[str, str]:
        """Returns the plan as text; two plans of one text train alike.

        Raises:
            InputError: a part of the plan has no identity; see `identity_of`.
        """
        return {each.name: _text(getattr(self, each.name)) for each in fields(self)}

    def account(self, layout: Layout) -> Account | None:
        """What rounds spend; None where nothing is promised."""
        if self.privacy is None:
            return None
        keys = self.keys_per_client
        return Account.of(self.privacy, self.cohorts, self.aggregate, layout, keys)

    def check(self, layout: Layout) -> None:
        """Raises InputError unless the plan fits the model, BudgetError if no round fits the
        budget."""
        check_keys_per_client(layout, self.keys_per_client)
        self._check_sums(layout)

    def _check_stream(self, buffering: Buffering) -> None:
        """Raises InputError where rounds cannot be asynchronous."""
        cohorts, limit = self.cohorts, max(buffering.concurrency, buffering.goal)
        about = about_of(self.aggregate)
        if not (self.is_in_clear and about.is_served):
            raise InputError(
                "asynchronous rounds are added up in the clear, without noise",
                got="a secure sum or privacy",
                allowed="neither",
                fix="use synchronous rounds",
            )
        if cohorts.sampling != "fixed":
            raise InputError(
                "asynchronous rounds take clients one after the other",
                got=f"{cohorts.sampling} sampling",
                allowed="fixed",
                fix="use synchronous rounds for other sampling",
            )
        if limit > cohorts.population:
            raise InputError(
                "asynchronous rounds need more clients than there are",
                got=f"{limit} at work, or waited for",
                allowed=f"1..{cohorts.population}",
                fix="choose a smaller concurrency or cohort",
            )

    def _check_sums(self, layout: Layout) -> None:
        """Rings that are too small, and promises that cannot be kept, show before the first round
        is made."""
        ring = about_of(self.aggregate).ring
        if ring is not None:
            ring.for_clients(self.cohorts.asked)
        account = self.account(layout)
        if self.privacy is not None and account is not None:
            account.check(0)
            private = PrivateSum(self.aggregate, self.privacy, self.cohorts)
            private.check(layout, self.keys_per_client, self.over)


def _text(value: Any) -> str:
    """A value in words that do not depend on where it lies in memory."""
    if is_dataclass(value) and type(value).__module__.startswith("keyhole."):
        counted = [f.name for f in fields(value) if f.compare and f.init]
        inner = ", ".join(f"{name}={_text(getattr(value, name))}" for name in counted)
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_text(value[name])}" for name in sorted(value))
    if isinstance(value, tuple):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else identity_of(value)
