"""Fetches a sub-model through a relay: the service learns which slices are wanted, not by whom.

One sealed request for each slice, shuffled, all of one length, padded to a public number; the relay
mixes them with those of other devices. Never is a slice asked for directly: a relay that is away is
an error. What every device receives is no secret and is fetched directly, as are the manifest, the
key configuration, and tables of which every device takes every slice.

A gateway that gave one device a key of its own could tell its requests from all others (RFC 9458,
section 7). So a device asks the gateway itself and the relay, and both must agree; or it is given a
file by its operator. Two sources that work together can still deceive it.

Each answer brings a slice and its path to the root of the round. One that is wrong, refuses or does
not open is left out, as if its key had found no place: were the device to fail or ask again, the
gateway, who knows which answer it spoiled, could see whose it was. What makes a device ask again
is that a whole body did not come or is not one of answers. The key configuration is fetched for
every round, whatever became of the last one.

Hidden: who fetches what. Not hidden: the keys in the update that a device sends afterwards, unless
it is aggregated in a private way too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.base import Retrieved
from keyhole.delivery.exchange import Retrieval, Unanswered, retrieve
from keyhole.delivery.paths import Top
from keyhole.delivery.records import RecordArray
from keyhole.delivery.relay.client import BlindClient, BlindQuery, TableShape
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
from keyhole.device.private import fetch_top, submodel_of
from keyhole.errors import MalformedError, RequestError, ServiceError
from keyhole.wire.http import HttpClient, Received
from keyhole.wire.private import (
    KEYS_PATH,
    MAX_CONFIG,
    RELAY_KEYS_PATH,
    RELAY_PATH,
    root_of_table,
    row_bytes_of,
)
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

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        Raises:
            KeySpaceError: keys do not fit the round, or are more than all devices ask for.
            DamageError: the top of a table is not that of the round, time and again.
            ServiceError: the relay or the gateway is away, or makes no sense, or the round
                asks for more than `max_requests` or `max_bytes`. Nothing has been asked for
                directly.
        """
        known, traffic = device.known(round), FetchTraffic()
        chosen = known.keys_by_space(keys)
        wanted = [part.keys_of(chosen).array for part in known.layout.parts]
        shapes = [shape for shape in map(partial(self._shape, known), range(len(wanted))) if shape]
        self._refuse_many(shapes)
        hidden: list[Retrieved] = []
        if shapes:
            tops = [_fetch_top(device, round, shape, traffic) for shape in shapes]
            asking = _Asking(self, device, known.id, shapes, traffic)
            asked = [wanted[shape.table] for shape in shapes]
            (got,) = retrieve([Retrieval(asking, asked)], asking)
            triples = zip(got, tops, asked, strict=True)
            hidden = [rows.checked(top, z) if top else rows for rows, top, z in triples]
        found = {shape.table: part for shape, part in zip(shapes, hidden, strict=True)}
        found |= _plainly(device, round, set(range(len(wanted))) - found.keys(), wanted, traffic)
        return submodel_of(known, [found[place] for place in range(len(wanted))], chosen, traffic)

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
        return TableShape(place, info.num_keys, row_bytes_of(info), limit)

    def _refuse_many(self, shapes: Sequence[TableShape]) -> None:
        """Refuses a round whose numbers, which can be anything, ask for more than a device does."""
        count = sum(shape.max_keys for shape in shapes)
        total = sum(shape.max_keys * shape.row_bytes for shape in shapes)
        if count > self.max_requests or total > self.max_bytes:
            raise ServiceError(
                f"the round asks for more requests than this device makes: got {count} requests "
                f"for {total} bytes; expected {self.max_requests} requests for {self.max_bytes} "
                "bytes; raise max_requests or max_bytes, if the service is to be trusted with it"
            )


class _Asking:
    """The client of a round and its link to the relay, as `retrieve` uses them. What is asked again
    is sealed again, all of it and with the same padding, so that repetition does not tell which
    keys are wanted."""

    def __init__(
        self,
        fetch: RelayedFetch,
        device: Device,
        round_id: str,
        shapes: Sequence[TableShape],
        traffic: FetchTraffic,
    ) -> None:
        self._fetch, self._device, self._shapes, self._traffic = fetch, device, shapes, traffic
        self._seed = Prg.fresh().bytes(SEED_BYTES)
        self._attempts = fetch.relay.attempts(f"POST {RELAY_PATH}")
        config = agreed_config(fetch.relay, device.client, fetch.pinned)
        self._blind = BlindClient(config, round_id, shapes)
        lengths = [self._blind.reply_bytes(at) for at in range(len(shapes))]
        self._reply_bytes = [max(length, _SEALED_ERROR) for length in lengths]

    def query(self, keys: Sequence[KeyArray], prg: Prg | None = None) -> BlindQuery:
        return self._blind.query(keys, prg or Prg(self._seed))

    def exchange(
        self, sent: Mapping[int, tuple[bytes, ...]]
    ) -> Mapping[int, Sequence[bytes] | Unanswered]:
        """Implements `Links.exchange`: many sealed requests in one body."""
        return {place: self._exchange(messages) for place, messages in sent.items()}

    def failed(self, place: int, failure: Unanswered) -> None:
        """Implements `Links.failed`: waits, or raises."""
        self._attempts.failed(failure.reason, failure.after)

    def _exchange(self, messages: Sequence[bytes]) -> Sequence[bytes] | Unanswered:
        max_answer, each = self._device.max_answer, LENGTH_BYTES + max(self._reply_bytes)
        refuse_longer("a slice", HEAD_BYTES + each, max_answer)
        at_once = min(_MAX_REQUESTS, (max_answer - HEAD_BYTES) // each)
        replies = list[bytes]()
        for start in range(0, len(messages), at_once):
            piece = messages[start : start + at_once]
            # A single answer may be of any length, or a gateway could see whose it made longer.
            got = self._post(encode_requests(piece), max_answer)
            if got.problem:
                return Unanswered(got.problem, got.after)
            try:
                replies += decode_answers(bytes(got.body), len(piece))
            except MalformedError as error:
                return Unanswered("unreadable answers", error=error)
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


def _fetch_top(
    device: Device, round: Assignment | str, shape: TableShape, traffic: FetchTraffic
) -> Top | None:
    """The top of a table; None where its slices are computed on demand, and bound to nothing."""
    root = root_of_table(device.known(round).manifest.tables[shape.table])
    if root is None:
        return None
    return fetch_top(device, round, shape.table, (shape.num_keys, root), traffic)


def _plainly(
    device: Device,
    round: Assignment | str,
    places: Set[int],
    wanted: Sequence[KeyArray],
    traffic: FetchTraffic,
) -> dict[int, Retrieved]:
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
    return {place: Retrieved.whole(records) for place, records in found.items()}
