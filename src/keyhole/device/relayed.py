"""Fetches a sub-model through a relay: the service learns which slices are wanted, not by whom.

One sealed request for each slice, shuffled, all of one length, padded to a public number; the relay
mixes them with those of other devices. Never is a slice asked for directly: a relay that is away is
an error. What every device receives is no secret and is fetched directly, as are the manifest, the
key configuration, and tables of which every device takes every slice.

A gateway that gave one device a key of its own could tell its requests from all others (RFC 9458,
section 7). So a device asks the gateway itself and the relay, and both must agree; or it is given a
file by its operator. Two sources that work together can still deceive it.

Hidden: who fetches what. Not hidden: the keys in the update that a device sends afterwards, unless
it is aggregated in a private way too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import hash_leaves
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.exchange import AskAgainError, Retrieval, Unanswered, retrieve
from keyhole.delivery.records import RecordArray
from keyhole.delivery.relay.binary_http import BinaryResponse
from keyhole.delivery.relay.client import CHECK_FIELD, BlindClient, BlindQuery, TableShape
from keyhole.delivery.relay.gateway import (
    ERROR_BYTES,
    HEAD_BYTES,
    LENGTH_BYTES,
    REQUESTS_TYPE,
    decode_answers,
    encode_requests,
)
from keyhole.delivery.relay.ohttp import KeyConfig, decode_configs
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import FetchTraffic, KnownRound, Submodel, not_padded
from keyhole.errors import (
    DamageError,
    KeyholeError,
    MalformedError,
    NotFoundError,
    ProtocolError,
    RequestError,
    ServiceError,
    TooLateError,
)
from keyhole.wire.http import HttpClient, Received, refusal_of
from keyhole.wire.private import KEYS_PATH, MAX_CONFIG, RELAY_KEYS_PATH, RELAY_PATH
from keyhole.wire.sockets import refuse_longer


def agreed_config(relay: HttpClient, gateway: HttpClient, pinned: bytes | None) -> KeyConfig:
    """Returns the key configuration to use: of `pinned`, a list that the device holds, or else what
    relay and gateway say alike. What is asked is no secret."""
    listed = pinned
    if listed is None:
        listed = _fetch_configs("relay", relay, RELAY_KEYS_PATH)
        if _fetch_configs("gateway", gateway, KEYS_PATH) != listed:
            raise _no_key("one from the relay and another from the gateway")
    try:
        return decode_configs(listed)[0]
    except MalformedError as error:
        raise _no_key("none that can be used") from error


def _fetch_configs(name: str, client: HttpClient, path: str) -> bytes:
    try:
        return bytes(client.get(path, limit=MAX_CONFIG).body)
    except RequestError as error:
        raise _no_key(f"a refusal of the {name}, {type(error).__name__}") from error


def _no_key(got: str) -> ServiceError:
    return ServiceError(
        f"no key configuration that all devices share: got {got}; expected the same from relay and "
        "gateway, or one of a file; try again; if it happens every time, ask the operator for the "
        "configuration"
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
        token: of this device at the relay, which is shown to nobody else.
        max_keys: table -> number of requests that every device makes, where the round does not
            say how many keys a client chooses.
        max_requests: for all tables. A round that asks for more is refused before one is sealed:
            each takes a tenth of a millisecond and some kilobytes of memory until it is answered.
        max_bytes: of the slices that they bring, padding included, which are held at once.
    """

    relay: HttpClient
    pinned: bytes | None = None
    token: str | None = field(default=None, repr=False)
    max_keys: Mapping[str, int] = field(default_factory=dict)
    max_requests: int = 65_536
    max_bytes: int = 1 << 30
    config: KeyConfig | None = field(default=None, init=False, repr=False)

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
        hidden: list[RecordArray] = []
        if shapes:
            asking = _Asking(self, device, known.id, shapes, traffic)
            (hidden,) = retrieve([Retrieval(asking, [wanted[s.table] for s in shapes])], asking)
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
        limit = known.max_keys(place, self.max_keys)
        if limit is None:
            raise not_padded(info.name, "requests those for")
        if limit == info.num_keys and info.segments:
            return None
        return TableShape(place, info.num_keys, info.record_bytes, limit)

    def _refuse_many(self, shapes: Sequence[TableShape]) -> None:
        """Refuses a round whose numbers, which can be anything, ask for more than a device does."""
        count = sum(shape.max_keys for shape in shapes)
        total = sum(shape.max_keys * shape.record_bytes for shape in shapes)
        if count > self.max_requests or total > self.max_bytes:
            raise ServiceError(
                f"the round asks for more requests than this device makes: got {count} requests "
                f"for {total} bytes; expected {self.max_requests} requests for {self.max_bytes} "
                "bytes; raise max_requests or max_bytes, if the service is to be trusted with it"
            )


