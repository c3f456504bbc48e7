"""Private retrieval from one server: batches of keys under the Module-LWE assumption.

Buckets are the slots of polynomials, so that one product of a plaintext and a ciphertext works on
all of them. There is no key of evaluation and no product of two ciphertexts: the server multiplies
with its table, adds up, and rounds. `shape.py` chooses all numbers from (K, m, row bytes),
`lattice.py` encrypts and opens, `encoded.py` multiplies. Once a round a client fetches the hint,
the same bytes for all clients, which any cache may hold.

Hidden: which keys a client asks for and how many, from the server and all who see the messages, if
the decisional Module-LWE problem is hard for polynomials of 256 to 2,048 coefficients, 2,048 in
all, q of 54 bits, and secrets and errors of the discrete Gaussian with standard deviation 3.2: 131
bits by the lattice estimator (`shape.ESTIMATES`), which sees no structure in modules, as nobody
does who has published. Every question has a secret of its own. Not hidden: who asks, when, and the
maximum m.

A server that deviates, sends a wrong hint or damages what it multiplies with, gives wrong rows.
Each row carries its path to the root of the round, so none of them becomes a slice; and since a
client then does what it does for a key without a place, the server does not learn whether such a
row was asked for. Not covered: the time that a client's work takes, which `docs/private-select.md`
measures.

A row is decoded wrongly, of all of a question, with probability at most `RingShape.failure`, 2^-40
by the choice of the shape; the path shows it. A key may find no bucket, which did not happen once
in 10^5 questions and more."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.once import distinct_keys
from keyhole.crypto.prg import Prg
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
    rows_bytes,
)
from keyhole.delivery.pir.lattice import RingHint, encrypt, public_seed
from keyhole.delivery.pir.messages import (
    MAX_QUERIES,
    REPLY_BYTES,
    PirQuery,
    PirServer,
    Wanted,
    seal,
)
from keyhole.delivery.pir.popular import client_of, lengths_of_all, servers_of_all
from keyhole.delivery.pir.shape import HINT_HEAD_BYTES, TOGETHER, RingShape
from keyhole.delivery.popular import PopularKeys, PopularShares
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import MalformedError, StaleError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.delivery.pir.encoded import EncodedTable
    from keyhole.server.state import ServerState

_MAGIC = b"KHH3" + bytes(4)
_SERVER = 0
_SCHEME: Scheme = "one-server"
_ONLY = "server"

_ABOUT = DeliveryAbout(
    name="pir-one-server",
    title="PIR, one server",
    leaks=MappingProxyType({_ONLY: WHO_TAKES_PART}),
    rests_on="Module learning with errors is hard for dimension 2,048 and a modulus of 54 bits.",
    is_private=True,
    basis="cryptography",
    route="queries",
    wire_name=_SCHEME,
    has_popular=True,
)

MAX_MEMORY = 4 << 30
"""Bytes of an encoded table that stay in memory, unless another number is given."""


def hint_of(table: EncodedTable, params: PirParams) -> bytes:
    """Computes the hint of a table.

    Returns:
        8 bytes of magic, 32 of SHA-256 over the params and what follows, then coefficients of
        `hint_bits` each, packed.
    """
    from keyhole.delivery.pir.answers import hint_numbers  # for servers: it needs numba

    packed = hint_numbers(table, public_seed(params.round, table.shape))
    return b"".join([_MAGIC, _digest(params, memoryview(packed)), packed])


def _digest(params: PirParams, packed: memoryview) -> bytes:
    """What a hint is compared with: it finds damage, and hints of other tables."""
    found = sha256(params.encode())
    found.update(packed)
    return found.digest()


class OneServerClient:
    """The client of a table at one server."""

    def __init__(self, params: PirParams, hint: bytes) -> None:
        check_scheme(params, _SCHEME)
        self.params = params
        self._shape = RingShape.of(params)
        self._seed = public_seed(params.round, self._shape)
        self._hint = _read_hint(hint, params, self._shape)

    def query(self, keys: KeyArray, prg: Prg | None = None) -> PirQuery:
        """Makes a query for keys; see `SelectClient`. The rest of `max_keys` are random ones."""
        wanted, places = distinct_keys(keys, self.params.num_keys, self.params.max_keys)
        return self.ask(wanted, places, Prg.fresh() if prg is None else prg)

    def ask(self, wanted: KeyArray, places: NDArray[np.int64], prg: Prg) -> PirQuery:
        """Implements `TableClient.ask`."""
        body, opening = encrypt(self._filled(wanted, prg), self._shape, self._seed, prg)
        is_placed = opening.buckets[:, 0] >= 0

        def open_rows(replies: Sequence[memoryview]) -> NDArray[np.uint8]:
            return self._hint.open(replies[0], opening)

        message = seal("query", self.params, _SERVER, body)
        found = Wanted(np.where(is_placed[places], places, -1), open_rows)
        return PirQuery(self.params, (message,), found, self._shape.reply_bytes - REPLY_BYTES)

    def _filled(self, wanted: KeyArray, prg: Prg) -> KeyArray:
        """As many different keys as a query holds; wanted ones first, which so find a place before
        the others."""
        num_keys, count = self.params.num_keys, self.params.max_keys
        found = wanted
        while len(found) < count:
            drawn = np.concatenate([found, prg.below(num_keys, 2 * (count - len(found)))])
            _, first = np.unique(drawn, return_index=True)
            found = drawn[np.sort(first)][:count]
        return found


def params_of(database: Database) -> PirParams:
    """Returns the params of a table."""
    return PirParams.of(_SCHEME, database.public, database.single)


def encode(
    database: Database, before: EncodedTable | None = None, max_memory: int = MAX_MEMORY
) -> EncodedTable:
    """Returns a table as it is multiplied with.

    Args:
        before: that of an earlier round, of which unchanged parts are taken over.
        max_memory: bytes; an encoded table that is larger lies in files of `tempfile.gettempdir()`.
    """
    from keyhole.delivery.pir.encoded import EncodedTable  # for servers: it needs numba

    shape = RingShape.of(params_of(database))
    folder = tempfile.gettempdir() if shape.encoded_bytes > max_memory else None
    return EncodedTable.encode(database.rows, shape, before, folder)


def server_of(
    database: Database, max_queries: int = MAX_QUERIES, table: EncodedTable | None = None
) -> PirServer:
    """Returns the server of a table, with its hint; `table` is what `encode` returned for it."""
    from keyhole.delivery.pir.answers import answer  # for servers: it needs numba

    params, made = params_of(database), table or encode(database)

    def read(bodies: Sequence[memoryview]) -> Callable[[], Iterable[bytes]]:
        return partial(answer, made, bodies)  # any body of the right length is a question

    length = made.shape.query_bytes
    return PirServer(params, _SERVER, length, read, max_queries, hint_of(made, params))


def _lengths(params: PirParams) -> Lengths:
    """Of the messages of one table."""
    shape = RingShape.of(params)
    return Lengths(shape.query_bytes, shape.reply_bytes, shape.hint_bytes)


def _read_hint(hint: bytes, params: PirParams, shape: RingShape) -> RingHint:
    if len(hint) != shape.hint_bytes or bytes(hint[: len(_MAGIC)]) != _MAGIC:
        raise MalformedError(
            f"this is no hint of such a table: got {len(hint)} bytes; expected {shape.hint_bytes} "
            "bytes as docs/wire.md describes them; fetch the hint of these params again"
        )
    packed = memoryview(hint)[HINT_HEAD_BYTES:]
    if hint[len(_MAGIC) : HINT_HEAD_BYTES] != _digest(params, packed):
        raise StaleError(
            "a hint that the params do not cover: got a hint of other slices, or damaged; "
            "expected the hint of this table; fetch the params and the hint again"
        )
    return RingHint(packed, shape)


@dataclass(frozen=True)
class OneServerPir:
    """Retrieves from one server, by learning with errors in modules.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
        max_queries: that the server of a table answers and remembers; see `AnsweredQueries`.
        max_memory: bytes that an encoded table takes in memory; a larger one lies in files, and is
            read once for eight queries.
        popular: key space -> its popular keys, and the share of a query that is asked of them.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    max_queries: int = MAX_QUERIES
    max_memory: int = MAX_MEMORY
    popular: PopularShares = field(default_factory=dict)
    _served: WeakValueDictionary[RingShape, EncodedTable] = field(
        default_factory=WeakValueDictionary, init=False, repr=False, compare=False
    )
    about: DeliveryAbout = field(default=_ABOUT, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> OneServerPir:
        """Implements `Delivery.for_run`."""
        return replace(self, keys_per_client=keys_per_client)

    def open(self, table: PrivateTable) -> tuple[SelectServer, ...]:
        """Implements `QueryDelivery.open`. Of a table of the same shape that is still served,
        parts without a changed row are taken over."""
        each = [[self._open(database)] for database in Database.all_of(table, _SCHEME)]
        return servers_of_all(PirParams.of(_SCHEME, table.public), each)

    def _open(self, database: Database) -> PirServer:
        shape = RingShape.of(params_of(database))
        made = encode(database, self._served.get(shape), self.max_memory)
        self._served[shape] = made
        return server_of(database, self.max_queries, made)

    def client(self, params: bytes, hint: bytes = b"") -> SelectClient[KeyArray, Retrieved]:
        """Implements `QueryDelivery.client`."""
        return client_of(PirParams.decode(params), hint, OneServerClient, _lengths)

    def read_params(self, params: bytes) -> PublicTable:
        """Implements `QueryDelivery.read_params`."""
        return PirParams.decode(params).public(_SCHEME)

    def lengths(self, params: bytes) -> Lengths:
        """Implements `QueryDelivery.lengths`."""
        return lengths_of_all(PirParams.decode(params), _lengths)

    def held_bytes(
        self, num_keys: int, row_bytes: int, max_keys: int, popular: PopularKeys | None = None
    ) -> int:
        """Implements `QueryDelivery.held_bytes`: rows, the hint, and the encoded table, or of one
        in files what is read at a time."""
        return self._held_bytes(numbers_only(_SCHEME, num_keys, row_bytes, max_keys, popular))

    def _held_bytes(self, params: PirParams) -> int:
        shapes = [RingShape.of(each) for each in params.tables]
        held = [rows_bytes(s.num_keys, s.row_bytes) + s.hint_bytes for s in shapes]
        return sum(held) + sum(self._encoded_bytes(shape) for shape in shapes)

    def _encoded_bytes(self, shape: RingShape) -> int:
        in_files = shape.encoded_bytes > self.max_memory
        return shape.part_bytes if in_files else shape.encoded_bytes

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the messages, the hint and the top; params, HTTP and TLS are not counted."""
        params = params_of_load(_SCHEME, load)
        shapes = [RingShape.of(each) for each in params.tables]
        work = [self._work(shape, load.cohort, speeds) for shape in shapes]
        answering, building, client = (sum(parts) for parts in zip(*work, strict=True))
        down = sum(shape.hint_bytes + shape.reply_bytes for shape in shapes)
        return Price(
            self.about,
            down + top_bytes(load.num_keys) + load.broadcast_bytes,
            sum(shape.query_bytes for shape in shapes),
            {_ONLY: answering},
            client,
            self._held_bytes(params),
            load.num_keys,
            {_ONLY: building + binding_seconds(load, speeds)},
            requests=4,
        )

    def _work(self, shape: RingShape, cohort: int, speeds: Speeds) -> tuple[float, float, float]:
        """CPU seconds for answering a cohort, for building a table, and of one client."""
        seconds = speeds.ring_seconds(shape.products, cohort)
        seconds += cohort * shape.reply_numbers / speeds.ring_numbers
        seconds += cohort * shape.question_numbers / speeds.ring_numbers
        building = shape.encoded_bytes / speeds.ring_encode
        building += speeds.ring_seconds(shape.products, shape.rank)
        building += shape.hint_numbers / speeds.ring_numbers
        if shape.encoded_bytes > self.max_memory:
            read = shape.encoded_bytes / speeds.reading
            seconds += -(-cohort // TOGETHER) * read
            building += (1 + -(-shape.rank // TOGETHER)) * read
        client = (shape.question_numbers * shape.rank + shape.hint_numbers) / speeds.ring_client
        return seconds, building, client

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Implements `Delivery.deliver`."""
        settings = self.keys_per_client, state, keys, self.coding, self.popular
        return deliver_by_queries(self, *settings)
