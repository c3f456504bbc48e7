"""Joins a run and its devices: a summons tells them of a round, an inbox takes their updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from keyhole.aggregation.base import ClientResult, SumResult, about_of
from keyhole.delivery.base import Cost, Delivery
from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.popular import popular_settings, shares_of
from keyhole.delivery.records import Coding, Demand
from keyhole.errors import InputError, KeyholeError
from keyhole.keys.choice import KeyUsers
from keyhole.planner.prices import max_bytes
from keyhole.primitives.layout import Layout
from keyhole.rounds.adding import add_up, agreed
from keyhole.rounds.machine import Event
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.round import result_of
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Outcome
from keyhole.server.row_sums import BLOCK, BlockSum, pair_up, sum_block
from keyhole.server.state import ServerState
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import NameOf, device_name
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import decode_update, split_report
from keyhole.wire.settings import bound_settings, facts_settings


def nothing_of(client: int, outcome: Outcome) -> ClientResult:
    """Returns the result of a client that brought nothing: what it chose and fetched is not known
    here."""
    return ClientResult(client, outcome, {}, None)


@dataclass(frozen=True)
class Waiting:
    """What a round waits for."""

    round: int
    here: int  # updates that count; before it is drawn, devices that wait
    goal: int  # updates with which it closes; before, devices that it is drawn from at the least
    missing: list[str]  # names of the devices whose update is not here
    name: str = ""  # of the round, as it is published
    seconds: float = inf  # until it closes with the updates that are here
    is_drawn: bool = True
    measures: bool = False  # whether its devices measure the model, and train nothing


@dataclass(frozen=True)
class Asks:
    """What devices of a round are asked for.

    Args:
        layout: of what they send.
        parts: how it is added up.
        settings: that they are told, but for the params of the sum.
        purpose: what tells the sum from that of the training round of this number; empty for that.
        frozen: leaves of the model that are not trained, which are published beside it.
        seconds: after which it closes; those of the run's rounds if None.
    """

    layout: Layout
    parts: RunParts
    settings: Mapping[str, object]
    purpose: bytes = b""
    frozen: ServerState | None = None
    seconds: float | None = None

    def waiting(self, t: int, name: str) -> Waiting:
        """Returns what a round waits for of which nothing is known yet."""
        return Waiting(t, 0, 0, [], name, measures=bool(self.purpose))


@dataclass(frozen=True)
class Gathered:
    """What a round came to."""

    results: list[ClientResult]  # of everyone asked, in order
    cost: Cost  # of delivering slices to those who are known to have them
    summed: SumResult  # the updates of those who sent one
    incidents: tuple[str, ...] = ()  # what went wrong where they arrived, though nothing is lost


class Summons(Protocol):
    """Tells devices of a round, and hears what becomes of them."""

    def call(
        self,
        round_id: str,
        t: int,
        asked: Sequence[int],
        seconds: float,
        *,
        may_miss: bool = False,
    ) -> None:
        """Tells clients of a round that has been published; of an asynchronous one more than once,
        each time others.

        Args:
            asked: clients by their number in the population.
            seconds: after which it closes, or these are given up; infinity if it waits.
            may_miss: whether others begin in place of those who cannot be told.
        """
        ...

    def news(self, now: float) -> Sequence[tuple[str, Event]]:
        """Returns what has become known of clients since this was last asked, each with the round
        that they were called to; updates show in the inbox."""
        ...

    def over(self) -> None:
        """The round has closed: what is under way for it no longer counts, unless it trails."""
        ...

    def incidents(self) -> list[str]:
        """Returns what went wrong since this was last asked: sentences with counts, and without
        keys."""
        ...


class CheckIns:
    """Devices ask by themselves, and the service tells them; see `keyhole.wire.assignment`."""

    def call(
        self,
        round_id: str,
        t: int,
        asked: Sequence[int],
        seconds: float,
        *,
        may_miss: bool = False,
    ) -> None:
        """Does nothing: the published round says who takes part."""

    def news(self, now: float) -> Sequence[tuple[str, Event]]:
        """Returns nothing: a device that stays away sends no word."""
        return ()

    def over(self) -> None:
        """Does nothing: the service refuses what comes later."""

    def incidents(self) -> list[str]:
        """Returns nothing: a device that fails does so unheard."""
        return []


class Inbox(Protocol):
    """Takes the updates of one round at a time.

    A trainer that is killed calls `open` and `begin` again for the same round, with the same
    arguments: what had arrived is still there.
    """

    def open(
        self,
        t: int,
        asked: Sequence[int],
        layout: Layout,
        parts: RunParts,
        name: NameOf = device_name,
        purpose: bytes = b"",
    ) -> Mapping[str, object]:
        """Gets ready for round t; returns what devices must know, for the settings of its manifest.

        Args:
            name: what each of its clients is called at the service.
            purpose: tells this sum from others of round t; empty for its updates.

        Raises:
            InputError: the run cannot be carried out this way.
        """
        ...

    def begin(self, round_id: str) -> None:
        """Takes updates of the round that is about to be published under this name; what belongs to
        earlier ones can go. An error keeps the round from being published."""
        ...

    def devices(self, round_id: str) -> Iterable[str]:
        """Returns whose update is here, whole."""
        ...

    def refused(self, round_id: str) -> Iterable[str]:
        """Returns whose update was refused when it came: these are not waited for."""
        ...

    def close(self, round_id: str) -> Iterable[str]:
        """Takes no more updates; returns whose are here. Closing again changes nothing."""
        ...

    def is_closed(self, round_id: str) -> bool:
        """Returns whether the round takes no more."""
        ...

    def add_up(self, round_id: str, outcomes: Mapping[int, Outcome], coding: Coding) -> Gathered:
        """Adds up the updates of a closed round.

        Args:
            outcomes: of everyone asked, in order; the updates that count are those "sent".
        """
        ...


class SpoolInbox:
    """Updates in the clear, in files: durable before they are acknowledged."""

    def __init__(self, spool: UpdateSpool) -> None:
        self._spool = spool
        self._round: tuple[int, Layout, RunParts]
        self._name: NameOf = device_name

    def open(
        self,
        t: int,
        asked: Sequence[int],
        layout: Layout,
        parts: RunParts,
        name: NameOf = device_name,
        purpose: bytes = b"",
    ) -> Mapping[str, object]:
        """Devices need to know nothing more."""
        about = about_of(parts.aggregate)
        if not (about.is_in_clear and about.is_served):
            raise InputError(
                "updates of devices arrive in the clear: got a run with another sum, "
                f"{about.name}; expected one in the clear that is served; let devices send to two "
                "aggregators, or leave the run's aggregation as it is"
            )
        if parts.privacy is not None:
            raise InputError(
                "a promise about one client whose update arrives in the clear: got privacy with "
                f"{about.name}, over a service; expected two aggregators that add noise, or no "
                "privacy; name --aggregators, or leave the noise out"
            )
        self._round, self._name = (t, layout, parts), name
        return {}

    def begin(self, round_id: str, trailing: Sequence[str] = ()) -> None:
        """Makes room for the round, and removes others: their sums are in the state by now."""
        self._spool.begin(round_id)
        for older in self._spool.rounds():
            if older != round_id and older not in trailing:
                self._spool.remove(older)

    def devices(self, round_id: str) -> Iterable[str]:
        """Returns whose update is stored."""
        return self._spool.devices(round_id)

    def refused(self, round_id: str) -> Iterable[str]:
        """Returns whose update the service refused."""
        return self._spool.refused(round_id)

    def close(self, round_id: str) -> Iterable[str]:
        """Closes the spool, for the service's processes too."""
        return self._spool.close(round_id)

    def is_closed(self, round_id: str) -> bool:
        """Returns whether the spool takes no more of this round."""
        return self._spool.is_closed(round_id)

    def add_up(self, round_id: str, outcomes: Mapping[int, Outcome], coding: Coding) -> Gathered:
        """Reads the updates and adds them up as a run in process does: in the clear a block at a
        time, so that no more of them are held."""
        t, layout, parts = self._round
        coming = (self.result(round_id, c, outcome, coding) for c, outcome in outcomes.items())
        results: list[ClientResult] = []
        blocks = None
        if parts.adds_in_blocks:
            blocks = tuple(pair_up(_sum_in_blocks(coming, layout, results)))
        else:
            results.extend(coming)
        demand: Demand = {result.client: result.keys for result in results if result.keys}
        cost = Pregenerated(coding).cost(layout, demand)
        return Gathered(results, cost, add_up(t, agreed(results), layout, parts, blocks))

    def result(self, round_id: str, client: int, outcome: Outcome, coding: Coding) -> ClientResult:
        """Returns what a client brought, if it brought anything; "refused" where its update is
        unusable."""
        _, layout, parts = self._round
        device = self._name(client)
        if not self._spool.has(round_id, device):
            is_above = self._spool.refusal(round_id, device) == "norm"
            return replace(nothing_of(client, outcome), is_above_norm=is_above)
        body = self._spool.read(round_id, device)
        try:
            report, of_update = split_report(body, parts.bound)
            update, keys = decode_update(of_update, layout, 2**32, digest_of(round_id))
        except KeyholeError:  # the service had checked it: a file was changed since
            return nothing_of(client, "refused")
        taken = parts.bound.take(update, keys, None if report is None else report.weight)
        outcome = "refused" if taken.update is None else outcome
        cost = Pregenerated(coding).cost(layout, {client: keys})
        return replace(result_of(client, outcome, keys, taken, layout, cost), report=report)


