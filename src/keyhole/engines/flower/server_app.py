"""Makes the ServerApp: rounds of a run whose devices Flower calls and the service serves.

Updates arrive at the service, or in shares at two aggregators.

A run is kept in its directory. A ServerApp that is killed and started again with the same run
config goes on with the same round: the updates that had arrived are there.

Devices are told of a round by Flower messages, and their replies become events. Nothing waits for
replies: a round closes by the updates that are in, or by its deadline. A reply that comes later
than the round is read when there is time, and only says that its node lives.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import isfinite
from typing import TypeAlias

from flwr.app import DEFAULT_TTL, Context, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from keyhole.delivery import delivery_named
from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.engines.flower.config import RoundsConfig, read_secret
from keyhole.engines.flower.messages import (
    TRAIN,
    NodeReport,
    Nodes,
    RoundCall,
    failure_of,
    read,
    sentences,
    told_by_a_node,
    write,
)
from keyhole.errors import MalformedError, StorageError
from keyhole.files import kept_secret
from keyhole.rounds.machine import Dropped, Event, Reached, Refused
from keyhole.service.access import Keyring
from keyhole.service.inbox import Inbox, SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import device_name
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import number_of
from keyhole.wire.signing import SigningKey

_LOG = logging.getLogger("flwr.keyhole")
_HANDOVER = 60.0  # seconds: a ServerApp whose SuperLink was killed takes some to notice
# A message whose time is up says no more than the deadline, which follows at once.
_EXPIRED = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)


Train: TypeAlias = Callable[[Served, RoundsConfig, Context], None]
"""`(rounds, their config, context of the app) -> None`: trains to the end.

`rounds` is the `kind` of `start_run`, `resume_run` or `Experiment.run`: whatever trains with them
has its rounds made by the devices of Flower.
"""


def make_server_app(train: Train) -> ServerApp:
    """Returns a ServerApp that trains by rounds of federated select."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = RoundsConfig.of(context.run_config)
        with _publisher(config) as publisher:
            train(rounds_on(grid, config, publisher), config, context)

    return app


def rounds_on(grid: Grid, config: RoundsConfig, publisher: Publisher) -> Served:
    """Rounds whose devices are called through a grid, for a ServerApp of your own.

    Args:
        grid: of the ServerApp.
        config: of the rounds.
        publisher: of `config.rounds`, which the slice service serves.

    Raises:
        InputError: the file of signing keys cannot be used.
    """
    keyring = None if config.token_key is None else Keyring.load(config.token_key)
    summons = FlowerSummons(
        grid,
        Nodes(grid, config.min_nodes, config.node_seconds),
        Addresses(config.service, config.delivery, config.second, config.aggregators),
        keyring,
        on_report=_tell,
    )
    return Served(
        publisher,
        inbox_of(config),
        summons,
        seconds=config.round_seconds,
        fetched=delivery_named(config.delivery),
        named=config.named_cohorts,
    )


def _publisher(config: RoundsConfig) -> Publisher:
    """The publisher of the rounds, which a ServerApp that is being replaced may hold for a while.
    Raises StorageError where another process has it all the time."""
    until = time.monotonic() + _HANDOVER
    key = None if config.signing_key is None else SigningKey.load(config.signing_key)
    while True:
        try:
            return Publisher(config.rounds, key)
        except StorageError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.5)


def _tell(round_id: str, report: NodeReport) -> None:
    """Counts of a node's round, to the log of the run."""
    _LOG.info(
        "round %s: a node sent %d of %d updates, %d bytes down, %d up, %.2f s",
        round_id,
        report.outcomes.count("sent"),
        len(report.clients),
        sum(report.bytes_down),
        sum(report.bytes_up),
        sum(report.seconds),
    )


