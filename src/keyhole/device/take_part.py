"""Takes part in rounds until it is told to stop: checks in, fetches, trains, sends.

`PopulationClient` is a client of a simulated population as a device: it chooses and trains as in
process, over the network. What a run tells its devices is in the settings of the manifest: a nonce
of the round, from which a device draws, and never the run's seed. Where the device's own operator
knows the seed and the trainer names cohorts by it, a run over the service gives the bytes of the
run in process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from keyhole.arrays import Tree
from keyhole.delivery.base import Delivery
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import KnownRound, Submodel
from keyhole.device.frozen import with_frozen
from keyhole.errors import (
    AccessError,
    AwayError,
    ConflictError,
    InputError,
    KeyholeError,
    NotAdmittedError,
    ServiceError,
    StaleError,
    TooLateError,
    UntimelyError,
)
from keyhole.keys.budget import DeviceClass
from keyhole.keys.choice import KeyTable
from keyhole.parts import running
from keyhole.primitives.layout import KeysBySpace
from keyhole.primitives.report import Report
from keyhole.rounds.clients import (
    ClientJob,
    Clients,
    check_keys_per_client,
    choose_keys,
    count_examples,
)
from keyhole.rounds.spec import DeviceSpec
from keyhole.server.client_states import MAX_STATE_BYTES, ClientStates
from keyhole.server.inputs import or_zeros
from keyhole.wire.assignment import Wait
from keyhole.wire.settings import (
    SUM_SETTING,
    Evaluates,
    bound_of,
    carried_in,
    evaluates_of,
    facts_in,
    refuse_clear,
)

Fetch: TypeAlias = Callable[[Device, Assignment, DeviceKeys], Submodel]
"""How a device gets its sub-model: `Device.fetch`, `fetch_at_home`, `QueryFetch` and the like."""

Send: TypeAlias = Callable[[Device, Assignment, Any, DeviceKeys], int]
"""How a device sends its update: `Device.send`, or shares of it to two aggregators. It is given the
update, or a `Report` where weight or metrics go with it."""

_AFTER_MISS = 1.0  # seconds before a device that was too late checks in again
_LONGEST_WAIT = 60.0  # seconds before it does when servers lag behind, or are away
_CLOCK_WAIT = 600.0  # seconds, at most, before it asks a service again whose clock may be wrong
_TELL_EVERY = 16  # rounds, after which a device's operator is told of wrong rows
_MAX_STALE = 8  # misses for that reason in a row; two minutes, for a copy that lags behind


@dataclass(frozen=True)
class Participant:
    """What a device does in a round.

    Args:
        choose: `round -> keys`.
        train: `(round, what was fetched) -> update`, start minus end, or a `Report` that holds it;
            what is sent is clipped to what the round allows, and weighted where it weighs.
        fetch: `(device, round, keys) -> sub-model`: how slices are fetched, and so who learns which
            keys. The sub-model says which keys it was selected with: a private way may miss some.
        send: `(device, round, update, keys) -> bytes sent`: how the update travels, and so who
            learns it.
        measure: `(round, what was fetched, what is asked) -> what is sent` in a round that measures
            the model, see `Evaluates`; None measures nothing, and takes no part in such rounds.
        keep: `(round, state)`: keeps the packed state of a report, which never travels; called
            once the update was taken.
    """

    choose: Callable[[KnownRound], DeviceKeys]
    train: Callable[[KnownRound, Submodel], Any]
    fetch: Fetch = Device.fetch
    send: Send = Device.send
    keep: Callable[[KnownRound, bytes], None] = lambda _, __: None
    measure: Callable[[KnownRound, Submodel, Evaluates], Any] | None = None


@dataclass(frozen=True)
class Taken:
    """A round that a device took part in."""

    round: str
    number: int
    keys: int
    missing: int  # how many more it had chosen: without a place in a query, or with a wrong row
    bytes_down: int
    bytes_up: int
    reused: int
    wrong: int = 0  # rows that were not those of the round; for the device alone
    measures: bool = False  # whether the device measured the model, and trained nothing


def fetch_at_home(device: Device, round: Assignment, keys: DeviceKeys) -> Submodel:
    """Downloads the whole round and selects at home: nobody learns a key before the update."""
    return device.fetch_all(round).select(keys)


def fetch_by(
    delivery: Delivery,
    others: Mapping[str, Device],
    pinned: bytes | None = None,
    anonymous: bool = False,
) -> Fetch:
    """Returns how a device fetches by a delivery. What it does not use is not loaded.

    Args:
        others: devices of the parties that it connects to beside the service, by their names.
        pinned: the key configuration of a gateway, for sealed requests; None compares what relay
            and gateway say.
        anonymous: whether servers of private queries are shown tokens without a name.
    """
    about = delivery.about
    if about.route is None or others.keys() != set(about.connects_to):
        allowed = f"connections to {', '.join(about.connects_to) or 'no other party'}"
        raise InputError(
            f"a device cannot fetch by {about.name} so: got connections to "
            f"{', '.join(others) or 'no other party'}; expected "
            f"{allowed if about.route else 'a delivery that is served'}; name the parties of the "
            "delivery, or choose another"
        )
    parties = tuple(others[name] for name in about.connects_to)
    if about.route == "queries":
        from keyhole.delivery.base import served_by_queries
        from keyhole.device.private import QueryFetch

        return QueryFetch(served_by_queries(delivery), parties, anonymous=anonymous)
    if about.route == "sealed requests":
        from keyhole.device.relayed import RelayedFetch

        (relay,) = parties
        return RelayedFetch(relay.client, pinned, relay.token_for(""))
    return fetch_at_home if about.route == "whole" else Device.fetch


def take_part(device: Device, participant: Participant, done: str | None = None) -> Taken | Wait:
    """One whole round: checks in, waits as told, fetches, trains, sends.

    Args:
        done: a round in which it has sent its update. The service knows that by itself only where
            updates go there.

    Returns:
        What it took, or how many seconds to wait before asking again.
    """
    told = device.check_in()
    if isinstance(told, Wait):
        return told
    if told.round == done:
        return Wait(_AFTER_MISS)
    _pause(device, told.fetch_after)
    return _take(device, told, participant, _in_time(participant.send))


def take_part_in(device: Device, told: Assignment, participant: Participant) -> Taken:
    """The round that a device was told of, by the service or in another way."""
    return _take(device, told, participant, participant.send)


def _take(device: Device, told: Assignment, participant: Participant, send: Send) -> Taken:
    _refuse_late(device, told)
    known = device.known(told)
    if participant.send is Device.send:  # before keys are named and a client trains for nothing
        refuse_clear(known.manifest.settings)
    if SUM_SETTING in known.manifest.settings:
        device.refuse_unpinned()
    measures = evaluates_of(known.manifest.settings) is not None
    if measures and participant.measure is None:
        raise TooLateError(
            "this device measures nothing: got a round that measures the model; expected one that "
            "trains it; check in for the next one"
        )
    keys = participant.choose(known)
    fetched = with_frozen(device, told, participant.fetch(device, told, keys))
    made, state = _made(participant, known, fetched)
    _refuse_late(device, told)
    sent = send(device, told, made, fetched.keys)
    if state is not None:
        participant.keep(known, state)
    kept = sum(map(len, fetched.keys.values()))
    return Taken(
        round=told.round,
        number=told.number,
        keys=kept,
        missing=sum(map(len, known.keys_by_space(keys).values())) - kept,
        bytes_down=fetched.traffic.bytes_down,
        bytes_up=fetched.traffic.bytes_up + sent,
        reused=fetched.traffic.reused,
        wrong=fetched.wrong,
        measures=measures,
    )


def _made(
    participant: Participant, known: KnownRound, fetched: Submodel
) -> tuple[Any, bytes | None]:
    """What is sent in a round, and the state that is kept once it was taken."""
    manifest = known.manifest
    who, evaluates = f"this device in round {manifest.number}", evaluates_of(manifest.settings)
    if evaluates is not None:
        assert participant.measure is not None  # `_take` has looked
        return participant.measure(known, fetched, evaluates), None

    def train() -> Report:
        return Report.of(participant.train(known, fetched)).checked(who, MAX_STATE_BYTES)

    is_hidden = SUM_SETTING in manifest.settings
    metrics = carried_in(manifest.settings)[1] if is_hidden else ()
    report = or_zeros(train, fetched.model, metrics) if is_hidden else train()
    ready = bound_of(manifest.settings).ready(replace(report, state=None), fetched.keys, who)
    return ready.update if ready.beside is None else ready, report.state


def keep_taking_part(
    device: Device,
    participant: Participant,
    *,
    rounds: float = inf,
    on_round: Callable[[Taken], None] = lambda _: None,
    on_miss: Callable[[KeyholeError], None] = lambda _: None,
    on_wait: Callable[[float], None] = lambda _: None,
    on_wrong: Callable[[str], None] = lambda _: None,
) -> int:
    """Takes part in round after round, until `device.stop` is set.

    Args:
        rounds: how many to take part in; without limit unless told.
        on_miss: called with the reason when a round closed before the update was there, when the
            servers of a private fetch did not hold the same round, or when the service finds a
            token untimely that is good by the clock of the device: it asks again, until one of the
            two clocks is set right. Likewise when a service that has answered before gives no
            answer: it asks again, until the service is back.
        on_wait: called with the seconds that the service asks to wait, since it has no round for
            this device.
        on_wrong: called with about how many rows of private fetches were wrong, after 16 rounds and
            every 16 from then on: late and coarse, for the operator of the device. Nobody who
            answers private queries may hear it sooner or better, or they would learn which rows
            were asked for.

    Returns:
        In how many rounds it took part.

    Raises:
        StaleError: the servers of a private fetch did not hold the same round, time and again.
        UntimelyError: the token is expired or not yet good, by both clocks.
    """
    taken, stale, untimely, away, done = 0, 0, 0, 0, None
    wrong = WrongRows(on_wrong)
    while taken < rounds and not device.stop.is_set():
        try:
            outcome = take_part(device, participant, done)
        except (TooLateError, ConflictError) as error:
            on_miss(error)
            device.clock.sleep(_AFTER_MISS)
        except StaleError as error:
            stale += 1
            if stale == _MAX_STALE:
                raise
            on_miss(error)
            device.clock.sleep(min(_LONGEST_WAIT, _AFTER_MISS * 2.0 ** (stale - 1)))
        except UntimelyError as error:
            if not device.has_timely_token():
                raise
            untimely += 1
            on_miss(error)
            device.clock.sleep(min(_CLOCK_WAIT, _AFTER_MISS * 2.0 ** min(untimely - 1, 16)))
        except AwayError as error:
            away += 1
            on_miss(error)
            device.clock.sleep(min(_LONGEST_WAIT, _AFTER_MISS * 2.0 ** min(away - 1, 16)))
        except ServiceError:
            if device.stop.is_set():
                break
            raise
        else:
            untimely = away = 0
            if isinstance(outcome, Wait):
                on_wait(outcome.seconds)
                device.clock.sleep(outcome.seconds)
                continue
            taken, stale, done = taken + 1, 0, outcome.round
            wrong.add(outcome)
            on_round(outcome)
    return taken


@dataclass
class WrongRows:
    """Counts the wrong rows of private fetches, and tells of them late and in powers of ten."""

    tell: Callable[[str], None]
    _rounds: int = 0
    _count: int = 0

    def add(self, taken: Taken) -> None:
        """Counts those of one more round; every 16 rounds it tells what came together."""
        self._rounds, self._count = self._rounds + 1, self._count + taken.wrong
        if self._rounds % _TELL_EVERY == 0:
            if self._count:
                lowest = 10 ** (len(str(self._count)) - 1)
                self.tell(f"{lowest} or more slices of the last {_TELL_EVERY} rounds were wrong")
            self._count = 0


def _pause(device: Device, seconds: float) -> None:
    if seconds > 0:
        device.clock.sleep(seconds)
    if device.stop.is_set():
        raise ServiceError(
            "stopped before the round was over: got a stop event; expected no stop before the "
            "update is sent; take part again when there is time"
        )


def _in_time(send: Send) -> Send:
    """Sends, where a device that was let in and is so no longer has come too late."""

    def try_send(device: Device, told: Assignment, update: Tree, keys: DeviceKeys) -> int:
        try:
            return send(device, told, update, keys)
        except UntimelyError:  # an aggregator's clock may be wrong: to train again is no help
            raise
        except (AccessError, NotAdmittedError) as error:
            raise TooLateError(
                f"the round takes no update of this device any more: got {error!s}; expected a "
                "token that is still good, of a device that the round waits for; check in again"
            ) from error

    return try_send


def _refuse_late(device: Device, told: Assignment) -> None:
    """Asking costs little; slices and updates that nobody uses cost much."""
    now = device.current()
    if now.number < told.number:
        return  # from a replica that does not know of the round yet: no reason to give up
    if not now.takes(told.round):
        raise TooLateError(
            f"the round is over: got round {told.number}, while round {now.number} is {now.phase}; "
            "expected the newest round while it is open, and those that trail it; check in again"
        )


class DeviceSettings(msgspec.Struct, frozen=True):
    """What a run tells its devices.

    Attributes:
        nonce: 32 hex digits of this round, from which its devices draw.
        round: which of its run this round is, from 0; its number, unless other runs have used the
            directory before.
        keys_per_client: key space -> most keys of a client.
        shared_keys: whether all clients of a round draw the same random keys.
        spec: how to train, as `RunSpec.for_devices` tells it; None in runs of functions of your
            own.
        delivery: the name of how slices are fetched; empty leaves it to the device.
        aggregation: the name of how updates are added up; empty likewise.
    """

    nonce: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    round: Annotated[int, msgspec.Meta(ge=0)]
    keys_per_client: dict[str, int]
    shared_keys: bool = False
    spec: dict[str, Any] | None = None
    delivery: str = ""
    aggregation: str = ""

    @property
    def run(self) -> DeviceSpec:
        """How to train."""
        return DeviceSpec.read(self.spec or {})

    @staticmethod
    def of(known: KnownRound) -> DeviceSettings:
        """The settings in the manifest of a round."""
        settings = {"round": known.manifest.number, **known.manifest.settings}
        try:
            return msgspec.convert(settings, DeviceSettings)
        except msgspec.ValidationError as error:
            raise InputError(
                f"round {known.id} does not belong to a run of a population: got settings in which "
                f"{error}; expected nonce and keys_per_client; take part with functions of "
                "your own, or publish the run with its plan"
            ) from error


@dataclass(frozen=True)
class _Rules:
    """What decides a client's keys besides its data, in one round; a `KeyRules`. This device is of
    one kind, and its operator knows which."""

    seed: int
    trial: int
    keys_per_client: Mapping[str, int]
    shared_keys: bool
    norms: Mapping[str, KeyTable] | None = None
    devices: tuple[DeviceClass, ...] = ()


@dataclass
class PopulationClient:
    """One client of a population, as a participant of rounds.

    Args:
        population: `settings -> the population`; called when a run is met for the first time.
        rehearsed: seed and trial of a run in process whose keys and updates it makes, from its own
            operator; None draws from the nonce of each round.
        directory: where the client's state is kept between rounds, a folder for each run; None
            keeps it in memory. A state counts in later rounds of its run alone.
    """

    client: int
    population: Callable[[DeviceSettings], Clients]
    rehearsed: tuple[int, int] | None = None
    directory: Path | None = None
    _met: dict[bytes, Clients] = field(default_factory=dict, repr=False)

    def participant(self, fetch: Fetch = Device.fetch, send: Send = Device.send) -> Participant:
        """What it does in a round."""
        return Participant(self.choose, self.train, fetch, send, self.keep, self.measure)

    def choose(self, known: KnownRound) -> KeysBySpace:
        """The keys that the client chooses in process, too."""
        settings, clients = DeviceSettings.of(known), self._clients(known)
        check_keys_per_client(known.layout, settings.keys_per_client)
        norms, users = facts_in(known.manifest.settings)
        clients = replace(clients, users=users)  # of others, it knows what the round tells
        rules = _Rules(
            *self._draws(settings), settings.keys_per_client, settings.shared_keys, norms
        )
        return choose_keys(self.client, settings.round, known.layout, clients, rules)

    def train(self, known: KnownRound, fetched: Submodel) -> Any:
        """The update that the client makes in process, too, or its report where it says more."""
        settings, bound = DeviceSettings.of(known), bound_of(known.manifest.settings)
        clients, t = self._clients(known), settings.round
        path, state = (*self._draws(settings), t), clients.states.get(self.client, before=t)
        held = bound, state, fetched.frozen
        job = ClientJob.of(*path, self.client, fetched.keys, fetched.model, *held)
        report = job.brought(clients)
        return report.update if report.beside is None else report

    def measure(self, known: KnownRound, fetched: Submodel, evaluates: Evaluates) -> Any:
        """What the client sends of the metrics of its sub-model on its own examples."""
        clients = self._clients(known)
        own, is_held = (clients.held or clients.data)(self.client), clients.held is not None
        with running("localize"):
            examples = clients.localize(own, fetched.keys)
        count = count_examples(examples) or 0
        if not count or clients.measure is None:
            return evaluates.numbers({}, count)
        with running("computing metrics"):
            return evaluates.numbers(clients.measure(fetched.model, examples), count, is_held)

    def keep(self, known: KnownRound, state: bytes) -> None:
        """Keeps what the client goes on with in its next round."""
        states, t = self._clients(known).states, DeviceSettings.of(known).round
        states.offer({self.client: state})
        states.write(t)
        states.commit(t)

    def _draws(self, settings: DeviceSettings) -> tuple[int, int]:
        """Seed and trial, in the words of a run in process."""
        return self.rehearsed or (int(settings.nonce, 16), 0)

    def _clients(self, known: KnownRound) -> Clients:
        settings = DeviceSettings.of(known)
        first = known.manifest.number - settings.round  # runs that follow each other differ in it
        name = msgspec.json.encode(msgspec.structs.replace(settings, nonce="", round=first))
        if name not in self._met:
            folder = self.directory and self.directory / sha256(name).hexdigest()[:16]
            clients = replace(self.population(settings), states=ClientStates(folder))
            if not 0 <= self.client < clients.count:
                raise InputError(
                    f"the population has no such client: got {self.client}; expected "
                    f"0..{clients.count - 1}; choose another number"
                )
            self._met = {name: clients}  # a device follows one run at a time
        return self._met[name]
