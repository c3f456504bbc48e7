"""Retrieves in private from two servers: point functions over cuckoo buckets.

A client shares one point a bucket, and one a stash query, between both servers; each XORs the rows
that its share selects, and the XOR of both replies is the row of the point. What is sent is the
number of queries times a row, whatever the number of rows. A client puts each of its keys into one
query of the batch, and a random key into every query that is left.

Hidden: which keys a client asks for and how many, from each server, for any number of colluding
clients, if both servers do not collude and AES under a fixed key is a circular correlation-robust
hash. Not hidden: who asks, when, and under which params.

A server that answers from a wrong table, or sends wrong rows, is found out by the client: each row
carries its path to the root of the round, and nobody can forge one, not even for a key they guess.
The client does then what it does for a key that found no place, so the server does not learn
whether what it changed was asked for. Not covered: both servers together, the time that a client's
work takes, and a table that was wrong from the start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.cuckoo import MAX_IN_BUCKETS, BatchShape, Placement, batch_shape, place
from keyhole.crypto.dpf import (
    Domain,
    PointKeys,
    decode_corrections,
    encode_corrections,
    expand,
    share_from_roots,
)
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.delivery.base import (
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Lengths,
    Price,
    PrivateTable,
    PublicTable,
    Retrieved,
    SelectClient,
    SelectServer,
)
from keyhole.delivery.exchange import deliver_by_queries
from keyhole.delivery.paths import top_bytes
from keyhole.delivery.pir.database import (
    Database,
    PirParams,
    Scheme,
    binding_seconds,
    check_scheme,
    numbers_only,
    params_of_load,
    replying_seconds,
    rows_bytes,
)
from keyhole.delivery.pir.messages import (
    FRAME_BYTES,
    MAX_QUERIES,
    REPLY_BYTES,
    PirQuery,
    PirServer,
    Wanted,
    seal,
)
from keyhole.delivery.pir.popular import client_of, lengths_of_all, servers_of_all
from keyhole.delivery.popular import PLACES_A_KEY, PopularKeys, PopularShares
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import InputError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_FIRST, _SECOND = "first server", "second server"
_SCHEME: Scheme = "two-server"

_ABOUT = DeliveryAbout(
    name="pir",
    title="PIR, two servers",
    leaks=MappingProxyType({_FIRST: WHO_TAKES_PART, _SECOND: WHO_TAKES_PART}),
    rests_on="The two servers do not work together; AES under a fixed key hides seeds.",
    servers=2,
    is_private=True,
    basis="no collusion",
    route="queries",
    connects_to=("second",),
    wire_name=_SCHEME,
    has_popular=True,
)


@dataclass(frozen=True, repr=False)
class Points:
    """The points of one client's batch.

    Args:
        in_buckets: (num_buckets,) int64: a position in each bucket.
        keys: (num_buckets + stash,) int64: the key of each query, buckets first: a wanted one, or
            one that was drawn.
        slots: (u,) int64: the query that each key is in, buckets first; -1 if there was no room.
    """

    in_buckets: KeyArray
    keys: KeyArray
    slots: NDArray[np.int64]

    @property
    def in_stash(self) -> KeyArray:
        """The points of the stash are keys."""
        return self.keys[len(self.in_buckets) :]

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"Points({len(self.in_buckets)} buckets, {len(self.in_stash)} in the stash)"


@dataclass(frozen=True)
class Batch:
    """The public shape of a batch.

    Args:
        placement: where keys lie; None without buckets.
    """

    shape: BatchShape
    placement: Placement | None
    bucket: Domain
    table: Domain

    @staticmethod
    def of(params: PirParams) -> Batch:
        """Returns the batch of a table."""
        shape = _shape_of(params)
        if shape.num_buckets and params.num_keys > MAX_IN_BUCKETS:
            raise InputError(
                f"params of a table that is too large for buckets: got {params.num_keys} keys, "
                f"{params.max_keys} a query; expected 1..{MAX_IN_BUCKETS} keys with this many per "
                "query; check num_keys and max_keys; divide the table"
            )
        table = Domain(params.num_keys)
        if not shape.num_buckets:
            return Batch(shape, None, Domain(1), table)
        hashes = {"num_hashes": 1} if params.single else {}
        placement = Placement(params.num_keys, shape.num_buckets, **hashes)
        return Batch(shape, placement, Domain(placement.bucket_size), table)

    @property
    def num_queries(self) -> int:
        """The number of buckets and places of the stash."""
        return self.shape.num_buckets + self.shape.stash

    @property
    def bucket_bytes(self) -> int:
        """The number of bytes of the corrections of the buckets in a query."""
        return self.bucket.batch_bytes(self.shape.num_buckets)

    def lengths(self, row_bytes: int) -> Lengths:
        """Returns those of the messages of one server; a query is a nonce, a root, the corrections
        of the buckets, those of the stash."""
        corrections = self.bucket_bytes + self.table.batch_bytes(self.shape.stash)
        query = FRAME_BYTES + 2 * SEED_BYTES + corrections
        return Lengths(query, REPLY_BYTES + self.num_queries * row_bytes)

    def assign(self, keys: KeyArray, prg: Prg) -> Points:
        """Puts keys into queries: as many as can be into buckets, then into the stash.

        Args:
            keys: (u,) int64, all different.
        """
        positions, drawn = self._fill_buckets(prg)
        slots = np.full(len(keys), -1, np.int64)
        if self.placement is not None:
            choices, within = self.placement.places_of(keys)
            slots[:] = place(choices, self.shape.num_buckets)
            row, column = np.nonzero(choices == slots[:, None])
            positions[slots[row]] = within[row, column]
        left = np.flatnonzero(slots < 0)[: self.shape.stash]
        slots[left] = self.shape.num_buckets + np.arange(len(left))
        asked = np.concatenate([drawn, prg.below(self.table.num_points, self.shape.stash)])
        is_placed = slots >= 0
        asked[slots[is_placed]] = keys[is_placed]
        return Points(positions, asked, slots)

    def _fill_buckets(self, prg: Prg) -> tuple[KeyArray, KeyArray]:
        """A random key of each bucket: its position and itself, (num_buckets,) each."""
        buckets = np.arange(self.shape.num_buckets)
        positions = prg.below(self.bucket.num_points, len(buckets))
        if self.placement is None:
            return positions, positions
        keys = self.placement.keys_at(buckets, positions)
        # Few positions are empty, and no bucket is: there are more keys than buckets of a kind.
        while (again := np.flatnonzero(keys < 0)).size:
            positions[again] = prg.below(self.bucket.num_points, len(again))
            keys[again] = self.placement.keys_at(again, positions[again])
        return positions, keys


class TwoServerClient:
    """The client of a table at two servers.

    Raises:
        StaleError: params of another scheme.
        InputError: params of a table that is too large for its buckets.
    """

    def __init__(self, params: PirParams) -> None:
        check_scheme(params, _SCHEME)
        self.params = params
        self._batch = Batch.of(params)

    def query(self, keys: KeyArray, prg: Prg | None = None) -> PirQuery:
        """Makes a query for keys; see `SelectClient`."""
        wanted, places = distinct_keys(keys, self.params.num_keys, self.params.max_keys)
        return self.ask(wanted, places, Prg.fresh() if prg is None else prg)

    def ask(self, wanted: KeyArray, places: NDArray[np.int64], prg: Prg) -> PirQuery:
        """Implements `TableClient.ask`."""
        points = self._batch.assign(wanted, prg)
        found = Wanted(points.slots[places], xor_rows(self.params.row_bytes))
        rows_bytes = len(points.keys) * self.params.row_bytes
        return PirQuery(self.params, self._share(points, prg), found, rows_bytes)

    def _share(self, points: Points, prg: Prg) -> tuple[bytes, bytes]:
        nonce, roots = prg.bytes(SEED_BYTES), (prg.bytes(SEED_BYTES), prg.bytes(SEED_BYTES))
        one, other = (_batch_roots(root) for root in roots)
        bucket, table = self._batch.bucket, self._batch.table
        shared = (
            share_from_roots(points.in_buckets, bucket, nonce, (one[0], other[0])),
            share_from_roots(points.in_stash, table, nonce, (one[1], other[1])),
        )
        tail = b"".join(encode_corrections(keys) for keys, _ in shared)
        first, second = (
            seal("query", self.params, party, nonce + roots[party] + tail) for party in (0, 1)
        )
        return first, second


def _shape_of(params: PirParams) -> BatchShape:
    """The queries of a batch; where each key lies in one bucket, there is no stash."""
    if params.single:
        return BatchShape(min(PLACES_A_KEY * params.max_keys, params.num_keys), 0)
    return batch_shape(params.max_keys, params.num_keys)


def xor_rows(row_bytes: int) -> Callable[[Sequence[memoryview]], NDArray[np.uint8]]:
    """Returns what opens the replies of two servers: (q, row_bytes)."""

    def open_rows(replies: Sequence[memoryview]) -> NDArray[np.uint8]:
        one, other = (np.frombuffer(reply, np.uint8).reshape(-1, row_bytes) for reply in replies)
        return one ^ other

    return open_rows


def params_of(database: Database) -> PirParams:
    """Returns the params of a table."""
    return PirParams.of(_SCHEME, database.public, database.single)


def servers_of(database: Database, max_queries: int = MAX_QUERIES) -> tuple[PirServer, PirServer]:
    """Returns both servers of a table; `max_queries` each."""
    params = params_of(database)
    batch = Batch.of(params)

    def server(place: int) -> PirServer:
        def read(bodies: Sequence[memoryview]) -> Callable[[], Iterable[bytes]]:
            asked = [_read_query(body, batch, place) for body in bodies]

            def scan() -> Iterable[bytes]:
                found = _scan(database.rows, batch, asked).view(np.uint8)
                return (rows.tobytes() for rows in found[:, :, : params.row_bytes])

            return scan

        return PirServer(params, place, batch.lengths(params.row_bytes).query, read, max_queries)

    return server(0), server(1)


def _scan(
    rows: NDArray[np.uint64], batch: Batch, asked: Sequence[tuple[bytes, PointKeys, PointKeys]]
) -> NDArray[np.uint64]:
    """The XORs of the rows that queries select, in one pass: (queries, num_queries, words)."""
    from keyhole.delivery.pir.scan import scan_buckets, scan_rows  # for servers: it needs numba

    if not asked:
        return np.empty((0, batch.num_queries, rows.shape[1]), np.uint64)
    nonces, in_buckets, in_stash = zip(*asked, strict=True)
    bits = _expand_all(in_stash, batch.table, nonces)
    found = np.empty((*bits.shape[:2], rows.shape[1]), np.uint64)
    if batch.shape.stash:
        found[:] = scan_rows(rows, bits.reshape(-1, bits.shape[2])).reshape(found.shape)
    if batch.placement is None:
        return found
    bits = _expand_all(in_buckets, batch.bucket, nonces)
    return np.concatenate([scan_buckets(rows, batch.placement.members(), bits), found], axis=1)


def _read_query(body: memoryview, batch: Batch, party: int) -> tuple[bytes, PointKeys, PointKeys]:
    """Returns the nonce and the keys of one query."""
    nonce, root, tail = bytes(body[:16]), bytes(body[16:32]), body[32:]
    cut, (first, second) = batch.bucket_bytes, _batch_roots(root)
    return (
        nonce,
        decode_corrections(tail[:cut], batch.shape.num_buckets, batch.bucket, party, first),
        decode_corrections(tail[cut:], batch.shape.stash, batch.table, party, second),
    )


def _batch_roots(root: bytes) -> tuple[bytes, bytes]:
    """The roots of the buckets and of the stash: one secret is sent for both."""
    stream = Prg(root)
    return stream.bytes(SEED_BYTES), stream.bytes(SEED_BYTES)


def _expand_all(
    keys: Sequence[PointKeys], domain: Domain, nonces: Sequence[bytes]
) -> NDArray[np.uint8]:
    """The shares of all queries, (queries, points, bytes)."""
    both = zip(keys, nonces, strict=True)
    return np.stack([expand(some, domain, nonce) for some, nonce in both])


def _lengths(params: PirParams) -> Lengths:
    """Of the messages of one table."""
    return Batch.of(params).lengths(params.row_bytes)


def _held_bytes(params: PirParams) -> int:
    buckets = [Batch.of(each).placement for each in params.tables]
    rows = sum(rows_bytes(each.num_keys, each.row_bytes) for each in params.tables)
    return rows + sum(placement.members_bytes for placement in buckets if placement)


def _work(params: PirParams, cohort: int, speeds: Speeds) -> tuple[float, float, float]:
    """CPU seconds of one server for answering a cohort, for placing keys, and of one client."""
    batch, num_keys = Batch.of(params), params.num_keys
    table, hashes, placing = rows_bytes(num_keys, params.row_bytes), 0, 0.0
    if batch.placement is not None:
        hashes = batch.placement.num_hashes
        placing = num_keys * speeds.place_seconds
    seconds = speeds.scan_seconds(table, cohort * batch.shape.stash)
    seconds += speeds.bucket_seconds(hashes * table, cohort)
    seconds += cohort * (hashes + batch.shape.stash) * num_keys / speeds.expand
    seconds += cohort * speeds.read_seconds
    seconds += replying_seconds(cohort, speeds, batch.num_queries, params.row_bytes)
    client = speeds.ask_seconds + batch.num_queries * speeds.share_seconds
    # Adding up both replies, and comparing rows with the top.
    client += 2 * batch.num_queries * params.row_bytes / speeds.opening
    return seconds, placing, client


@dataclass(frozen=True)
class TwoServerPir:
    """Retrieves from two servers that do not collude, by shared point functions.

    Args:
        keys_per_client: key space -> max keys that a client may ask for; public.
        coding: of the cut parts.
        max_queries: that a server of a table answers and remembers; see `AnsweredQueries`.
        popular: key space -> its popular keys, and the share of a query that is asked of them.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    max_queries: int = MAX_QUERIES
    popular: PopularShares = field(default_factory=dict)
    about: DeliveryAbout = field(default=_ABOUT, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> TwoServerPir:
        """Implements `Delivery.for_run`."""
        return replace(self, keys_per_client=keys_per_client)

    def open(self, table: PrivateTable) -> tuple[SelectServer, ...]:
        """Implements `QueryDelivery.open`."""
        each = [servers_of(one, self.max_queries) for one in Database.all_of(table, _SCHEME)]
        return servers_of_all(PirParams.of(_SCHEME, table.public), each)

    def client(self, params: bytes, hint: bytes = b"") -> SelectClient[KeyArray, Retrieved]:
        """Implements `QueryDelivery.client`; there is no hint."""
        make = lambda params, _: TwoServerClient(params)  # noqa: E731
        return client_of(PirParams.decode(params), hint, make, _lengths)

    def read_params(self, params: bytes) -> PublicTable:
        """Implements `QueryDelivery.read_params`."""
        return PirParams.decode(params).public(_SCHEME)

    def lengths(self, params: bytes) -> Lengths:
        """Implements `QueryDelivery.lengths`."""
        return lengths_of_all(PirParams.decode(params), _lengths)

    def held_bytes(
        self, num_keys: int, row_bytes: int, max_keys: int, popular: PopularKeys | None = None
    ) -> int:
        """Implements `QueryDelivery.held_bytes`: rows, and the list of buckets."""
        return _held_bytes(numbers_only(_SCHEME, num_keys, row_bytes, max_keys, popular))

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the messages to both servers and the top; params, HTTP and TLS are not counted."""
        params = params_of_load(_SCHEME, load)
        work = [_work(each, load.cohort, speeds) for each in params.tables]
        answering, placing, client = (sum(parts) for parts in zip(*work, strict=True))
        building = binding_seconds(load, speeds) + placing
        lengths = lengths_of_all(params, _lengths)
        return Price(
            self.about,
            2 * lengths.reply + top_bytes(load.num_keys) + load.broadcast_bytes,
            2 * lengths.query,
            {_FIRST: answering, _SECOND: answering},
            client,
            _held_bytes(params),
            load.num_keys,
            {_FIRST: building, _SECOND: building},
            requests=3,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Implements `Delivery.deliver`."""
        settings = self.keys_per_client, state, keys, self.coding, self.popular
        return deliver_by_queries(self, *settings)
