"""Private retrieval from one server: learning with errors, in the manner of SimplePIR.

The table is a matrix D of bytes, A a public matrix. Once a round a client fetches the hint D A. For
each key it sends A s + e + 2^24 u modulo 2^32: s is a secret, e an error, u the unit vector of the
key's column. The server multiplies D with it; what remains of the reply without (D A) s is the
column, disturbed by D e, which rounding removes. The client knows e and takes 128 times its sum
away too: the noise is that of bytes around zero, and the server does nothing for it.

Hidden: which keys a client asks for and how many, from the server and all who see the messages, if
the decisional problem of learning with errors is hard with n = 1024, q = 2^32, uniform secrets and
errors of a discrete Gaussian with standard deviation 6.4: the parameters that SimplePIR (Henzinger
et al., USENIX Security 2023) states for 128 bits. We take them over; no estimator of lattice
attacks has been run here. Every query has a secret of its own, so m queries of N clients are m N
problems that share A. Not hidden: who asks, when, and the maximum m.

A server that deviates, sends a wrong hint or damages columns, gives wrong rows. Each row carries
its path to the root of the round, so none of them becomes a slice; and since a client then does
what it does for a key without a place, the server does not learn whether such a column was asked
for. Not covered: the time that a client's work takes.

Cost: the hint must be fetched again in every round, and each key takes a whole query, so this
competes with sending everything: see `LweShape.total_bytes`. One byte or more of a query is
decoded wrongly with probability at most `LweShape.failure`, kept below 2^-40 by the layout; the
path shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING

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
from keyhole.delivery.pir.lwe import (
    BLOCK,
    DIMENSION,
    HINT_HEAD_BYTES,
    WORD_BYTES,
    Columns,
    LweShape,
    Words,
    encrypt,
    matrix_seed,
    public_matrix,
)
from keyhole.delivery.pir.messages import (
    MAX_QUERIES,
    REPLY_BYTES,
    PirQuery,
    PirServer,
    Wanted,
    seal,
)
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.errors import MalformedError, StaleError
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

_MAGIC = b"KHH2" + bytes(4)
_SERVER = 0
_SCHEME: Scheme = "one-server"
_ONLY = "server"
_PASS = 1024  # keys: more of them are no faster in one pass, and take more memory

_ABOUT = DeliveryAbout(
    name="pir-one-server",
    title="PIR, one server",
    leaks=MappingProxyType({_ONLY: WHO_TAKES_PART}),
    rests_on="Learning with errors is hard for dimension 1,024 and modulus 2^32.",
    is_private=True,
    basis="cryptography",
    route="queries",
    wire_name=_SCHEME,
)


def hint_of(database: Database) -> bytes:
    """Computes the hint of a table: 1024 products for each of its bytes.

    Returns:
        8 bytes of magic, 32 of SHA-256 over the params and what follows, then (r, 1024, row_bytes)
        words of 32 bits, little-endian: the transpose of D A, one slice of the columns after the
        other.
    """
    params = PirParams.of(_SCHEME, database.public)
    shape = LweShape.of(params)
    seed = matrix_seed(params.round, shape)
    product = Columns(database, shape).product(public_matrix(seed, shape.columns), DIMENSION)
    words = np.ascontiguousarray(product.transpose(1, 0, 2), "<u4").data.cast("B")
    return b"".join([_MAGIC, _digest(params, words), words])


def _digest(params: PirParams, words: memoryview) -> bytes:
    """What a hint is compared with: it finds damage, and hints of other tables."""
    found = sha256(params.encode())
    found.update(words)
    return found.digest()


class OneServerClient:
    """The client of a table at one server."""

    def __init__(self, params: PirParams, hint: bytes) -> None:
        check_scheme(params, _SCHEME)
        self.params = params
        self._shape = LweShape.of(params)
        self._hint = _read_hint(hint, params, self._shape)

    def query(self, keys: KeyArray, prg: Prg | None = None) -> PirQuery:
        """Makes a query for keys; see `SelectClient`. The rest of `max_keys` are random ones."""
        wanted, places = distinct_keys(keys, self.params.num_keys, self.params.max_keys)
        prg = Prg.fresh() if prg is None else prg
        shape = self._shape
        asked = prg.below(shape.num_keys, shape.max_keys)
        asked[: len(wanted)] = wanted
        columns, slices = np.divmod(asked, shape.slices_per_column)
        seed = matrix_seed(self.params.round, shape)
        queries, opening = encrypt(columns, shape.columns, seed, prg)

        def open_rows(replies: Sequence[memoryview]) -> NDArray[np.uint8]:
            words = np.frombuffer(replies[0], "<u4").astype(np.uint32, copy=False)
            rows = words.reshape(shape.max_keys, -1, shape.row_bytes)
            return opening.decode(rows, slices, self._hint)

        message = seal("query", self.params, _SERVER, queries.data.cast("B"))
        rows_bytes = shape.reply_bytes - REPLY_BYTES
        return PirQuery(self.params, (message,), Wanted(places, open_rows), rows_bytes)


def server_of(database: Database, max_queries: int = MAX_QUERIES) -> PirServer:
    """Returns the server of a table, with its hint; a pass serves 1,024 keys, or one query."""
    hint, params = hint_of(database), PirParams.of(_SCHEME, database.public)
    shape = LweShape.of(params)
    columns, each = Columns(database, shape), max(1, _PASS // shape.max_keys)

    def scan(bodies: Sequence[memoryview]) -> Iterator[memoryview]:
        asked = [np.frombuffer(body, "<u4").reshape(-1, shape.columns) for body in bodies]
        for start in range(0, len(asked), each):
            some = asked[start : start + each]
            # Block by block: all queries of a pass are side by side, and not held twice.
            blocks = (
                np.concatenate([one[:, at : at + BLOCK] for one in some])
                for at in range(0, shape.columns, BLOCK)
            )
            found = columns.product(blocks, len(some) * shape.max_keys)
            for words in found.astype("<u4").reshape(len(some), -1):
                yield words.data.cast("B")

    return PirServer(params, _SERVER, shape.query_bytes, scan, max_queries, hint)


def _read_hint(hint: bytes, params: PirParams, shape: LweShape) -> Words:
    """The words of a hint, (r, 1024, row_bytes)."""
    if len(hint) != shape.hint_bytes or bytes(hint[: len(_MAGIC)]) != _MAGIC:
        raise MalformedError(
            f"this is no hint of such a table: got {len(hint)} bytes; expected {shape.hint_bytes} "
            "bytes as docs/wire.md describes them; fetch the hint of these params again"
        )
    if hint[len(_MAGIC) : HINT_HEAD_BYTES] != _digest(params, memoryview(hint)[HINT_HEAD_BYTES:]):
        raise StaleError(
            "a hint that the params do not cover: got a hint of other slices, or damaged; "
            "expected the hint of this table; fetch the params and the hint again"
        )
    words = np.frombuffer(hint, "<u4", offset=HINT_HEAD_BYTES).astype(np.uint32, copy=False)
    return np.require(words, requirements="A").reshape(-1, DIMENSION, shape.row_bytes)


@dataclass(frozen=True)
class OneServerPir:
    """Retrieves from one server, by learning with errors.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
        max_queries: that the server of a table answers and remembers; see `AnsweredQueries`.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    max_queries: int = MAX_QUERIES
    about: DeliveryAbout = field(default=_ABOUT, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> OneServerPir:
        """Implements `Delivery.for_run`."""
        return replace(self, keys_per_client=keys_per_client)

    def open(self, table: PrivateTable) -> tuple[PirServer, ...]:
        """Implements `QueryDelivery.open`."""
        return (server_of(Database.of(table), self.max_queries),)

    def client(self, params: bytes, hint: bytes = b"") -> OneServerClient:
        """Implements `QueryDelivery.client`."""
        return OneServerClient(PirParams.decode(params), hint)

    def read_params(self, params: bytes) -> PublicTable:
        """Implements `QueryDelivery.read_params`."""
        return PirParams.decode(params).public(_SCHEME)

    def lengths(self, params: bytes) -> Lengths:
        """Implements `QueryDelivery.lengths`."""
        shape = LweShape.of(PirParams.decode(params))
        return Lengths(shape.query_bytes, shape.reply_bytes, shape.hint_bytes)

    def held_bytes(self, num_keys: int, row_bytes: int, max_keys: int) -> int:
        """Implements `QueryDelivery.held_bytes`: rows and the hint."""
        shape = LweShape.of(numbers_only(_SCHEME, num_keys, row_bytes, max_keys))
        return rows_bytes(num_keys, row_bytes) + shape.hint_bytes

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices the messages, the hint and the top; params, HTTP and TLS are not counted."""
        shape = LweShape.of(params_of_load(_SCHEME, load))
        m, table = load.keys_per_client, rows_bytes(load.num_keys, shape.row_bytes)
        seconds = speeds.lwe_seconds(table, load.cohort * m)
        words = m * shape.slices_per_column * WORD_BYTES
        seconds += replying_seconds(load, speeds, words, shape.row_bytes)
        down = shape.hint_bytes + shape.reply_bytes + top_bytes(load.num_keys)
        return Price(
            self.about,
            down + load.broadcast_bytes,
            shape.query_bytes,
            {_ONLY: seconds},
            # Masks of queries, and of the rows that are opened.
            m * DIMENSION * (shape.columns + shape.row_bytes) / speeds.lwe_products,
            self.held_bytes(load.num_keys, shape.row_bytes, m),
            load.num_keys,
            {_ONLY: binding_seconds(load, speeds) + table / speeds.lwe_hint},
            requests=4,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Implements `Delivery.deliver`."""
        return deliver_by_queries(self, self.keys_per_client, state, keys, self.coding)