class _Asking:
    """The client of a round and its link to the relay, as `retrieve` uses them. What is asked again
    is sealed anew, all of it and with the same padding, so that repetition does not tell which keys
    are wanted."""

    def __init__(
        self,
        fetch: RelayedFetch,
        device: Device,
        round_id: str,
        shapes: Sequence[TableShape],
        traffic: FetchTraffic,
    ) -> None:
        self._fetch, self._device, self._round = fetch, device, round_id
        self._shapes, self._traffic = shapes, traffic
        self._seed = Prg.fresh().bytes(SEED_BYTES)
        self._attempts = fetch.relay.attempts(f"POST {RELAY_PATH}")
        self._reply_bytes: list[int] = []  # of each table

    def query(self, keys: Sequence[KeyArray], prg: Prg | None = None) -> _RelayedQuery:
        fetch = self._fetch
        if fetch.config is None:
            fetch.config = agreed_config(fetch.relay, self._device.client, fetch.pinned)
        blind = BlindClient(fetch.config, self._round, self._shapes)
        lengths = [blind.reply_bytes(at) for at in range(len(self._shapes))]
        self._reply_bytes = [max(length, _SEALED_ERROR) for length in lengths]
        return _RelayedQuery(blind.query(keys, prg or Prg(self._seed)), self._shapes)

    def exchange(
        self, sent: Mapping[int, tuple[bytes, ...]]
    ) -> Mapping[int, Sequence[bytes] | Unanswered]:
        """Implements `Links.exchange`: many sealed requests in one body."""
        return {place: self._exchange(messages) for place, messages in sent.items()}

    def failed(self, place: int, failure: Unanswered) -> None:
        """Implements `Links.failed`: waits, or raises."""
        reason = failure.reason
        if isinstance(failure.error, DamageError):
            return self._attempts.failed("damage", error=failure.error)
        if isinstance(failure.error, MalformedError):
            self._fetch.config = None  # the gateway may have another key by now
            reason = "requests that the gateway cannot open, or answers that do not open"
        return self._attempts.failed(reason, failure.after)

    def _exchange(self, messages: Sequence[bytes]) -> Sequence[bytes] | Unanswered:
        max_answer, each = self._device.max_answer, LENGTH_BYTES + max(self._reply_bytes)
        refuse_longer("a slice", HEAD_BYTES + each, max_answer)
        at_once = min(_MAX_REQUESTS, (max_answer - HEAD_BYTES) // each)
        # What all answers may have together: not each of them can be as long as the longest.
        pairs = zip(self._shapes, self._reply_bytes, strict=True)
        room = sum(shape.max_keys * (LENGTH_BYTES + length) for shape, length in pairs)
        replies = list[bytes]()
        for start in range(0, len(messages), at_once):
            piece = messages[start : start + at_once]
            got = self._post(encode_requests(piece), HEAD_BYTES + min(room, each * len(piece)))
            if got.problem:
                return Unanswered(got.problem, got.after)
            try:
                replies += decode_answers(bytes(got.body), len(piece))
            except MalformedError as error:
                return Unanswered("answers that cannot be read", error=error)
            room -= len(got.body) - HEAD_BYTES
        return replies

    def _post(self, body: bytes, limit: int) -> Received:
        try:
            got = self._fetch.relay.exchange(
                "POST",
                RELAY_PATH,
                body,
                headers={"content-type": REQUESTS_TYPE},
                token=self._fetch.token,
                limit=limit,
                may_repeat=False,
            )
        except RequestError as error:
            raise ServiceError(
                f"the relay refuses: got {type(error).__name__}: {error.wrong}; expected a relay "
                "that takes sealed requests; check the URL of the relay; nothing was asked for "
                "without it"
            ) from error
        self._traffic.requests += 1
        self._traffic.bytes_up += len(body)
        self._traffic.bytes_down += len(got.body)
        return got


@dataclass(frozen=True)
class _RelayedQuery:
    """One query through the relay, whose slices are compared with what vouches for them."""

    blind: BlindQuery
    shapes: Sequence[TableShape]

    def messages(self) -> tuple[bytes, ...]:
        return self.blind.messages()

    def decode(self, replies: Sequence[bytes]) -> list[RecordArray]:
        """The records of each table, once all replies are good and right, padding too."""
        responses = self.blind.responses(replies)
        for response in responses:
            if response.status != 200:
                raise _refusal(response)
        records = self.blind.records(responses)
        start = 0
        for shape in self.shapes:
            try:
                _check(responses[start : start + shape.max_keys])
            except DamageError as error:
                raise AskAgainError("damage", error) from error
            start += shape.max_keys
        return records


def _plainly(
    device: Device,
    round: Assignment | str,
    places: Set[int],
    wanted: Sequence[KeyArray],
    traffic: FetchTraffic,
) -> dict[int, RecordArray]:
    """Tables that tell nothing: those of everyone, whole ones, and those of no bytes."""
    tables, found = device.known(round).manifest.tables, dict[int, RecordArray]()
    everyones = [(place, wanted[place]) for place in sorted(places) if not tables[place].factors]
    got = device.fetch_records(round, everyones, traffic)
    for (place, _), slices in zip(everyones, got, strict=True):
        found[place] = slices.records
    for place in places - found.keys():
        if tables[place].record_bytes:
            found[place] = device.fetch_table(round, place, traffic)[wanted[place]]
        else:
            found[place] = np.empty((len(wanted[place]), 0), np.uint8)
    return found


def _check(responses: Sequence[BinaryResponse]) -> None:
    """Compares slices of one table with what vouches for them; raises DamageError."""
    whole = np.frombuffer(b"".join([r.content for r in responses]), np.uint8)
    leaves = hash_leaves(whole.reshape(len(responses), -1))
    for leaf, response in zip(leaves, responses, strict=True):
        if dict(response.fields).get(CHECK_FIELD) != leaf[:4].tobytes().hex().encode("ascii"):
            raise DamageError(
                "slices were damaged: got records whose leaves differ from those of the service; "
                "expected what was published; fetch them again; if it happens every time, the "
                "service's disk is at fault"
            )


def _refusal(response: BinaryResponse) -> KeyholeError | AskAgainError:
    """What a refusal of the gateway is to the device; it may be a status alone."""
    if response.status >= _PASSING or response.status == ProtocolError.http_status:
        return AskAgainError(f"status {response.status} of the gateway")
    if response.content:
        return refusal_of(response.status, response.content)
    kind = {404: NotFoundError, 410: TooLateError}.get(response.status, ServiceError)
    return kind(
        f"the gateway refuses: got status {response.status}; expected slices of a round that is "
        "there; check in again"
    )
