"""Delivers slices through a blind relay by Oblivious HTTP: one sealed request for each key.

Hidden from the relay: keys and slices, as far as HPKE holds. Hidden from the gateway: whose request
it is and which belong together, as long as it does not work together with the relay, and the relay
mixes enough clients. The relay sees who asks and how many requests, which is a public maximum: m is
padded with uniformly random keys, all requests have one length, and an answer has the length of its
table. The gateway does see which keys are asked for: this is unlinkability, not secrecy. Were a
client to fail or ask again when one answer is wrong, a gateway that spoils one answer could see
whose it was. So an answer that does not open, refuses, or holds a wrong row is treated as that of a
key without a place, and nothing that anybody else sees follows from it. Not covered: the times of
requests, keys that only one client can want, and a gateway that gives one client another key
configuration than all others (compare two sources).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.codec import encode_varint
from keyhole.crypto.hpke import PUBLIC_BYTES
from keyhole.crypto.once import Once, distinct_keys
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import (
    KEYS_OF_SOMEBODY,
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Price,
    PrivateTable,
    Retrieved,
    making_seconds,
)
from keyhole.delivery.exchange import (
    ByteTally,
    LocalLinks,
    Retrieval,
    deliver_privately,
    retrieve,
)
from keyhole.delivery.paths import path_bytes, top_bytes
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.delivery.relay.binary_http import (
    BinaryRequest,
    BinaryResponse,
    decode_response,
    encode_request,
)
from keyhole.delivery.relay.gateway import Gateway, Handler, Reply, relay
from keyhole.delivery.relay.ohttp import (
    REQUEST_OVERHEAD,
    Exchange,
    GatewayKey,
    KeyConfig,
    open_response,
    response_overhead,
    seal_request,
)
from keyhole.errors import MalformedError, NotFoundError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_PATH = re.compile(
    rb"/v1/rounds/([0-9a-f-]{1,83})/tables/(0|[1-9]\d{0,8})/slices/(0|[1-9]\d{0,18})"
)


@dataclass(frozen=True)
class TableShape:
    """The public numbers of one table; every client's requests are padded to `max_keys`, which is 0
    for a table that is not asked."""

    table: int
    num_keys: int
    row_bytes: int
    max_keys: int


def slice_reply_bytes(row_bytes: int) -> int:
    """Returns the length of an answer that holds one row, a slice and its path, before it is
    sealed."""
    return 1 + 2 + 1 + len(encode_varint(row_bytes)) + row_bytes


def slice_path(round_id: str, table: int, key: int) -> bytes:
    """Returns the path of one slice."""
    return f"/v1/rounds/{round_id}/tables/{table}/slices/{key}".encode("ascii")


def parse_slice_path(request: BinaryRequest) -> tuple[str, int, int]:
    """Returns round, table and key that a request asks for."""
    found = _PATH.fullmatch(request.path) if request.method == b"GET" else None
    if found is None:
        raise NotFoundError(
            "a gateway answers requests for slices only: got another request; expected GET "
            "/v1/rounds/{round}/tables/{table}/slices/{key}; ask the service directly for "
            "what is no secret"
        )
    round_id, table, key = found.groups()
    return round_id.decode("ascii"), int(table), int(key)


def slice_handler(round_id: str, tables: Sequence[NDArray[np.uint8]]) -> Handler:
    """Answers from tables in memory, (K, row_bytes) each, in the order of the round."""

    def answer(request: BinaryRequest) -> Reply:
        asked, table, key = parse_slice_path(request)
        if asked != round_id or table >= len(tables) or key >= len(tables[table]):
            raise NotFoundError(
                "no such slice: got another; expected one of the round; check the round"
            )
        row = tables[table][key]
        return Reply(BinaryResponse(200, (), row.tobytes()), slice_reply_bytes(len(row)))

    return answer


class BlindClient:
    """The client of one round."""

    def __init__(self, config: KeyConfig, round_id: str, tables: Sequence[TableShape]) -> None:
        self._config, self._round, self._tables = config, round_id, tuple(tables)
        self._overhead = response_overhead(config.suite)
        # The longest path is that of the highest key: digits only grow.
        self._plain_bytes = max(
            [len(encode_request(self._request(t.table, t.num_keys - 1))) for t in tables], default=0
        )

    @property
    def request_bytes(self) -> int:
        """The number of bytes of every sealed request."""
        return self._plain_bytes + REQUEST_OVERHEAD

    @property
    def num_requests(self) -> int:
        """The number of requests of every query."""
        return sum(table.max_keys for table in self._tables)

    def reply_bytes(self, table: int) -> int:
        """Returns the number of bytes of every sealed answer from one of the tables, by its place
        here."""
        return slice_reply_bytes(self._tables[table].row_bytes) + self._overhead

    def query(self, keys: Sequence[KeyArray], prg: Prg | None = None) -> BlindQuery:
        """Makes a query; repeats and order are the client's own business.

        Args:
            keys: (n,) int64 for each table, with at most `max_keys` different ones.
            prg: where padding and order come from; a fresh one if None. Asking again for the
                same keys needs a stream of the same seed: other padding would tell them apart.
        """
        prg = prg or Prg.fresh()
        picked: list[tuple[int, int]] = []
        places: list[NDArray[np.int64]] = []
        for at, (table, wanted) in enumerate(zip(self._tables, keys, strict=True)):
            found, place = distinct_keys(wanted, table.num_keys, table.max_keys)
            padding = prg.below(table.num_keys, table.max_keys - len(found))
            places.append(place + len(picked))
            picked += [(at, int(key)) for key in (*found, *padding)]
        order = prg.permutation(len(picked))
        sealed = [self._seal(*picked[place]) for place in order]
        return BlindQuery(sealed, order, places, self._tables)

    def _seal(self, at: int, key: int) -> tuple[bytes, Exchange]:
        request = self._request(self._tables[at].table, key)
        return seal_request(self._config, encode_request(request, self._plain_bytes))

    def _request(self, table: int, key: int) -> BinaryRequest:
        return BinaryRequest(b"GET", slice_path(self._round, table, key))


class BlindQuery:
    """One query of a client, for one use. From `BlindClient.query`."""

    def __init__(
        self,
        sealed: Sequence[tuple[bytes, Exchange]],
        order: KeyArray,
        places: Sequence[NDArray[np.int64]],
        tables: Sequence[TableShape],
    ) -> None:
        self._messages = Once(tuple(message for message, _ in sealed), "requests")
        self._exchanges = Once([exchange for _, exchange in sealed], "answers")
        self._order, self._places, self._tables = order, places, tables

    def __repr__(self) -> str:
        return f"BlindQuery({len(self._order)} requests)"

    def messages(self) -> tuple[bytes, ...]:
        """Returns the sealed requests, shuffled and of one length."""
        return self._messages.take()

    def decode(self, replies: Sequence[bytes]) -> list[Retrieved]:
        """Returns the rows of each table in the order of its keys, from one answer to each message
        in its order. Nothing is raised for what one answer holds.

        Raises:
            MalformedError: there is not one answer to each request. Their number is the relay's
                doing, who knows no key.
            ReplayError: answers have been opened before.
        """
        expected = len(self._exchanges.peek())
        if len(replies) != expected:
            raise MalformedError(
                f"answers that make no sense: got {len(replies)} answers to {expected} requests; "
                "expected one to each request; ask again; check that both sides are of one version"
            )
        exchanges = self._exchanges.take()
        opened = {
            int(place): _open_row(exchange, reply)
            for place, exchange, reply in zip(self._order, exchanges, replies, strict=True)
        }
        pairs = zip(self._tables, self._places, strict=True)
        return [_rows([opened[place] for place in places], t.row_bytes) for t, places in pairs]


def _open_row(exchange: Exchange, reply: bytes) -> bytes:
    """The row in an answer; nothing where it does not open or refuses."""
    try:
        response = decode_response(open_response(exchange, reply))
    except MalformedError:
        return b""
    return response.content if response.status == 200 else b""


def _rows(found: Sequence[bytes], row_bytes: int) -> Retrieved:
    """Rows of one table; one of another length is missing, and wrong."""
    is_found = np.array([len(row) == row_bytes for row in found], bool)
    whole = b"".join([row if len(row) == row_bytes else bytes(row_bytes) for row in found])
    rows = np.frombuffer(whole, np.uint8).reshape(len(found), row_bytes)
    return Retrieved(rows, is_found, int((~is_found).sum()))


# Of a round with a number of four digits: each digit more is a byte more of every request.
_ROUND_ID = "1000-" + 64 * "0"

_ABOUT = DeliveryAbout(
    name="relay",
    title="relay",
    leaks=MappingProxyType({"relay": WHO_TAKES_PART, "gateway": KEYS_OF_SOMEBODY}),
    rests_on="Relay and gateway do not work together, requests of many clients are mixed, and HPKE "
    "holds.",
    is_private=True,
    basis="no collusion",
    route="sealed requests",
    connects_to=("relay",),
)


_RELAY, _GATEWAY = _ABOUT.leaks


@dataclass(frozen=True)
class BlindRelay:
    """Retrieves by Oblivious HTTP, with requests mixed over the cohort.

    Args:
        keys_per_client: key space -> max keys that a client may ask for; public.
        coding: of the cut parts.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_ABOUT, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> BlindRelay:
        """Implements `Delivery.for_run`."""
        return replace(self, keys_per_client=keys_per_client)

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices one sealed request for each key, and the top; four bytes an answer by which a
        relay packs many into one body are not counted."""
        row_bytes = load.slice_bytes + path_bytes(load.num_keys)
        shape = TableShape(0, load.num_keys, row_bytes, load.keys_per_client)
        client = BlindClient(KeyConfig(0, bytes(PUBLIC_BYTES)), _ROUND_ID, [shape])
        requests = load.cohort * load.keys_per_client
        beside = top_bytes(load.num_keys) + load.broadcast_bytes
        return Price(
            self.about,
            client.num_requests * client.reply_bytes(0) + beside,
            client.num_requests * client.request_bytes,
            {
                _RELAY: requests * speeds.forward_seconds,
                _GATEWAY: requests * speeds.open_seconds,
            },
            load.keys_per_client * speeds.seal_seconds,
            load.table_bytes,
            load.num_keys,
            {_GATEWAY: making_seconds(load, speeds)},
            requests=2,
            passed_on_by=_RELAY,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        return deliver_privately(
            _retrieve, state, keys, self.keys_per_client, self.coding, self.about.leaks
        )


def _retrieve(
    table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
) -> Mapping[int, Retrieved]:
    """All clients ask; the relay mixes their requests before the gateway opens them."""
    key = GatewayKey.fresh()
    gateway = Gateway([key], slice_handler(table.id, [table.rows()]))
    shape = TableShape(0, table.num_keys, table.row_bytes, table.max_keys)
    client = BlindClient(key.config, table.id, [shape])
    links = LocalLinks(lambda sent: relay(sent, gateway.answer_many), list(wanted), tally)
    found = retrieve([Retrieval(client, [keys]) for keys in wanted.values()], links)
    return {client: got for client, (got,) in zip(wanted, found, strict=True)}
