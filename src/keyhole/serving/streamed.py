"""Asynchronous rounds over the service: devices begin as others end, and send when they are done.

Each round is published after a server step, for whoever is at work. A device fetches from the
newest round and may send its update steps later: earlier rounds trail for as long, though only the
slices of the newest two stay. What is under way is stored with the step, and updates are in files,
so a trainer that is killed goes on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from keyhole.delivery.demand import Demand
from keyhole.delivery.names import DeliveryName
from keyhole.delivery.parties import PARTIES
from keyhole.delivery.records import Coding
from keyhole.delivery.ways import pregenerated_cost
from keyhole.primitives.layout import Layout
from keyhole.server.state import ServerState
from keyhole.server.updates import RowUpdate
from keyhole.serving.files.publishing import Publisher
from keyhole.serving.files.round_files import number_of
from keyhole.serving.inbox import SpoolInbox, device_name, nothing_of
from keyhole.serving.round_settings import round_settings
from keyhole.serving.summons import Summons
from keyhole.training.buffering import Buffering
from keyhole.training.client_stream import ClientStream
from keyhole.training.fate import Fate
from keyhole.training.plan import Plan
from keyhole.training.record import RoundRecord
from keyhole.training.round_machine import Dropped, Event, Refused
from keyhole.training.stream_machine import Ended, Started, StreamMachine
from keyhole.training.tally import Tally

__all__ = ["Streamed"]


@dataclass(frozen=True)
class _Version:
    """A published round: its number, and how many steps the server had made."""

    number: int
    step: int


@dataclass(frozen=True)
class _Flight:
    """A device at work.

    Args:
        client: its number.
        number: of the round in which it began; updates of earlier ones are not of this time.
        called: number of the round that it was last called to.
        until: when it is no longer waited for.
    """

    client: int
    number: int
    called: int
    until: float


@dataclass(frozen=True)
class _End:
    """What became of a device, and the round that its update is of, if it sent one."""

    fate: Fate
    round: str = ""


@dataclass(frozen=True)
class _Round:
    """The round under way.

    Args:
        t: its number.
        machine: that decides.
        stream: who begins next.
        tally: what has happened.
        cohort: who may begin with its slices: whoever was at work at any moment of it. A device
            that has just ended may have been told so before that was known.
    """

    t: int
    machine: StreamMachine
    stream: ClientStream
    tally: Tally = field(default_factory=Tally)
    cohort: dict[str, None] = field(default_factory=dict)


@dataclass
class Streamed:
    """Asynchronous rounds of a run whose clients are devices; each is one server step.

    Args:
        buffering: how they go; how long a device takes is up to the device.
        publisher: of the directory that the service serves.
        inbox: where updates arrive.
        summons: how devices learn of a round.
        seconds: after which a device that has begun is no longer waited for.
        coding: of slices.
        fetched: how devices were told to fetch them.
        poll: seconds between two looks at the inbox.
        stop: once set, waiting ends with KeyboardInterrupt; the round goes on when the run does.
        on_arrival: called with the number of updates that count, and that are waited for.
        clock: monotonic seconds.
    """

    buffering: Buffering
    publisher: Publisher
    inbox: SpoolInbox
    summons: Summons
    seconds: float
    coding: Coding
    fetched: DeliveryName
    poll: float
    stop: threading.Event
    on_arrival: Callable[[int, int], None]
    clock: Callable[[], float]
    _drawn: int = 0
    _flights: dict[int, _Flight] = field(default_factory=dict, repr=False)  # as they began
    _versions: dict[str, _Version] = field(default_factory=dict, repr=False)
    _told: dict[int, _End] = field(default_factory=dict, repr=False)  # what the summons heard
    _again: list[int] = field(default_factory=list, repr=False)  # at work when a run was stopped

    def next(
        self, t: int, state: ServerState, plan: Plan
    ) -> tuple[tuple[RowUpdate, ...] | None, RoundRecord]:
        """Publishes round t and lets devices work until a step is due; see `Served.next`.

        Updates that arrived after the last step count first. If they are enough for another, there
        is nothing to publish.
        """
        machine = StreamMachine(self.buffering, state.steps, len(self._flights))
        one = _Round(t, machine, ClientStream(plan, self._drawn))
        told = self.inbox.open(t, (), state.layout, plan)
        before = self.dump()
        try:
            self._look(one)
            if machine.closed is None:
                self._work(one, state, {**round_settings(t, plan), **told})
        except BaseException:  # the round is made again: whoever has ended must not be forgotten
            self.load(before)
            raise
        self._drawn = one.stream.drawn
        assert machine.closed is not None
        self.publisher.close_round(self._recent(state.steps + (machine.closed == "goal")))
        self._add_costs(one.tally, state.layout)
        return one.tally.close(t, state.steps, machine.closed, state.layout, plan)

    def dump(self) -> bytes:
        """Who is at work and on what, to be stored with a step; their updates are in files."""
        flights = [[flight.client, flight.number] for flight in self._flights.values()]
        versions = {name: [v.number, v.step] for name, v in self._versions.items()}
        told = {"drawn": self._drawn, "flights": flights, "versions": versions}
        return json.dumps(told).encode()

    def load(self, data: bytes) -> None:
        """Goes on from what `dump` returned; devices are given their time anew."""
        told = json.loads(data)
        until = self.clock() + self.seconds
        self._drawn = told["drawn"]
        self._flights = {c: _Flight(c, t, t, until) for c, t in told["flights"]}
        self._again, self._told = list(self._flights), {}
        self._versions = {name: _Version(*version) for name, version in told["versions"].items()}

    def _work(self, one: _Round, state: ServerState, settings: Mapping[str, object]) -> None:
        """Lets devices begin and end until a step is due."""
        began = self._begin(one)
        round_id = self._publish(one, state, settings)
        machine = one.machine
        try:
            while machine.closed is None:
                if began:
                    self.summons.call(round_id, one.t, began, self.seconds, may_miss=True)
                for called_to, event in self.summons.news(self.clock()):
                    self._hear(called_to, event)
                self._look(one)
                self.on_arrival(machine.counted, self.buffering.goal)
                if machine.closed is None and (began := self._begin(one)):
                    self.publisher.invite(list(one.cohort))
                elif machine.closed is None and self.stop.wait(self.poll):
                    raise KeyboardInterrupt
        finally:
            self.summons.over()

    def _begin(self, one: _Round) -> list[int]:
        """Draws as many clients as should be at work; returns whom to call. Those of a run that
        goes on are called again: whoever was to tell them may be gone."""
        busy = one.tally.busy(self._flights)
        began = one.stream.take(one.machine.fill().clients, busy)
        until = self.clock() + self.seconds
        self._flights |= {client: _Flight(client, one.t, one.t, until) for client in began}
        one.machine.handle(Started(len(began)))
        one.cohort.update(dict.fromkeys(map(device_name, self._flights)))
        again, self._again = [c for c in self._again if c in self._flights], []
        for client in again:
            self._flights[client] = replace(self._flights[client], called=one.t)
        return again + began

    def _publish(self, one: _Round, state: ServerState, settings: Mapping[str, object]) -> str:
        """Publishes round t for everyone at work; returns its name."""
        published = self.publisher.publish_state(
            state,
            number=one.t,
            coding=self.coding,
            cohort=list(one.cohort),
            trailing=self._recent(state.steps),
            settings=settings,
        )
        # Too old to be taken, but taken perhaps a moment before: these are looked at once more.
        kept = self._recent(state.steps - 1)
        self._versions = {name: self._versions[name] for name in kept}
        self._versions[published.id] = _Version(one.t, state.steps)
        self.inbox.begin(published.id, kept)
        return published.id

    def _recent(self, step: int) -> list[str]:
        """Rounds of which a device at work may send an update that counts after so many steps."""
        first = min((flight.number for flight in self._flights.values()), default=inf)
        return [
            name
            for name, version in self._versions.items()
            if version.number >= first and step - version.step <= self.buffering.most_staleness
        ]

    def _look(self, one: _Round) -> None:
        """Tells the machine who has ended, in the order in which they began, until a step is due:
        the others end in the next round."""
        now = self.clock()
        arrived = {name: set(self.inbox.devices(name)) for name in self._versions}
        for flight in list(self._flights.values()):
            if one.machine.closed is not None:
                return
            end = self._end_of(flight, arrived, now)
            if end is not None:
                del self._flights[flight.client]
                self._told.pop(flight.client, None)
                visit = nothing_of(flight.client, end.fate)
                if end.fate == "sent":
                    visit = self.inbox.visit(end.round, flight.client, "sent", self.coding)
                version = self._versions.get(end.round)
                step = 0 if version is None else version.step
                one.tally.end(visit, one.machine.handle(Ended(step, visit.fate == "sent")))

    def _hear(self, round_id: str, event: Event) -> None:
        """A device is said to be gone: the one at work, if it was called to that round."""
        flight = self._flights.get(event.client) if isinstance(event, Dropped | Refused) else None
        if flight is not None and number_of(round_id) == flight.called:
            fate: Fate = "refused" if isinstance(event, Refused) else "lost_before"
            self._told[flight.client] = _End(fate)

    def _end_of(
        self, flight: _Flight, arrived: Mapping[str, Collection[str]], now: float
    ) -> _End | None:
        """What became of a device; None while it is at work."""
        device = device_name(flight.client)
        for name, version in self._versions.items():
            if version.number >= flight.number and device in arrived[name]:
                return _End("sent", name)
        return self._told.get(flight.client, _End("lost_before") if now >= flight.until else None)

    def _add_costs(self, tally: Tally, layout: Layout) -> None:
        """What devices that ended had fetched, and what went wrong among them."""
        demand: Demand = {visit.client: visit.keys for visit in tally.ended if visit.keys}
        cost = pregenerated_cost(layout, demand, self.coding)
        tally.costs.append(replace(cost, seen_by=PARTIES[self.fetched].seen_by))
        tally.incidents += self.summons.incidents()