def inbox_of(config: RoundsConfig) -> Inbox:
    """Returns the inbox that a run config describes; raises InputError where a token of the trainer
    at an aggregator cannot be read."""
    if not config.aggregators:
        return SpoolInbox(UpdateSpool(config.rounds / "updates"))
    from keyhole.service.sum_services import SALT_BYTES, AggregatorClient, SumServices

    ca = None if config.aggregator_ca is None else str(config.aggregator_ca)
    first, second = (
        AggregatorClient(HttpClient(url, ca=ca), read_secret(path), party)
        for party, (url, path) in enumerate(
            zip(config.aggregators, config.aggregator_tokens, strict=True)
        )
    )
    run = config.run  # a directory that is the training loop's to make
    salt = kept_secret(run.with_name(f"{run.name}.salt"), SALT_BYTES)
    return SumServices(first, second, salt=salt, seconds=config.round_seconds)


@dataclass(frozen=True)
class Addresses:
    """Where devices of a run fetch and send: URLs, `second` where the delivery has two servers,
    `aggregators` where updates do not go to the service."""

    service: str
    delivery: str = DEFAULT_SERVED
    second: str = ""
    aggregators: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Sent:
    """A message under way: to whom, about whom, of which round, and until when it is good."""

    node: int
    clients: tuple[int, ...]
    round: str
    until: float


