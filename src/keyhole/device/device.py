"""Fetches slices and sends updates on a device, whatever the network does.

A device needs no framework: call it from a thread, a script or a callback. With `fetch` it tells
the service its keys and nothing else, with `fetch_all` not even those.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from keyhole.arrays import Array, KeyArray, Tree
from keyhole.crypto.merkle import HASH_BYTES, HashArray, hash_leaves
from keyhole.delivery.records import RecordArray
from keyhole.device.cache import SliceCache
from keyhole.device.fetch import (
    FetchTraffic,
    KnownRound,
    Slices,
    Submodel,
    Want,
    WholeModel,
    fetch_slices,
    refuse_unbound,
)
from keyhole.errors import (
    DamageError,
    NotFoundError,
    ServiceError,
    StorageError,
    ViolationError,
)
from keyhole.primitives.layout import ClientKeys
from keyhole.primitives.report import Report
from keyhole.wire.assignment import CheckIn, Phase, Wait, is_timely
from keyhole.wire.http import OCTETS, HttpClient
from keyhole.wire.manifest import (
    MAX_BYTES,
    Manifest,
    check_records,
    count_nodes,
    decode_round,
    digest_of,
    name_round,
    not_a_round,
    number_of,
)
from keyhole.wire.messages import encode_report, encode_update
from keyhole.wire.settings import refuse_clear
from keyhole.wire.signing import SIGNATURE, TrainerKey, read_signature
from keyhole.wire.sockets import Certificate, Clock, Retry, Timeouts, refuse_longer

DeviceKeys: TypeAlias = Mapping[str, Any] | ClientKeys
"""A device's keys: arrays by the name of their key space, or `Keys`."""

_JSON = "application/json"
_MAX_MESSAGE = 1 << 16  # bytes of an answer to a check-in
_MAX_ROUNDS = 4  # manifests that are kept
_MAX_WAIT = 3600.0  # seconds, whatever a service asks for
_NOTHING_SAID = CheckIn()


class Assignment(msgspec.Struct, frozen=True):
    """What a device is told that takes part in a round.

    Attributes:
        token: to show in this round; null where the service asks for none.
        sum_tokens: likewise, one for each aggregator that takes tokens of the service.
        fetch_after: seconds to wait before the first request, so that not all come at once.
    """

    round: str
    number: int
    token: str | None = None
    fetch_after: float = 0.0
    sum_tokens: tuple[str, str] | None = None

    def __repr__(self) -> str:
        """Without the tokens."""
        return f"Assignment(round {self.round})"


class RoundNow(msgspec.Struct, frozen=True):
    """The newest round of a service, whether it takes updates, and which others still do."""

    round: str
    number: int
    phase: Phase
    trailing: tuple[str, ...] = ()

    def takes(self, round_id: str) -> bool:
        """Returns whether updates of a round are taken."""
        return round_id in self.trailing or (round_id == self.round and self.phase == "open")


class _CheckedIn(msgspec.Struct, frozen=True):
    wait: float | None = None
    round: str | None = None
    number: int = 0
    token: str | None = None
    fetch_after: float = 0.0
    sum_tokens: tuple[str, str] | None = None


