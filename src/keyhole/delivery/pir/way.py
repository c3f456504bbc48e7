"""Delivers slices by private information retrieval, from two servers or from one.

Hidden: which keys a client asks for and how many, from each server; see `two_server` and
`one_server` for what that rests on. Not hidden: who asks, when, and the public maximum of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from keyhole.arrays import KeyArray
from keyhole.delivery.base import (
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Price,
    making_seconds,
)
from keyhole.delivery.exchange import (
    ByteTally,
    LocalLinks,
    PrivateRound,
    PrivateTable,
    Retrieval,
    Retrieved,
    SelectClient,
    answer_by,
    deliver_privately,
    name_of_round,
    retrieve,
)
from keyhole.delivery.pir import one_server, two_server
from keyhole.delivery.pir.database import TAG_BYTES, Database, PirParams, Scheme, rows_bytes
from keyhole.delivery.pir.lwe import DIMENSION, WORD_BYTES, LweShape
from keyhole.delivery.pir.messages import MAX_QUERIES, PirServer
from keyhole.delivery.pir.two_server import Batch
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_MAX_HELD = 512 << 20  # bytes of messages of all clients that are answered together
_FIRST, _SECOND, _ONLY = "first server", "second server", "server"

_TWO_SERVERS = DeliveryAbout(
    name="pir",
    title="PIR, two servers",
    leaks=MappingProxyType({_FIRST: WHO_TAKES_PART, _SECOND: WHO_TAKES_PART}),
    rests_on="The two servers do not work together; AES under a fixed key hides seeds.",
    servers=2,
    is_private=True,
    basis="no collusion",
    route="queries",
    connects_to=("second",),
)
_ONE_SERVER = DeliveryAbout(
    name="pir-one-server",
    title="PIR, one server",
    leaks=MappingProxyType({_ONLY: WHO_TAKES_PART}),
    rests_on="Learning with errors is hard for dimension 1,024 and modulus 2^32.",
    is_private=True,
    basis="cryptography",
    route="queries",
)


@dataclass(frozen=True)
class Lengths:
    """Bytes of a query, a reply and a hint, the same for all keys; 0 where there is no hint."""

    query: int
    reply: int
    hint: int = 0


class PirDelivery(Protocol):
    """A delivery by private queries: what a service and a device need of it."""

    @property
    def about(self) -> DeliveryAbout:
        """What it declares."""
        ...

    @property
    def scheme(self) -> Scheme:
        """How slices are retrieved, as params and paths name it."""
        ...

    def open(
        self, database: Database, max_keys: int, max_queries: int = MAX_QUERIES
    ) -> tuple[PirServer, ...]:
        """Returns the servers of a table, in order, for the given numbers of queries and keys."""
        ...

    def client(self, params: PirParams, hint: bytes = b"") -> SelectClient[KeyArray, Retrieved]:
        """Returns the client of a table.

        Raises:
            ProtocolError: the hint is not the one that the params cover.
        """
        ...

    def lengths(self, params: PirParams) -> Lengths:
        """Returns the lengths of messages."""
        ...

    def held_bytes(self, params: PirParams) -> int:
        """Returns what a server keeps in memory for a table: its rows, and what it made of them."""
        ...


@dataclass(frozen=True)
class TwoServerPir:
    """Retrieves from two servers that do not collude, by shared point functions.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_TWO_SERVERS, init=False, repr=False)
    scheme: Scheme = field(default="two-server", init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> TwoServerPir:
        """Returns the delivery with the public numbers of a run."""
        return replace(self, keys_per_client=keys_per_client)

    def open(
        self, database: Database, max_keys: int, max_queries: int = MAX_QUERIES
    ) -> tuple[PirServer, ...]:
        """Implements `PirDelivery.open`."""
        params = two_server.params_of(database, max_keys)
        servers = range(self.about.servers)
        return tuple(two_server.TwoServer(database, params, at, max_queries) for at in servers)

    def client(self, params: PirParams, hint: bytes = b"") -> two_server.TwoServerClient:
        """Implements `PirDelivery.client`; there is no hint."""
        return two_server.TwoServerClient(params)

    def lengths(self, params: PirParams) -> Lengths:
        """Implements `PirDelivery.lengths`."""
        return Lengths(two_server.query_bytes(params), two_server.reply_bytes(params))

    def held_bytes(self, params: PirParams) -> int:
        """Implements `PirDelivery.held_bytes`: rows, and the list of buckets."""
        placement = Batch.of(params).placement
        rows = rows_bytes(params.num_keys, params.record_bytes)
        return rows + (placement.members_bytes if placement else 0)

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the messages to both servers; params, HTTP and TLS are not counted."""
        params = _params_for(self.scheme, load)
        lengths, batch = self.lengths(params), Batch.of(params)
        table = rows_bytes(load.num_keys, load.slice_bytes)
        building, hashes = _tagging(load, speeds), 0
        if batch.placement is not None:
            hashes = batch.placement.num_hashes
            building += load.num_keys * speeds.place_seconds
        seconds = speeds.scan_seconds(table, load.cohort * batch.shape.stash)
        seconds += speeds.bucket_seconds(hashes * table, load.cohort)
        seconds += load.cohort * (hashes + batch.shape.stash) * load.num_keys / speeds.expand
        seconds += load.cohort * speeds.read_seconds + _replying(load, speeds, batch.num_queries)
        client = speeds.ask_seconds + batch.num_queries * speeds.share_seconds
        # Adding up the replies of both, and checking tags.
        client += 2 * batch.num_queries * (load.slice_bytes + TAG_BYTES) / speeds.opening
        return Price(
            self.about,
            2 * lengths.reply + load.broadcast_bytes,
            2 * lengths.query,
            {_FIRST: seconds, _SECOND: seconds},
            client,
            self.held_bytes(params),
            load.num_keys,
            {_FIRST: building, _SECOND: building},
            requests=2,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        how = PrivateRound(self.keys_per_client, self.coding, self.about.leaks)
        return deliver_privately(_InProcess(self), how, state, keys)


@dataclass(frozen=True)
class OneServerPir:
    """Retrieves from one server, by learning with errors.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_ONE_SERVER, init=False, repr=False)
    scheme: Scheme = field(default="one-server", init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> OneServerPir:
        """Returns the delivery with the public numbers of a run."""
        return replace(self, keys_per_client=keys_per_client)

    def open(
        self, database: Database, max_keys: int, max_queries: int = MAX_QUERIES
    ) -> tuple[PirServer, ...]:
        """Implements `PirDelivery.open`."""
        hint = one_server.hint_of(database, max_keys)
        params = one_server.params_of(database, max_keys, hint)
        return (one_server.OneServer(database, params, hint, max_queries),)

    def client(self, params: PirParams, hint: bytes = b"") -> one_server.OneServerClient:
        """Implements `PirDelivery.client`."""
        return one_server.OneServerClient(params, hint)

    def lengths(self, params: PirParams) -> Lengths:
        """Implements `PirDelivery.lengths`."""
        shape = LweShape.of(params)
        return Lengths(shape.query_bytes, shape.reply_bytes, shape.hint_bytes)

    def held_bytes(self, params: PirParams) -> int:
        """Implements `PirDelivery.held_bytes`: rows and the hint."""
        rows = rows_bytes(params.num_keys, params.record_bytes)
        return rows + LweShape.of(params).hint_bytes

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the messages and the hint; params, HTTP and TLS are not counted."""
        params = _params_for(self.scheme, load)
        shape, lengths = LweShape.of(params), self.lengths(params)
        m, table = load.keys_per_client, rows_bytes(load.num_keys, load.slice_bytes)
        seconds = speeds.lwe_seconds(table, load.cohort * m)
        seconds += _replying(load, speeds, m * shape.slices_per_column * WORD_BYTES)
        return Price(
            self.about,
            lengths.hint + lengths.reply + load.broadcast_bytes,
            lengths.query,
            {_ONLY: seconds},
            # Masks of queries, and of the rows that are opened.
            m * DIMENSION * (shape.columns + shape.row_bytes) / speeds.lwe_products,
            self.held_bytes(params),
            load.num_keys,
            {_ONLY: _tagging(load, speeds) + table / speeds.lwe_hint},
            requests=3,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        how = PrivateRound(self.keys_per_client, self.coding, self.about.leaks)
        return deliver_privately(_InProcess(self), how, state, keys)


@dataclass(frozen=True)
class _InProcess:
    """Servers and clients in one process."""

    way: PirDelivery

    def __call__(
        self, table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
    ) -> Mapping[int, Retrieved]:
        """Clients ask; each server answers many of them in one pass over its table."""
        database = Database.of(name_of_round(table.round_id), table.records)
        servers = self.way.open(database, table.max_keys)
        params, hint = servers[0].params, servers[0].hint
        asking, found = self.way.client(params, hint), dict[int, Retrieved]()
        for some in _groups(list(wanted), self.way.lengths(params)):
            links = LocalLinks(answer_by(servers), some, tally)
            for client in some:
                tally.add(client, down=len(hint))
            got = retrieve([Retrieval(asking, wanted[client]) for client in some], links)
            found |= zip(some, got, strict=True)
        return found


def _groups(clients: Sequence[int], lengths: Lengths) -> Iterator[Sequence[int]]:
    """Clients whose messages fit into memory together; one at the least."""
    size = max(1, _MAX_HELD // (2 * (lengths.query + lengths.reply)))
    return (clients[start : start + size] for start in range(0, len(clients), size))


def _params_for(scheme: Scheme, load: Workload) -> PirParams:
    """Params with the public numbers of a load; names and digests do not change a length."""
    return PirParams(
        scheme, bytes(16), load.num_keys, load.slice_bytes, load.keys_per_client, bytes(32)
    )


def _tagging(load: Workload, speeds: Speeds) -> float:
    """CPU seconds for all slices, and a table of them with a tag for each."""
    tags = load.num_keys * speeds.tag_seconds + load.table_bytes / speeds.tagging
    return making_seconds(load, speeds) + tags


def _replying(load: Workload, speeds: Speeds, rows: int) -> float:
    """CPU seconds for putting rows into the reply of each client, and the check of its frame."""
    return load.cohort * rows * (load.slice_bytes + TAG_BYTES) / speeds.reply