@dataclass
class FlowerSummons:
    """Calls devices to rounds through a SuperLink.

    Args:
        grid: of the run.
        nodes: who stands for whom.
        addresses: where devices fetch and send.
        keyring: signs the tokens of a round; None where the service asks for none.
        every: seconds between two looks at replies; a look is a request to the SuperLink.
        clock: monotonic seconds, the clock of the rounds.
        wall: unix seconds, for tokens.
        on_report: called with each report, and its round.
    """

    grid: Grid
    nodes: Nodes
    addresses: Addresses
    keyring: Keyring | None = None
    every: float = 1.0
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    on_report: Callable[[str, NodeReport], None] = lambda round_id, report: None
    _sent: dict[str, _Sent] = field(default_factory=dict, repr=False)  # message -> what it was
    _round: str | None = None
    _pending: list[tuple[str, Event]] = field(default_factory=list, repr=False)
    _incidents: Counter[tuple[str, str]] = field(default_factory=Counter, repr=False)
    _next_look: float = 0.0

    def call(
        self,
        round_id: str,
        t: int,
        asked: Sequence[int],
        seconds: float,
        *,
        may_miss: bool = False,
    ) -> None:
        """Implements `Summons.call`: sends one message to each node that stands for clients of the
        round, good for as long as that is open. Raises CohortError where too few nodes come, or
        none that stands for anybody who is called, for as long as they are waited for."""
        if self._sent:
            self._look(self.clock())
        self._round = round_id
        if may_miss:
            at_work: Counter[int] = Counter()
            for sent in self._sent.values():
                at_work[sent.node] += len(sent.clients)
            shares = self.nodes.for_some(asked, at_work)
        else:
            shares = self.nodes.for_round(asked)
        ttl = min(seconds, float(DEFAULT_TTL)) if isfinite(seconds) else float(DEFAULT_TTL)
        for node, clients in shares.items():
            content = write(self._call_of(round_id, clients, ttl))
            message = Message(content, node, TRAIN, ttl=ttl, group_id=str(t))
            sent = _Sent(node, tuple(clients), round_id, self.clock() + ttl)
            self._sent.update(dict.fromkeys(self.grid.push_messages([message]), sent))
        there = {client for clients in shares.values() for client in clients}
        away = [client for client in asked if client not in there]
        self._pending += [(round_id, Dropped(client, self.clock())) for client in away]
        _LOG.info("round %d: %d clients called at %d nodes", t, len(there), len(shares))
        if away:
            _LOG.warning("round %d: no node stands for %d clients", t, len(away))
            self._incidents["client", "without a node"] += len(away)

    def news(self, now: float) -> Sequence[tuple[str, Event]]:
        """Returns what became of devices since last asked; looks at replies every so often."""
        if self._sent and now >= self._next_look:
            self._next_look = now + self.every
            self._look(now)
        events, self._pending = self._pending, []
        return events

    def over(self) -> None:
        """The round has closed. Replies still on their way are read in the next one, unless their
        time is up: then their nodes are silent."""
        now = self.clock()
        if any(now >= sent.until for sent in self._sent.values()):
            self._look(now)
            self._give_up(now)
        self._round = None

    def incidents(self) -> list[str]:
        """Nodes that failed or were silent, and clients that failed, since this was last asked."""
        told, self._incidents = self._incidents, Counter()
        return sentences(told)

    def _call_of(self, round_id: str, clients: Sequence[int], seconds: float) -> RoundCall:
        tokens, sums = tuple[str, ...](), [tuple[str, ...](), tuple[str, ...]()]
        if self.keyring is not None:
            now, ring, names = self.wall(), self.keyring, [device_name(c) for c in clients]
            issue = partial(
                Keyring.issue, kind="round", now=now, seconds=seconds, round_id=round_id
            )
            tokens = tuple(issue(ring, device=name) for name in names)
            if self.addresses.aggregators:
                issue = partial(issue, audience="aggregator")
                rings = [ring.for_aggregator(party) for party in (0, 1)]
                sums = [tuple(issue(one, device=name) for name in names) for one in rings]
        number = number_of(round_id)
        assert number is not None  # it was published
        return RoundCall(
            round=round_id,
            number=number,
            seconds=seconds,
            clients=tuple(clients),
            tokens=tokens,
            sum_tokens_0=sums[0],
            sum_tokens_1=sums[1],
            **asdict(self.addresses),
        )

    def _look(self, now: float) -> None:
        for reply in self.grid.pull_messages(list(self._sent)):
            sent = self._sent.pop(reply.metadata.reply_to_message_id, None)
            if sent is not None:
                self._pending += [(sent.round, e) for e in self._hear(sent, reply, now)]

    def _hear(self, sent: _Sent, reply: Message, now: float) -> list[Event]:
        """What a reply says of the clients that its message named."""
        if reply.has_error():
            is_expired = reply.error.code in _EXPIRED
            self._miss(sent, "did not answer" if is_expired else failure_of(reply.error))
            return [] if is_expired else [Dropped(client, now) for client in sent.clients]
        self.nodes.silent.discard(sent.node)
        try:
            report = read(reply.content, NodeReport)
        except MalformedError as error:
            _LOG.warning("a reply cannot be read: %s", error)
            self._note("node", "sent an unreadable reply", sent)
            return [Refused(client, now) for client in sent.clients]
        self.on_report(sent.round, report)
        said = zip(report.outcomes, report.reasons, strict=True)
        told = dict(zip(report.clients, said, strict=True))
        events: list[Event] = []
        for client in sent.clients:
            outcome, reason = told.get(client, ("failed", "not in the reply"))
            # An update that was sent is seen where it arrives; here only what else happened.
            kind = {"failed": Refused, "sent": Reached}.get(outcome, Dropped)
            events.append(kind(client, now))
            if outcome == "failed":
                self._note("client", f"failed: {told_by_a_node(reason)}", sent)
        return events

    def _give_up(self, now: float) -> None:
        """Nodes whose time is up without a word are asked again only where no other is there."""
        for message, sent in list(self._sent.items()):
            if now >= sent.until:
                del self._sent[message]
                self._miss(sent, "did not answer")

    def _miss(self, sent: _Sent, what: str) -> None:
        self.nodes.silent.add(sent.node)
        self._note("node", what, sent)

    def _note(self, who: str, what: str, sent: _Sent) -> None:
        """What went wrong, for the log and the record."""
        when = "" if sent.round == self._round else " in an earlier round"
        _LOG.warning("a %s %s%s", who, what, when)
        self._incidents[who, f"{what}{when}"] += 1
