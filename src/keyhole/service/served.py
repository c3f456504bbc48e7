"""Runs rounds over the service: published for devices, closed by the round machine, added up.

Everything that counts is in files: the published round, and each update before it is acknowledged.
A server or a trainer that is killed goes on with the same round. Where all devices answer, the
bytes of the model are those of a run in process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import inf

from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.records import PLAIN, Coding
from keyhole.errors import InputError
from keyhole.primitives.layout import Layout
from keyhole.rounds.clients import Clients
from keyhole.rounds.machine import Answered, Buffering, Elapsed, RoundMachine
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import CohortResults, Executor, check_budget, record_round, terms_of
from keyhole.rounds.spec import Plan
from keyhole.sampling import sample_cohort
from keyhole.server.row_sums import RowUpdate
from keyhole.server.state import ServerState
from keyhole.service.inbox import CheckIns, Inbox, SpoolInbox, Summons, round_settings
from keyhole.service.publishing import Publisher
from keyhole.service.streamed import Streamed
from keyhole.wire.assignment import device_name


@dataclass
class Served:
    """Rounds of a run whose clients are devices of the slice service.

    Args:
        publisher: of the directory that the service serves.
        inbox: where updates arrive.
        summons: how devices learn of a round.
        seconds: after which a round closes with the updates that are there; of asynchronous ones,
            after which a device that has begun is no longer waited for.
        coding: of slices.
        fetched: how devices were told to fetch them: what the record says of who learns keys.
        poll: seconds between two looks at the inbox.
        stop: once set, waiting ends with KeyboardInterrupt; the round goes on when the run does.
        on_arrival: called with the number of updates that are there, and that are waited for.
        clock: monotonic seconds.

    Attributes:
        goes_on: whether the next round to be published is the first of a run that was stopped.
            Rounds that came to nothing are not stored, so newer ones may be published already.
    """

    publisher: Publisher
    inbox: Inbox
    summons: Summons = field(default_factory=CheckIns)
    seconds: float = inf
    coding: Coding = PLAIN
    fetched: Delivery = field(default_factory=Pregenerated)
    poll: float = 0.05
    stop: threading.Event = field(default_factory=threading.Event)
    on_arrival: Callable[[int, int], None] = lambda here, goal: None
    clock: Callable[[], float] = time.monotonic
    goes_on: bool = field(default=False, init=False, repr=False)
    _streamed: Streamed | None = field(default=None, repr=False)
    _under_way: bytes = field(default=b"", repr=False)

    def next(
        self, t: int, state: ServerState, clients: Clients, plan: Plan, execute: Executor
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Publishes round t, waits for its devices, and adds up what they sent.

        Args:
            t: the round.
            state: what the server holds; read only.
            clients: the population; only its size counts, devices bring their own data.
            plan: of the run. How many drop out is up to the devices.
            execute: not used: devices train.

        Returns:
            As `run_round` does.
        """
        if plan.buffering is not None:
            return self._stream(t, plan.buffering).next(t, state, plan)
        check_budget(t, state, plan)
        asked = sample_cohort(plan.cohorts, plan.seed, plan.trial, t)
        told = self.inbox.open(t, asked, state.layout, plan)
        published = self.publisher.publish_state(
            state,
            number=t,
            coding=self.coding,
            cohort=[device_name(client) for client in asked],
            may_go_back=self.goes_on,
            settings={**round_settings(t, plan), **told},
        )
        self.goes_on = False
        self.inbox.begin(published.id)
        terms = terms_of(plan.cohorts, asked, self.seconds)
        self.summons.call(published.id, t, asked, self.seconds)
        machine = RoundMachine(terms, asked, self.clock())  # time to gather devices does not count
        try:
            self._watch(machine, published.id)
        finally:
            self.summons.over()
        self.publisher.close_round()
        gathered = self.inbox.add_up(published.id, machine.outcomes, self.coding)
        assert machine.closed is not None
        incidents = [*self.summons.incidents(), *gathered.incidents]
        cost = replace(gathered.cost, seen_by=self.fetched.about.leaks)
        results = CohortResults(gathered.results, cost, machine.closed, incidents=incidents)
        record = record_round(t, state, plan, results, gathered.summed)
        return gathered.summed.rows, record

    def dump(self) -> bytes:
        """What is under way between rounds: nothing but in asynchronous ones."""
        return b"" if self._streamed is None else self._streamed.dump()

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned."""
        self._streamed, self._under_way, self.goes_on = None, data, True

    def _stream(self, t: int, buffering: Buffering) -> Streamed:
        """What makes the rounds of an asynchronous run, with what was under way when it stopped."""
        if not isinstance(self.inbox, SpoolInbox):
            raise InputError(
                "asynchronous rounds are added up in the clear",
                got="updates that go elsewhere",
                allowed="updates that go to the service",
                fix="use synchronous rounds, or no aggregators",
            )
        if self._streamed is None or t == 0:  # a run begins with nobody at work
            self._streamed = Streamed(self, self.inbox, buffering)
            under_way, self._under_way = self._under_way, b""
            if under_way:
                self._streamed.load(under_way)
        return self._streamed

    def _watch(self, machine: RoundMachine, round_id: str) -> None:
        """Tells the machine what arrives until it closes, and what came too late.

        A round that was closed before the run was killed takes no more updates. What has arrived
        between two looks has arrived by the earlier of them, as far as the machine is concerned:
        an update that was acknowledged before the deadline is not late because nobody looked.
        """
        arrivals = _Arrivals(machine)
        looked = self.clock()
        while machine.closed is None:
            now = self.clock()
            is_over = now >= machine.deadline or self.inbox.is_closed(round_id)
            here = self.inbox.close(round_id) if is_over else self.inbox.devices(round_id)
            arrivals.tell(here, looked)
            for called_to, event in self.summons.news(looked):
                if called_to == round_id:
                    machine.handle(event)
            if is_over:
                machine.handle(Elapsed(inf))
            self.on_arrival(len(machine.taken), machine.terms.goal)
            if machine.closed is None and self.stop.wait(self.poll):
                raise KeyboardInterrupt
            looked = now
        arrivals.tell(self.inbox.close(round_id), inf)


class _Arrivals:
    """Tells a machine of each update once, under the number of its client."""

    def __init__(self, machine: RoundMachine) -> None:
        self._machine = machine
        self._clients = {device_name(client): client for client in machine.asked}
        self._told: set[str] = set()

    def tell(self, here: Iterable[str], now: float) -> None:
        """These devices' updates are here; anyone who was not asked is passed over."""
        news = (set(here) - self._told) & self._clients.keys()
        self._told |= news
        for name in sorted(news):
            self._machine.handle(Answered(self._clients[name], now))