def _sum_in_blocks(
    coming: Iterable[ClientResult], layout: Layout, results: list[ClientResult]
) -> Iterator[BlockSum]:
    """Adds up what was sent, block by block; puts the results aside without their updates.

    A block is of those who trained, as in process: a client whose update is refused has its place.
    """
    held: list[ClientResult] = []
    for result in coming:
        results.append(replace(result, update=None))
        if result.outcome in ("sent", "refused"):
            held.append(result)
        if len(held) == BLOCK:
            yield _sum_sent(held, layout)
            held = []
    if held:
        yield _sum_sent(held, layout)


def _sum_sent(results: Sequence[ClientResult], layout: Layout) -> BlockSum:
    sent = [result for result in results if result.outcome == "sent"]
    return sum_block(layout, [result.update for result in sent], [result.keys for result in sent])


def with_maxima(
    results: Sequence[ClientResult],
    fetched: Delivery,
    coding: Coding,
    layout: Layout,
    parts: RunParts,
) -> list[ClientResult]:
    """Returns results of a round whose trainer is not told which slices a device fetched, or how:
    those that answered have the public lengths of that."""
    popular = shares_of(parts.delivery)
    down, up = max_bytes(fetched, layout, parts.keys_per_client, coding, popular)
    size = layout.client_size(**parts.keys_per_client)
    return [
        replace(each, bytes_down=down, bytes_up=up, size=each.size or size)
        if each.outcome in ("sent", "late", "refused")
        else each
        for each in results
    ]


def seen_at_service(record: RoundRecord, parts: RunParts, fetched: Delivery) -> RoundRecord:
    """Returns the record with what the service saw that took updates in: where they arrive in the
    clear, all that the trainer sees of them."""
    sums, parties = about_of(parts.aggregate), list(fetched.about.leaks)
    if not sums.is_in_clear:
        return record  # devices sent shares to others
    # Devices leave updates at the service that checks them in: of a relay, its gateway.
    service = parties[-1 if fetched.about.route == "sealed requests" else 0]
    seen = next(iter(sums.seen_by().values()))
    return replace(record, seen_in_sum={service: seen, **record.seen_in_sum})


def round_settings(t: int, parts: RunParts, users: KeyUsers | None = None) -> dict[str, object]:
    """Returns the settings of round t, with which devices choose and train as clients in process
    do; `DeviceSettings` reads them."""
    told = {"spec": dict(parts.for_devices)} if parts.for_devices else {}
    return {
        "round": t,
        "nonce": parts.draws.nonce(t),
        "keys_per_client": dict(parts.keys_per_client),
        "shared_keys": parts.shared_keys,
        **bound_settings(parts.bound),
        **facts_settings(parts.norms, users),
        **popular_settings(shares_of(parts.delivery)),
        **told,
    }