class Device:
    """A device of a slice service. Threads may share it.

    Other ways to fetch use its `client`, show what `token_for` gives, and allocate no more than
    `max_answer` at once.

    Args:
        url: of the service, such as `https://slices.example.org`.
        token: of this device, from the operator.
        ca: PEM file of the authorities to trust; None trusts those of the system.
        certificate: to show, where the service asks for mutual TLS.
        cache: slices of earlier rounds; None fetches everything again.
        retry: how often to try again.
        timeouts: when a silent service counts as away.
        max_keys: in one query; more are asked for in several.
        max_answer: bytes of the slices of one query, likewise. A slice or a segment that is longer
            is refused, whatever a manifest says: this is what a service can make a device allocate.
        trainer_key: that signs all manifests; None takes any, and no part in secure sums.
        trust_service: whether it takes part in them without that key, on the service's word.
        says: what it says of itself when it checks in; nothing, unless told.
        stop: once set, waiting ends at once and nothing is tried again.
        clock: how time passes; one that waits for `stop` if None.
        insecure: lets plain `http` leave this machine.

    Raises:
        InputError: the URL or a certificate cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca: Path | str | None = None,
        certificate: Certificate | None = None,
        cache: SliceCache | None = None,
        retry: Retry | None = None,
        timeouts: Timeouts | None = None,
        max_keys: int = 65_536,
        max_answer: int = 256 << 20,
        trainer_key: TrainerKey | None = None,
        trust_service: bool = False,
        says: CheckIn = _NOTHING_SAID,
        stop: threading.Event | None = None,
        clock: Clock | None = None,
        insecure: bool = False,
    ) -> None:
        self.stop = threading.Event() if stop is None else stop
        self.clock = Clock(sleep=self.stop.wait) if clock is None else clock
        self._token, self._cache, self._trainer_key = token, cache, trainer_key
        self._max_keys, self.max_answer, self.says = max_keys, max_answer, says
        self._is_pinned = trainer_key is not None or trust_service
        self.client = HttpClient(
            url,
            ca=ca,
            certificate=certificate,
            retry=retry,
            timeouts=timeouts,
            clock=self.clock,
            stop=self.stop,
            insecure=insecure,
        )
        self._rounds: OrderedDict[str, KnownRound] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Device({self.client!r}, {len(self._rounds)} rounds known)"

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes connections; a later request opens a new one."""
        self.client.close()

    def nameless(self) -> Device:
        """Returns a device of the same service with no token, cache or connection of this one's, by
        which the service could tell that both are one; to be closed."""
        made = copy(self)
        made._token, made._cache, made.client = None, None, self.client.apart()
        return made

    @cached_property
    def frozen(self) -> SliceCache:
        """Rows of frozen leaves, in a folder beside the slices of earlier rounds."""
        return (self._cache or SliceCache(None)).beside("frozen")

    def current(self) -> RoundNow:
        """Returns the newest round.

        Raises:
            NotFoundError: there is none yet.
            ServiceError: no usable answer.
        """
        got = self.client.get("/v1/rounds/current", token=self._token, limit=_MAX_MESSAGE)
        now: RoundNow = _message(got.body, RoundNow)
        _check_told(now.round, now.number)
        return now

    def check_in(self) -> Assignment | Wait:
        """Asks to take part; returns the round, or how many seconds to wait before asking again.
        Says of the device what `says` has.

        Raises:
            AccessError: the token of the device is not good.
            ServiceError: no usable answer.
        """
        said = b"" if self.says == CheckIn() else msgspec.json.encode(self.says)
        got = self.client.send(
            "/v1/checkin", said, token=self._token, limit=_MAX_MESSAGE, content_type=_JSON
        )
        told: _CheckedIn = _message(got.body, _CheckedIn)
        if told.round is None:
            return Wait(_bounded(told.wait))
        _check_told(told.round, told.number)
        wait = _bounded(told.fetch_after)
        return Assignment(told.round, told.number, told.token, wait, told.sum_tokens)

    def manifest(self, round: Assignment | str) -> Manifest:
        """Returns the manifest of a round, fetched once.

        Raises:
            InputError: `round` is not the identifier of one.
            DamageError: what arrives is not the manifest that the round is named after.
            AccessError: it is not signed by the trainer whose key this device pins.
            TooLateError, NotFoundError: the round is gone, or never was.
        """
        return self.known(round).manifest

    def known(self, round: Assignment | str) -> KnownRound:
        """Returns the round with its manifest; raises as `manifest` does."""
        round_id = round.round if isinstance(round, Assignment) else round
        with self._lock:
            if round_id in self._rounds:
                self._rounds.move_to_end(round_id)
                return self._rounds[round_id]
        number = _number(round_id)

        def check(body: memoryview) -> None:
            if name_round(bytes(body), number) != round_id:
                raise DamageError(
                    "the manifest was damaged: got bytes that the round is not named after; "
                    f"expected the manifest of round {round_id}; fetch it again; if it happens "
                    "every time, check what stands before the service"
                )

        path, token = f"/v1/rounds/{round_id}/manifest", self.token_for(round)
        got = self.client.get(path, token=token, limit=MAX_BYTES, check=check)
        if self._trainer_key is not None:
            self._trainer_key.check(round_id, read_signature(got.headers.get(SIGNATURE)))
        known = KnownRound(round_id, decode_round(bytes(got.body), number))
        with self._lock:
            self._rounds[round_id] = known
            while len(self._rounds) > _MAX_ROUNDS:
                self._rounds.popitem(last=False)
        return known

    def refuse_unpinned(self) -> None:
        """Raises ViolationError for a secure sum on the word of the service alone: it could give
        everybody else another round, until the sum is this device's update."""
        if not self._is_pinned:
            raise ViolationError(
                "a secure sum whose round nobody vouches for: got a device without the trainer's "
                "key; expected the public key of the trainer, which signs its rounds; nothing was "
                "fetched or sent; give --trainer-key FILE, or --trust-service to take the "
                "service's word"
            )

    def fetch(self, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of `keys` (option 2 or 3), by one query for the slices of all
        tables.

        Equal in bytes to what `ServerState.select` gives in process, or its coded slices stand for.

        Args:
            round: as `check_in` assigned it, or its identifier where the service asks for no token.
            keys: of each key space.

        Raises:
            KeySpaceError: keys do not fit the round.
            TooLateError: the round has been removed.
            DamageError: what arrived was not what was published, time and again.
            ServiceError: no usable answer.
        """
        known = self.known(round)
        chosen, traffic = known.keys_by_space(keys), FetchTraffic()
        asked = [(i, part.keys_of(chosen).array) for i, part in enumerate(known.layout.parts)]
        found = self.fetch_records(round, asked, traffic)
        model = known.assemble([s.records for s in found], chosen)
        return Submodel(model, chosen, traffic, is_told=True)

    def fetch_slices(self, round: Assignment | str, table: str, keys: Any) -> dict[str, Array]:
        """Returns the slices of one table, path -> (m, *shape); of a model or of a select
        function."""
        known = self.known(round)
        place = known.table(table)
        z = known.keys_of_table(place, keys).array
        (found,) = self.fetch_records(round, [(place, z)], FetchTraffic())
        return known.records[place].decode(found.records)

    def fetch_segment(self, round: Assignment | str, table: str, place: int) -> RecordArray:
        """Returns the records of one segment of a table, checked: (count, record_bytes)."""
        return self._segment(round, self.known(round).table(table), place, FetchTraffic())

    def fetch_all(self, round: Assignment | str) -> WholeModel:
        """Fetches all tables (option 1, broadcast). The device selects at home, and nobody learns a
        key."""
        known, traffic = self.known(round), FetchTraffic()
        places = range(known.trained)
        tables = tuple(self.fetch_table(round, place, traffic) for place in places)
        return WholeModel(known, tables, traffic)

    def fetch_table(
        self, round: Assignment | str, place: int, traffic: FetchTraffic
    ) -> RecordArray:
        """Returns all records of the table at a place of the manifest, checked: (K, record_bytes).

        Args:
            traffic: what it costs is added here.
        """
        info = self.known(round).manifest.tables[place]
        if not info.segments:
            raise NotFoundError(
                f"table {info.name!r} cannot be downloaded: got one that is computed on demand; "
                "expected a table of segments; ask for slices of it, with fetch_slices"
            )
        pieces = [self._segment(round, place, at, traffic) for at in range(len(info.segments))]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def send(self, round: Assignment | str, update: Tree | Report, keys: DeviceKeys) -> int:
        """Sends the update of this device; sending the same again changes nothing.

        Args:
            round: as `check_in` assigned it.
            update: start minus end, shaped as the sub-model of `keys`; or a report that holds it,
                of which weight and metrics are sent, and the state is not.
            keys: what the sub-model was selected with.

        Returns:
            How many bytes were sent.

        Raises:
            ConflictError: the service has a different update of this device and round.
            TooLateError: the round is closed.
            RequestError: it takes shares of updates, at two aggregators; nothing is sent.
            ServiceError: no usable answer.
        """
        known = self.known(round)
        refuse_clear(known.manifest.settings)
        layout, chosen = known.sent_as(keys)
        report = Report.of(update)
        body = encode_update(layout, report.update, chosen, digest_of(known.id))
        body = encode_report(report) + body
        path, token = f"/v1/rounds/{known.id}/updates", self.token_for(round)
        self.client.send(path, body, token=token, limit=_MAX_MESSAGE, content_type=OCTETS)
        return len(body)

    def fetch_records(
        self, round: Assignment | str, asked: Sequence[tuple[int, KeyArray]], traffic: FetchTraffic
    ) -> list[Slices]:
        """Returns the records of keys of tables, by one query and with the help of the cache.

        Args:
            asked: places of tables in the manifest, and keys that have been checked.
            traffic: what it costs is added here.
        """
        known = self.known(round)
        has_frozen = any(known.manifest.tables[place].is_frozen for place, _ in asked)
        cache = None if has_frozen else self._cache  # those are kept by their root
        refuse_unbound(known.manifest, [place for place, _ in asked])
        wants = []
        for place, keys in asked:
            table = known.records[place]
            held = None if cache is None else cache.find(table, keys)
            wants.append(Want(place, known.manifest.tables[place], keys, held))
        found = fetch_slices(
            self.client,
            known.id,
            wants,
            token=self.token_for(round),
            max_keys=self._max_keys,
            max_bytes=self.max_answer,
            traffic=traffic,
        )
        if cache is not None:
            kept = [
                (known.records[place], keys, slices.records, slices.leaves)
                for (place, keys), slices in zip(asked, found, strict=True)
            ]
            with suppress(StorageError):  # a full disk keeps nobody from taking part
                cache.keep(kept)
        return found

    def token_for(self, round: Assignment | str) -> str | None:
        """Returns what to show in a round; None where nothing is asked for."""
        return round.token if isinstance(round, Assignment) else self._token

    def has_timely_token(self) -> bool:
        """Returns whether the token of this device is good by its own clock, as far as the token
        tells."""
        return is_timely(self._token, self.clock.wall())

    def _segment(
        self, round: Assignment | str, table: int, place: int, traffic: FetchTraffic
    ) -> RecordArray:
        """The records of one segment, held to the root of the manifest."""
        known, token = self.known(round), self.token_for(round)
        info, segment = known.manifest.tables[table], known.segment(table, place)
        shape = segment.count, info.record_bytes
        refuse_longer("a segment", prod(shape), self.max_answer)
        path = f"/v1/rounds/{known.id}/tables/{table}/segments/{place}"
        keys = np.arange(segment.first, segment.first + segment.count)
        proof = self._segment_proof(known, token, path, count_nodes(info, keys))

        def check(body: memoryview) -> None:
            nonlocal proof
            if len(body) != prod(shape):
                raise _damaged(known, "a segment of another length")
            leaves = hash_leaves(np.frombuffer(body, np.uint8).reshape(shape))
            try:
                check_records(info, keys, leaves, proof)
            except DamageError:  # of the proof or the records: it does not tell
                proof = self._segment_proof(known, token, path, len(proof))
                raise

        records = self.client.get(path, token=token, limit=prod(shape), check=check).body
        traffic.requests += 2
        traffic.bytes_down += proof.nbytes + len(records)
        return np.frombuffer(records, np.uint8).reshape(shape)

    def _segment_proof(
        self, known: KnownRound, token: str | None, path: str, nodes: int
    ) -> HashArray:
        """The nodes that lead from the records of a segment to the root."""

        def check(body: memoryview) -> None:
            if len(body) != nodes * HASH_BYTES:
                raise _damaged(known, "a proof of another length")

        limit = max(1, nodes * HASH_BYTES)
        body = self.client.get(f"{path}/proof", token=token, limit=limit, check=check).body
        return np.frombuffer(body, np.uint8).reshape(nodes, HASH_BYTES)


def _number(round_id: str) -> int:
    """The number of a round; its identifier becomes part of a path, so its form is checked."""
    number = number_of(round_id)
    if number is None:
        raise not_a_round(round_id)
    return number


def _check_told(round_id: str, number: int) -> None:
    if number_of(round_id) != number:
        raise _no_sense("the identifier of a round")


def _message(body: memoryview, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_sense("a message") from error


def _bounded(seconds: float | None) -> float:
    """A wait that a service asks for; NaN cannot come out of JSON."""
    if seconds is None:
        raise _no_sense("neither a round nor a wait")
    return min(max(seconds, 0.0), _MAX_WAIT)


def _no_sense(what: str) -> ServiceError:
    return ServiceError(
        f"the service says something that makes no sense: got {what}; expected messages as "
        "docs/wire.md describes them; check the URL, and that both sides are of one version"
    )


def _damaged(known: KnownRound, what: str) -> DamageError:
    return DamageError(
        f"a segment of round {known.id} was damaged: got {what}; expected the segment that was "
        "published; fetch it again; if it happens every time, the service's files are damaged"
    )
