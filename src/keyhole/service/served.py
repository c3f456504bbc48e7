"""Runs rounds over the service: published for devices, closed by the round machine, added up.

Everything that counts is in files: the published round, and each update before it is acknowledged.
A server or a trainer that is killed goes on with the same round. Where all devices answer, the
bytes of the model are those of a run in process.

In asynchronous rounds devices begin as others end. Each is published after a server step, for the
devices at work. A device fetches from the newest round and may send its update steps later: earlier
rounds trail for as long, though only the slices of the newest two stay.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import ClassVar

from keyhole.aggregation.base import about_of
from keyhole.delivery.base import Delivery
from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import InputError
from keyhole.files import kept_secret
from keyhole.keys.choice import KeyUsers
from keyhole.primitives.layout import Layout
from keyhole.rounds.asynchronous import AsyncRound
from keyhole.rounds.clients import Clients
from keyhole.rounds.cohorts import SECRET_BYTES, Draws
from keyhole.rounds.machine import (
    Answered,
    Buffering,
    Dropped,
    Elapsed,
    Event,
    Refused,
    RoundMachine,
    StreamMachine,
    terms_of,
)
from keyhole.rounds.norms import KeptNorms
from keyhole.rounds.round import (
    CohortResults,
    Executor,
    Made,
    check_budget,
    record_round,
    with_frozen,
)
from keyhole.rounds.spec import RunParts
from keyhole.sampling import ClientStream
from keyhole.server.state import ServerState
from keyhole.service.at_work import AtWork, End, StreamRound, Version
from keyhole.service.inbox import (
    Asks,
    CheckIns,
    Gathered,
    Inbox,
    SpoolInbox,
    Summons,
    Waiting,
    nothing_of,
    round_settings,
    seen_at_service,
    with_maxima,
)
from keyhole.service.lobby import Lobby
from keyhole.service.numbering import Numbering
from keyhole.service.publishing import Publisher
from keyhole.wire.assignment import device_name
from keyhole.wire.settings import AGGREGATION_SETTING, DELIVERY_SETTING

_MAX_TRAILING = 256  # rounds; more only trail where round after round ends without a step


@dataclass
class Streamed:
    """Asynchronous rounds of a run whose clients are devices; each is one server step."""

    served: Served
    inbox: SpoolInbox
    buffering: Buffering  # how rounds go; how long a device takes is up to the device
    _drawn: int = 0
    _at_work: dict[int, AtWork] = field(default_factory=dict, repr=False)  # as they began
    _versions: dict[str, Version] = field(default_factory=dict, repr=False)
    _heard: dict[int, End] = field(default_factory=dict, repr=False)  # from the summons
    _again: list[int] = field(default_factory=list, repr=False)  # to be told again

    def next(self, t: int, state: ServerState, clients: Clients, parts: RunParts) -> Made:
        """Publishes round t and lets devices work until a step is due; see `Served.next`.

        Updates that arrived after the last step count first. If they are enough for another, there
        is nothing to publish.
        """
        machine = StreamMachine(self.buffering, state.steps, len(self._at_work))
        stream = ClientStream(parts.cohorts, parts.draw_cohort, self._drawn)
        this = StreamRound(t, machine, stream, clients)
        settings = self.inbox.open(t, (), state.layout, parts)
        before = self.dump()
        try:
            if not self._again:  # else devices may be at work in this round already
                self._look(this)
            if machine.closed is None:
                told = self.served.settings(t, parts, clients.users)
                self._work(this, state, {**told, **settings})
        except BaseException:  # the round is made again: anyone who has ended must not be forgotten
            self.load(before)
            raise
        self._drawn = this.stream.drawn
        why, steps = machine.closed, state.steps
        assert why is not None
        self._forget(steps + (why == "goal"))
        self._add_costs(this.async_round, state.layout)
        return this.async_round.close(t, steps, why, state.layout, parts)

    def dump(self) -> bytes:
        """Returns who is at work and on what, to be stored with a step; their updates are in
        files."""
        at_work = [[each.client, each.number] for each in self._at_work.values()]
        versions = {name: [v.number, v.step] for name, v in self._versions.items()}
        found = {"drawn": self._drawn, "at_work": at_work, "versions": versions}
        return json.dumps(found).encode()

    def load(self, data: bytes) -> None:
        """Goes on from what `dump` returned: those at work are told again, and given their time
        again.
        """
        try:
            found = json.loads(data)
        except ValueError as error:
            raise InputError(
                "the run has clients at work in process: got devices; expected clients in process; "
                "go on as it was started"
            ) from error
        self._drawn = found["drawn"]
        self._at_work = {c: AtWork(c, t, t) for c, t in found["at_work"]}
        self._versions = {name: Version(*version) for name, version in found["versions"].items()}
        self._again, self._heard = list(self._at_work), {}

    def _work(self, this: StreamRound, state: ServerState, settings: Mapping[str, object]) -> None:
        """Lets devices begin and end until a step is due."""
        served, machine = self.served, this.machine
        began = self._begin(this)
        round_id = self._publish(this, state, settings)
        try:
            while machine.closed is None:
                self._call(round_id, this.t, began)
                for called_to, event in served.summons.news(served.clock()):
                    self._hear(called_to, event)
                self._look(this)
                at_work = list(map(device_name, self._at_work))
                goal = self.buffering.goal
                served.on_arrival(Waiting(this.t, machine.counted, goal, at_work, round_id))
                began = [] if machine.closed is not None else self._begin(this)
                if began:
                    served.publisher.invite(list(this.cohort))
                is_waiting = machine.closed is None and not began
                if served.stop.wait(served.poll if is_waiting else 0.0) and machine.closed is None:
                    raise KeyboardInterrupt
        finally:
            served.summons.over()

    def _begin(self, this: StreamRound) -> list[int]:
        """Draws as many clients as should be at work; returns whom to call."""
        busy = this.async_round.busy(self._at_work)
        began = this.stream.take(this.machine.vacant, busy)
        self._at_work |= {client: AtWork(client, this.t, this.t) for client in began}
        this.machine.start(len(began))
        this.cohort.update(dict.fromkeys(map(device_name, self._at_work)))
        again, self._again = [client for client in self._again if client in self._at_work], []
        return again + began

    def _publish(
        self, this: StreamRound, state: ServerState, settings: Mapping[str, object]
    ) -> str:
        """Publishes round t for everyone at work; returns its name."""
        publisher, trailing = self.served.publisher, self._recent(state.steps)
        number = self.served.numbering.of(this.t)
        # A device that was let in before the run was stopped stays so.
        this.cohort.update(dict.fromkeys(publisher.cohort_of(number) or ()))
        published = publisher.publish_state(
            state,
            frozen=this.clients.frozen_state,
            number=number,
            coding=self.served.coding,
            cohort=list(this.cohort),
            trailing=trailing,
            may_go_back=self.served.goes_on,
            settings=settings,
        )
        self.served.goes_on = False
        # Uploads of rounds that are stored as under way stay until another step is stored.
        self.inbox.begin(published.id, list(self._versions))
        self._versions[published.id] = Version(this.t, state.steps)
        return published.id

    def _call(self, round_id: str, t: int, began: Collection[int]) -> None:
        """Tells devices of a round; from then on they are waited for so long."""
        if not began:
            return
        served = self.served
        served.summons.call(round_id, t, list(began), served.seconds, may_miss=True)
        until = served.clock() + served.seconds
        for client in began:
            self._at_work[client] = replace(self._at_work[client], called=t, until=until)

    def _forget(self, step: int) -> None:
        """Says which rounds trail, after this many steps. Rounds that are too old for that stay for
        another look: an update may have been taken a moment before."""
        self.served.publisher.close_round(self._recent(step))
        self._versions = {name: self._versions[name] for name in self._recent(step - 1)}

    def _recent(self, step: int) -> list[str]:
        """Rounds of which a device at work may send an update that counts after this many steps."""
        first = min((each.number for each in self._at_work.values()), default=inf)
        recent = [
            name
            for name, version in self._versions.items()
            if version.number >= first and step - version.step <= self.buffering.max_staleness
        ]
        return recent[-_MAX_TRAILING:]

    def _look(self, this: StreamRound) -> None:
        """Ends those who have ended, in the order in which they began, until a step is due: the
        others end in the next round."""
        now = self.served.clock()
        arrived = {name: set(self.inbox.devices(name)) for name in self._versions}
        refused = {name: set(self.inbox.refused(name)) for name in self._versions}
        for each in list(self._at_work.values()):
            end = None
            if this.machine.closed is None:
                end = self._end_of(each, arrived, refused, now)
            if end is not None:
                self._end(each.client, end, this)

    def _end(self, client: int, end: End, this: StreamRound) -> None:
        del self._at_work[client]
        self._heard.pop(client, None)
        if end.round:
            result = self.inbox.result(end.round, client, end.outcome, self.served.coding)
            version = self._versions[end.round].step
        else:
            result, version = nothing_of(client, end.outcome), 0
        (result,) = with_frozen(this.clients, [result], self.served.fetched.about)
        this.async_round.end(result, this.machine.end(version, result.outcome == "sent"))

    def _hear(self, round_id: str, event: Event) -> None:
        """A device is said to be gone: the one at work, if it was called to that round."""
        each = self._at_work.get(event.client) if isinstance(event, Dropped | Refused) else None
        if each is not None and self.served.numbering.round_of(round_id) == each.called:
            self._heard[each.client] = End(
                "refused" if isinstance(event, Refused) else "lost_before"
            )

    def _end_of(
        self,
        each: AtWork,
        arrived: Mapping[str, Collection[str]],
        refused: Mapping[str, Collection[str]],
        now: float,
    ) -> End | None:
        """What became of a device; None while it is at work."""
        device = device_name(each.client)
        for name, version in self._versions.items():
            if version.number >= each.number and device in arrived[name]:
                return End("sent", name)
            if version.number >= each.number and device in refused[name]:
                return End("refused", name)
        return self._heard.get(each.client, End("lost_before") if now >= each.until else None)

    def _add_costs(self, async_round: AsyncRound, layout: Layout) -> None:
        """What devices that ended had fetched, and what went wrong among them."""
        demand: Demand = {result.client: result.keys for result in async_round.ended if result.keys}
        cost = Pregenerated(self.served.coding).cost(layout, demand)
        async_round.costs.append(replace(cost, leaks=self.served.fetched.about.leaks))
        async_round.incidents += self.served.summons.incidents()


@dataclass
class Served:
    """Rounds of a run whose clients are devices of the slice service."""

    publisher: Publisher
    inbox: Inbox
    summons: Summons = field(default_factory=CheckIns)
    # after which a round closes with the updates that are there; of asynchronous ones, after
    # which a device that has begun is no longer waited for
    seconds: float = inf
    coding: Coding = PLAIN
    # how devices were told to fetch them: what the record says of who learns keys
    fetched: Delivery = field(default_factory=Pregenerated)
    poll: float = 0.05  # seconds between two looks at the inbox
    # once set, waiting ends with KeyboardInterrupt; the round goes on when the run does
    stop: threading.Event = field(default_factory=threading.Event)
    # cohorts from the seed, as a run in process draws them: anyone who knows the seed names them
    # beforehand, and the account says so
    named: bool = False
    # draws cohorts from devices that check in; None draws from the clients that the run knows
    lobby: Lobby | None = None
    # called at every look with what the round waits for
    on_arrival: Callable[[Waiting], None] = lambda waiting: None
    clock: Callable[[], float] = time.monotonic
    # whether the next round to be published is the first of a run that was stopped. Rounds
    # that came to nothing are not stored, so newer ones may be published already
    goes_on: bool = field(default=False, init=False, repr=False)
    tells_facts: ClassVar[bool] = True  # what choices of keys need to know is published
    _streamed: Streamed | None = field(default=None, repr=False)
    _norms: KeptNorms = field(default_factory=KeptNorms, init=False, repr=False)
    _under_way: bytes = field(default=b"", repr=False)
    _secret: bytes = field(default=b"", repr=False)
    _secret_file: Path | None = field(default=None, repr=False)
    _numbering: Numbering | None = field(default=None, repr=False)

    def prepare(self, parts: RunParts, directory: Path | None) -> RunParts:
        """Returns the parts with cohorts that a secret of the run draws, unless they are named;
        it is kept in the file `secret` of the run's directory from the first round on."""
        is_drawn_there = parts.cohorts.sampling == "check-in"
        if is_drawn_there != (self.lobby is not None) or (is_drawn_there and self.named):
            raise InputError(
                "a cohort is drawn either from clients that the trainer knows or from devices that "
                f"wait: got {parts.cohorts.sampling} sampling "
                f"{'without' if self.lobby is None else 'with'} a lobby"
                f"{', and cohorts named by the seed' * self.named}; expected check-in sampling "
                "where devices check in, and no named cohorts there; choose one of the two"
            )
        if directory is not None:
            self._secret_file, self._secret, self._numbering = directory / "secret", b"", None
        if self.lobby is not None:
            self.lobby.open(directory)
        return self._drawing(parts, b"")

    def drawing(self, parts: RunParts) -> RunParts:
        """Returns the parts with the secret of the run."""
        return self._drawing(parts, self._kept())

    def _drawing(self, parts: RunParts, secret: bytes) -> RunParts:
        return replace(parts, draws=Draws("named" if self.named else "secret", secret))

    @property
    def numbering(self) -> Numbering:
        """The numbers of the run's rounds in the rounds directory."""
        if self._numbering is None:
            run = Draws("secret", self._kept()).run()
            self._numbering = Numbering(self.publisher, run)
        return self._numbering

    def _kept(self) -> bytes:
        """The secret of the run, from its file, or for as long as this object lives."""
        if not self._secret:
            file, size = self._secret_file, SECRET_BYTES
            self._secret = secrets.token_bytes(size) if file is None else kept_secret(file, size)
        return self._secret

    def next(
        self, t: int, state: ServerState, clients: Clients, parts: RunParts, execute: Executor
    ) -> Made:
        """Publishes round t, waits for its devices, and adds up what they sent."""
        parts = self.drawing(parts)
        buffering = parts.buffering
        make = self._gather if buffering is None else self._stream(t, buffering).next
        rows, record = make(t, state, clients, parts)
        return rows, seen_at_service(record, parts, self.fetched)

    def _gather(self, t: int, state: ServerState, clients: Clients, parts: RunParts) -> Made:
        parts = self._norms.told(parts)
        check_budget(t, state, parts)
        self.numbering.of(t)  # nobody begins in a round of another run from here on
        names = self._cohort(t, parts)
        told = self.settings(t, parts, clients.users)
        asks = Asks(state.layout, parts, told, frozen=clients.frozen_state)
        gathered, machine = self.carry_out(t, state, names, asks)
        assert machine.closed is not None
        incidents = [*self.summons.incidents(), *gathered.incidents]
        cost = replace(gathered.cost, leaks=self.fetched.about.leaks)
        each = gathered.results
        is_hidden = self.fetched.about.is_private or not about_of(parts.aggregate).is_in_clear
        if is_hidden:
            each = with_maxima(each, self.fetched, self.coding, state.layout, parts)
        each = with_frozen(clients, each, self.fetched.about, is_hidden=is_hidden)
        results = CohortResults(
            each, cost, machine.closed, incidents=incidents, are_maxima=is_hidden
        )
        record = record_round(t, state, parts, results, gathered.summed)
        self._norms.follow(parts, state.layout, gathered.summed.rows)
        return gathered.summed.rows, record

    def carry_out(
        self, t: int, state: ServerState, names: Mapping[int, str], asks: Asks
    ) -> tuple[Gathered, RoundMachine]:
        """Publishes a round for devices, number -> name, waits for them, and adds up what they
        sent."""
        asked, inbox = tuple(names), self.inbox
        told = inbox.open(t, asked, asks.layout, asks.parts, names.__getitem__, asks.purpose)
        published = self.publisher.publish_state(
            state,
            frozen=asks.frozen,
            number=self.numbering.of(t),
            coding=self.coding,
            cohort=list(names.values()),
            may_go_back=self.goes_on or bool(asks.purpose),
            settings={**asks.settings, **told},
            before=inbox.begin,  # a round that the aggregators refuse is never published
        )
        self.goes_on = False
        seconds = self.seconds if asks.seconds is None else asks.seconds
        terms = terms_of(asks.parts.cohorts, asked, seconds)
        self.summons.call(published.id, t, asked, seconds)
        machine = RoundMachine(terms, asked, self.clock())  # time to gather devices does not count
        try:
            self._watch(asks.waiting(t, published.id), machine, names)
        finally:
            self.summons.over()
        self.publisher.close_round()
        return inbox.add_up(published.id, machine.outcomes, self.coding), machine

    def dump(self) -> bytes:
        """Returns what is under way between rounds: of asynchronous ones, who is at work; of
        others, norms of updates where a choice of keys reads them."""
        return self._norms.dump() if self._streamed is None else self._streamed.dump()

    def load(self, data: bytes, layout: Layout) -> None:
        """Goes on from what `dump` returned."""
        self._streamed, self._under_way, self.goes_on = None, data, True
        self._norms.load(data)

    def _stream(self, t: int, buffering: Buffering) -> Streamed:
        """What makes the rounds of an asynchronous run, with what was under way when it stopped."""
        if not isinstance(self.inbox, SpoolInbox):
            raise InputError(
                "asynchronous rounds are added up in the clear: got updates that go elsewhere; "
                "expected updates that go to the service; use synchronous rounds, or no aggregators"
            )
        if self._streamed is None or t == 0:  # a run begins with nobody at work
            self._streamed = Streamed(self, self.inbox, buffering)
            under_way, self._under_way = self._under_way, b""
            if under_way:
                self._streamed.load(under_way)
        return self._streamed

    def settings(self, t: int, parts: RunParts, users: KeyUsers | None = None) -> dict[str, object]:
        """Returns what devices are told of round t, but for the params of its sum."""
        ways = {
            DELIVERY_SETTING: self.fetched.about.name,
            AGGREGATION_SETTING: about_of(parts.aggregate).name,
        }
        return {**round_settings(t, parts, users), **ways}

    def _cohort(self, t: int, parts: RunParts) -> Mapping[int, str]:
        """The devices of round t, number -> name, in the order asked."""
        if self.lobby is None:
            return {client: device_name(client) for client in parts.draw_cohort(t)}
        needed = parts.cohorts.needed

        def tell(waiting: int) -> None:
            self.on_arrival(Waiting(t, waiting, needed, [], is_drawn=False))

        return self.lobby.cohort(t, parts.cohorts, parts.draws, tell)

    def _watch(self, round: Waiting, machine: RoundMachine, names: Mapping[int, str]) -> None:
        """Tells the machine what arrives until it closes, and what came too late.

        A round that was closed before the run was killed takes no more updates. What has arrived
        between two looks has arrived by the earlier of them, as far as the machine is concerned:
        an update that was acknowledged before the deadline is not late because nobody looked.
        """
        round_id, missing = round.name, {name: client for client, name in names.items()}

        def tell(here: Iterable[str], now: float) -> None:
            """Each update that is here is told once; anyone who was not asked is passed over."""
            for name in sorted(missing.keys() & here):
                machine.handle(Answered(missing.pop(name), now))

        def tell_refused(now: float) -> None:
            for name in sorted(missing.keys() & self.inbox.refused(round_id)):
                machine.handle(Refused(missing.pop(name), now))

        looked = self.clock()
        while machine.closed is None:
            now = self.clock()
            is_over = now >= machine.deadline or self.inbox.is_closed(round_id)
            here = self.inbox.close(round_id) if is_over else self.inbox.devices(round_id)
            tell(here, looked)
            tell_refused(looked)
            for called_to, event in self.summons.news(looked):
                if called_to == round_id:
                    machine.handle(event)
            if is_over:
                machine.handle(Elapsed(inf))
            taken, goal, left = len(machine.taken), machine.terms.goal, machine.deadline - now
            looked_at = replace(round, here=taken, goal=goal, missing=list(missing), seconds=left)
            self.on_arrival(looked_at)
            if machine.closed is None and self.stop.wait(self.poll):
                raise KeyboardInterrupt
            looked = now
        tell(self.inbox.close(round_id), inf)
