"""Fetches through a relay: the service learns which slices are wanted, and not by whom.

One sealed request for each slice, shuffled, all of one length, padded to a public number; the relay
mixes them with those of other devices. Never is a slice asked for directly: a relay that is away is
an error. What every device receives is no secret and is fetched directly, as are the manifest, the
key configuration, and tables of which every device takes every slice.

Hidden is who fetches what. The update that a device sends afterwards carries its keys in the clear,
unless it is aggregated in a private way too.

A gateway that gave one device a key of its own could tell its requests from all others (RFC 9458,
section 7). So two sources must agree on the key: the gateway itself and the relay, or a file of the
device's operator. Two sources that work together can still deceive it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from math import prod

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.records import RecordArray
from keyhole.delivery.relay.batches import (
    HEAD_BYTES,
    LENGTH_BYTES,
    REQUESTS_TYPE,
    decode_answers,
    encode_requests,
)
from keyhole.delivery.relay.binary_http import BinaryResponse
from keyhole.delivery.relay.client import CHECK_FIELD, BlindClient, BlindQuestion, TableShape
from keyhole.delivery.relay.gateway import ERROR_BYTES
from keyhole.delivery.relay.ohttp import KeyConfig, decode_configs
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import FetchTraffic, KnownRound, Submodel
from keyhole.device.segments import download_table
from keyhole.errors import (
    DamageError,
    InputError,
    KeyholeError,
    MalformedError,
    NotFoundError,
    ProtocolError,
    RequestError,
    ServiceError,
    TooLateError,
)
from keyhole.server.checksums import sum_records
from keyhole.wire.http import HttpClient, Received, refusal_of
from keyhole.wire.messages import check_of
from keyhole.wire.private import KEYS_PATH, MAX_CONFIG, RELAY_KEYS_PATH, RELAY_PATH
from keyhole.wire.sockets import refuse_longer


@dataclass(frozen=True)
class _Source:
    name: str
    client: HttpClient
    path: str

    def fetch(self) -> bytes:
        try:
            return bytes(self.client.get(self.path, limit=MAX_CONFIG).body)
        except RequestError as error:
            raise _no_key(f"a refusal of the {self.name}, {type(error).__name__}") from error


def agreed_config(relay: HttpClient, gateway: HttpClient, pinned: bytes | None) -> KeyConfig:
    """Returns the key configuration to use.

    Args:
        relay: passes on what the gateway tells it.
        gateway: tells it the device directly; what is asked is no secret.
        pinned: a list of configurations that the device holds; then nobody is asked.

    Raises:
        ServiceError: the sources differ, or one gives none that can be used.
    """
    listed = pinned
    if listed is None:
        listed = _Source("relay", relay, RELAY_KEYS_PATH).fetch()
        if _Source("gateway", gateway, KEYS_PATH).fetch() != listed:
            raise _no_key("one from the relay and another from the gateway")
    try:
        return decode_configs(listed)[0]
    except MalformedError as error:
        raise _no_key("none that can be used") from error


def _no_key(got: str) -> ServiceError:
    return ServiceError(
        "no key configuration that all devices share",
        got=got,
        allowed="the same from relay and gateway, or one of a file",
        fix="try again; if it happens every time, ask the operator for the configuration",
    )


_MAX_REQUESTS = 16_384  # in one body
_SEALED_ERROR = ERROR_BYTES + 48  # bytes of a refusal under either cipher
_PASSING = 500  # a status from which on asking again may help


@dataclass
class RelayedFetch:
    """Fetches through a relay. Called as `Device.fetch` is.

    Args:
        relay: to send sealed requests to.
        pinned: the gateway's key configuration, from a file of the operator; None compares what
            relay and gateway say.
        max_keys: table -> number of requests that every device makes, where the round does not
            say how many keys a client chooses.
        max_requests: for all tables. A round that asks for more is refused before one is sealed:
            each takes a tenth of a millisecond and some kilobytes of memory until it is answered.
        max_bytes: of the slices that they bring, padding included, which are held at once.
    """

    relay: HttpClient
    pinned: bytes | None = None
    max_keys: Mapping[str, int] = field(default_factory=dict)
    max_requests: int = 65_536
    max_bytes: int = 1 << 30
    _config: KeyConfig | None = field(default=None, init=False, repr=False)

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        Raises:
            KeySpaceError: keys do not fit the round, or are more than all devices ask for.
            TooLateError: the round has been removed.
            DamageError: slices are not those that were published, time and again.
            ServiceError: the relay or the gateway is away, refuses, or makes no sense, or the round
                asks for more than `max_requests` or `max_bytes`. Nothing has been asked for
                directly.
        """
        known, traffic = device.known(round), FetchTraffic()
        chosen = known.keys_by_space(keys)
        wanted = [part.keys_of(chosen).array for part in known.layout.parts]
        shapes = [shape for shape in map(partial(self._shape, known), range(len(wanted))) if shape]
        self._refuse_many(shapes)
        hidden = self._retrieve(device, known, shapes, [wanted[s.table] for s in shapes], traffic)
        found = {shape.table: records for shape, records in zip(shapes, hidden, strict=True)}
        found |= _plainly(device, round, set(range(len(wanted))) - found.keys(), wanted, traffic)
        records = [found[place] for place in range(len(wanted))]
        return Submodel(known.assemble(records, chosen), chosen, traffic)

    def _shape(self, known: KnownRound, place: int) -> TableShape | None:
        """The public numbers of a table that is asked through the relay; None for another.

        Not asked so are tables of which every device gets every slice, by their public numbers.
        """
        info = known.manifest.tables[place]
        if not info.factors or not info.record_bytes:
            return None
        limit = self.max_keys.get(info.name) or _max_keys(known, info.name, info.factors)
        if limit >= info.num_keys and info.segments:
            return None
        return TableShape(place, info.num_keys, info.record_bytes, min(limit, info.num_keys))

    def _refuse_many(self, shapes: Sequence[TableShape]) -> None:
        """Refuses a round whose numbers, which can be anything, ask for more than a device does."""
        count = sum(shape.max_keys for shape in shapes)
        total = sum(shape.max_keys * shape.record_bytes for shape in shapes)
        if count > self.max_requests or total > self.max_bytes:
            raise ServiceError(
                "the round asks for more requests than this device makes",
                got=f"{count} requests for {total} bytes",
                allowed=f"{self.max_requests} requests for {self.max_bytes} bytes",
                fix="raise max_requests or max_bytes, if the service is to be trusted with it",
            )

    def _retrieve(
        self,
        device: Device,
        known: KnownRound,
        shapes: Sequence[TableShape],
        keys: Sequence[KeyArray],
        traffic: FetchTraffic,
    ) -> list[RecordArray]:
        """The records of each table, asked for until all are there and right.

        No request is sent twice. What is asked again is sealed anew, all of it and with the same
        padding, so that repetition does not tell which keys are wanted.
        """
        if not shapes:
            return []
        attempts, seed = self.relay.attempts(f"POST {RELAY_PATH}"), Prg.fresh().bytes(SEED_BYTES)
        while True:
            after: float | None = None
            try:
                config = self._config or agreed_config(self.relay, device.client, self.pinned)
                blind = BlindClient(config, known.id, shapes)
                question = blind.ask(keys, Prg(seed))
                replies, reason, after = self._ask(device, blind, shapes, question, traffic)
                if not reason:
                    self._config = config
                    return _opened(question, shapes, replies)
            except DamageError as error:
                attempts.failed("damage", error=error)
                continue
            except _AgainError as error:
                reason = str(error)
            except MalformedError:
                self._config = None  # the gateway may have another key by now
                reason = "requests that the gateway cannot open, or answers that do not open"
            attempts.failed(reason, after)

    def _ask(
        self,
        device: Device,
        blind: BlindClient,
        shapes: Sequence[TableShape],
        question: BlindQuestion,
        traffic: FetchTraffic,
    ) -> tuple[list[bytes], str, float | None]:
        """Replies of the gateway, or why there are none and how long to wait."""
        lengths = [max(blind.reply_bytes(at), _SEALED_ERROR) for at in range(len(shapes))]
        each = LENGTH_BYTES + max(lengths)
        refuse_longer("a slice", HEAD_BYTES + each, device.max_answer)
        at_once = min(_MAX_REQUESTS, (device.max_answer - HEAD_BYTES) // each)
        # What all answers may have together: not each of them can be as long as the longest.
        pairs = zip(shapes, lengths, strict=True)
        room = sum(shape.max_keys * (LENGTH_BYTES + length) for shape, length in pairs)
        messages, replies = question.messages(), list[bytes]()
        for start in range(0, len(messages), at_once):
            piece = messages[start : start + at_once]
            body = encode_requests(piece)
            got = self._post(body, HEAD_BYTES + min(room, each * len(piece)))
            traffic.requests += 1
            traffic.bytes_up += len(body)
            traffic.bytes_down += len(got.body)
            if got.problem:
                return [], got.problem, got.after
            replies += decode_answers(bytes(got.body), len(piece))
            room -= len(got.body) - HEAD_BYTES
        return replies, "", None

    def _post(self, body: bytes, limit: int) -> Received:
        try:
            return self.relay.exchange(
                "POST",
                RELAY_PATH,
                body,
                headers={"content-type": REQUESTS_TYPE},
                token=None,
                limit=limit,
                may_repeat=False,
            )
        except RequestError as error:
            raise ServiceError(
                "the relay refuses",
                got=f"{type(error).__name__}: {error.wrong}",
                allowed="a relay that takes sealed requests",
                fix="check the URL of the relay; nothing was asked for without it",
            ) from error


def _plainly(
    device: Device,
    round: Assignment | str,
    places: Set[int],
    wanted: Sequence[KeyArray],
    traffic: FetchTraffic,
) -> dict[int, RecordArray]:
    """Tables that tell nothing: those of everyone, whole ones, and those of no bytes."""
    known = device.known(round)
    tables, token = known.manifest.tables, device.token_for(round)
    found: dict[int, RecordArray] = {}
    everyones = [(place, wanted[place]) for place in sorted(places) if not tables[place].factors]
    got = device.fetch_records(round, everyones, traffic)
    for (place, _), slices in zip(everyones, got, strict=True):
        found[place] = slices.records
    limit = device.max_answer
    for place in places - found.keys():
        keys, whole = wanted[place], np.empty((tables[place].num_keys, 0), np.uint8)
        if tables[place].record_bytes:
            whole = download_table(
                device.client, known, place, token=token, max_bytes=limit, traffic=traffic
            )
        found[place] = whole[keys]
    return found


class _AgainError(Exception):
    """The gateway could not answer now."""


def _opened(
    question: BlindQuestion, shapes: Sequence[TableShape], replies: Sequence[bytes]
) -> list[RecordArray]:
    """The records of each table, once all replies are good and right, padding too."""
    responses = question.responses(replies)
    for response in responses:
        if response.status != 200:
            raise _refusal(response)
    records = question.records(responses)
    start = 0
    for shape in shapes:
        _check(responses[start : start + shape.max_keys])
        start += shape.max_keys
    return records


def _check(responses: Sequence[BinaryResponse]) -> None:
    """Compares slices of one table with what vouches for them; raises DamageError."""
    whole = np.frombuffer(b"".join([r.content for r in responses]), np.uint8)
    sums = sum_records(whole.reshape(len(responses), -1))
    for at, response in enumerate(responses):
        if dict(response.fields).get(CHECK_FIELD) != check_of([sums[at : at + 1]]).encode("ascii"):
            raise DamageError(
                "slices were damaged",
                got="records whose sums differ from those of the service",
                allowed="what was published",
                fix="fetch them again; if it happens every time, the service's disk is at fault",
            )


def _refusal(response: BinaryResponse) -> KeyholeError | _AgainError:
    """What a refusal of the gateway is to the device; it may be a status alone."""
    if response.status >= _PASSING or response.status == ProtocolError.http_status:
        return _AgainError(f"status {response.status} of the gateway")
    if response.content:
        return refusal_of(response.status, response.content)
    kind = {404: NotFoundError, 410: TooLateError}.get(response.status, ServiceError)
    return kind(
        "the gateway refuses",
        got=f"status {response.status}",
        allowed="slices of a round that is there",
        fix="check in again",
    )


def _max_keys(known: KnownRound, name: str, factors: Sequence[str]) -> int:
    """How many slices of a table a client chooses at most: every combination of its keys."""
    per_client = known.manifest.settings.get("keys_per_client")
    told = per_client if isinstance(per_client, dict) else {}
    counts = [count for count in map(told.get, factors) if type(count) is int and count > 0]
    if len(counts) < len(factors):
        raise InputError(
            f"it is not known to how many requests those for table {name!r} are padded",
            got="a round that does not say how many keys a client chooses",
            allowed="keys_per_client in the settings of the round, or a number for the table",
            fix="publish it with them, or pass max_keys",
        )
    return prod(counts)
