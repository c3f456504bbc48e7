"""Defines a delivery: what it declares, what it gives clients, what it costs, and its served half.

A delivery by private queries is a pure protocol, bytes in and bytes out: `open` makes the servers
of a table, `client` makes what asks them. `exchange.py` drives both in process; the service and
devices move the same bytes over HTTP for any delivery, and know none by name.

Rows that arrive are compared with the root of their table in one place, whatever brought them:
`Retrieved.checked`. `docs/trust.md` says at length what each party learns, and what is not covered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from keyhole.about import About, Leak
from keyhole.arrays import KeyArray, Tree
from keyhole.crypto.merkle import Tree as HashTree
from keyhole.delivery.paths import Top, fill_rows, path_bytes, tree_of
from keyhole.delivery.popular import PopularKeys
from keyhole.errors import InputError
from keyhole.parts import PartKind
from keyhole.pricing import Speeds, Workload
from keyhole.primitives.layout import KeysBySpace, RowSource

if TYPE_CHECKING:
    from keyhole.crypto.prg import Prg
    from keyhole.server.state import ServerState

KeysT_contra = TypeVar("KeysT_contra", contravariant=True)
FoundT_co = TypeVar("FoundT_co", covariant=True)

NOTHING = Leak()
WHO_TAKES_PART = Leak(whose=True)
KEYS_OF_SOMEBODY = Leak(keys=True)
KEYS_AND_WHOSE = Leak(keys=True, whose=True, how_many=True)

Basis: TypeAlias = Literal["nothing", "no collusion", "cryptography", "hardware"]
"""What must hold for parties to learn no more than they are said to: nothing; that two of them do
not work together; that a problem is hard, with one server alone; that hardware keeps its promise.
"""

DeviceRoute: TypeAlias = Literal["whole", "slices", "queries", "sealed requests"]
"""What a device asks the service for: the whole model; slices by their keys; replies to private
queries; answers to sealed requests that another party passes on."""


@dataclass(frozen=True, kw_only=True)
class DeliveryAbout(About):
    """What a delivery declares.

    Args:
        basis: the kind of assumption that `rests_on` spells out.
        route: what a device asks the service for; None where devices cannot use it.
        connects_to: parties beside the service that a device connects to, as the options of a
            device name them.
        is_bound: whether what a device receives is bound to a root in the manifest, so that all
            devices of a round get the same model.
        wire_name: the word that stands for it in paths of a service; `name` where it is empty.
        has_popular: whether a share of a query's keys can be asked of a table of popular ones: then
            it has a field `popular`, and follows `PrivateTable.popular` (`delivery.popular`).
    """

    basis: Basis = "nothing"
    route: DeviceRoute | None = "slices"
    connects_to: tuple[str, ...] = ()
    is_bound: bool = True
    wire_name: str = ""
    has_popular: bool = False

    @property
    def path_name(self) -> str:
        """The word that stands for it in paths of a service."""
        return self.wire_name or self.name


@dataclass(frozen=True)
class Cost:
    """The cost of delivering one round.

    Args:
        bytes_down: bytes that each client received: slices, and what binds them to the round.
        bytes_up: bytes of keys that each client sent to receive them.
        select_calls: slices that were computed, one for each call of the select function.
        cache_hits: slices that were asked for and found computed.
        distinct_slices: how many different slices of cut parts the cohort asked for.
        leaks: party -> what it learns of a client's keys while slices are delivered.
    """

    bytes_down: Mapping[int, int]
    bytes_up: Mapping[int, int]
    select_calls: int
    cache_hits: int
    distinct_slices: int
    leaks: Mapping[str, Leak]


@dataclass(frozen=True)
class Delivered:
    """Sub-models on the clients, and their cost.

    Args:
        submodels: of each client; may be computed when it is read, so read before the next step.
        keys: those that the sub-model holds, in order: what the client asked for, but for keys that
            a private delivery could not place in its query. The client trains without those.
        source: where the rows of sub-models are read, so that they can be selected elsewhere; None
            where what a client received is not a function of its keys.
    """

    submodels: Mapping[int, Tree]
    keys: Mapping[int, KeysBySpace]
    cost: Cost
    source: RowSource | None = None


@dataclass(frozen=True)
class Price:
    """What one delivery costs in a round. Bytes are exact but for those of proofs, which depend on
    the keys; seconds are estimates of one core.

    Args:
        bytes_down: that a client receives, from all servers together.
        bytes_up: that a client sends, to all servers together.
        seconds_by: party -> CPU seconds of one core for answering the whole cohort.
        client_seconds: CPU seconds of one client.
        server_memory: bytes that one server holds.
        slices_generated: at the server side.
        building_by: party -> CPU seconds of one core for what it makes before anybody asks, once a
            round; parties that make nothing are not in it.
        is_cacheable: whether the same bytes serve many clients, so that caches can give them out.
        requests: of a device at each party, those for params and hints among them.
        passed_on_by: the party that passes everything on to the others, which devices then do not
            connect to; empty if there is none.
        proof_bytes: of `bytes_down`, the proofs that slices fetched by key belong to the round: the
            mean for keys that are drawn evenly. Keys that lie together take fewer.
    """

    about: DeliveryAbout
    bytes_down: int
    bytes_up: int
    seconds_by: Mapping[str, float] = field(hash=False)
    client_seconds: float
    server_memory: int
    slices_generated: int
    building_by: Mapping[str, float] = field(hash=False, default_factory=dict)
    is_cacheable: bool = False
    requests: int = 1
    passed_on_by: str = ""
    proof_bytes: int = 0

    @property
    def name(self) -> str:
        """The name of the delivery."""
        return self.about.name

    @property
    def bytes_total(self) -> int:
        """Both directions, of one client."""
        return self.bytes_down + self.bytes_up

    @property
    def server_seconds(self) -> float:
        """CPU seconds of all parties but the clients, together: building and answering."""
        return sum(self.seconds_by.values()) + sum(self.building_by.values())


class Delivery(Protocol):
    """How slices travel from the server to clients."""

    @property
    def about(self) -> DeliveryAbout:
        """What it declares."""
        ...

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> Delivery:
        """Returns the delivery with what a run says.

        Args:
            keys_per_client: key space -> max keys that a client may ask for; private
                deliveries pad every request to it.
            allow_simulation: whether hardware may be simulated, which protects nothing.

        Raises:
            AttestationError: hardware would be simulated, and that is not allowed.
        """
        ...

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Returns what a round costs.

        Raises:
            InputError: the load is beyond what messages of this delivery can hold.
        """
        ...

    def deliver(self, state: ServerState, keys: Mapping[int, KeysBySpace]) -> Delivered:
        """Delivers one round to the clients that have chosen `keys`."""
        ...


DELIVERY = PartKind(
    "delivery",
    "own-delivery",
    {"about": DeliveryAbout, "for_run": Callable, "deliver": Callable},
)


@dataclass(frozen=True, repr=False)
class Retrieved:
    """What a client found.

    Args:
        records: (m, n) uint8 in the order of the keys; zeros where `is_found` is false. What a
            query decodes to are rows as they came, records with their paths; `checked` compares
            them with the top, and leaves the records.
        is_found: (m,) bool. A key that found no place in a query is not retrieved, nor is one whose
            row is wrong. Nobody but the client knows, and it trains without the key: were it to
            fail, ask again or fall silent, a server that damages one row would learn from that
            whether the row was asked for.
        wrong: how many rows were wrong, for the client alone.
    """

    records: NDArray[np.uint8]
    is_found: NDArray[np.bool_]
    wrong: int = 0

    @staticmethod
    def whole(records: NDArray[np.uint8]) -> Retrieved:
        """Returns records of all keys."""
        return Retrieved(records, np.ones(len(records), bool))

    def checked(self, top: Top, keys: KeyArray) -> Retrieved:
        """Returns the records of rows that are those of their keys, (m,), under the top; a row that
        is not is treated as that of a key that found no place."""
        is_right = self.is_found & top.are_right(keys, self.records)
        cut = self.records.shape[1] - path_bytes(top.shape.num_leaves)
        records = np.where(is_right[:, None], self.records[:, :cut], np.uint8(0))
        wrong = self.wrong + int((self.is_found & ~is_right).sum())
        return Retrieved(records, is_right, wrong)

    def __repr__(self) -> str:
        """Keys are private: printing shows how many there are."""
        return f"Retrieved({self.is_found.sum()} of {len(self.is_found)} keys)"


class Query(Protocol[FoundT_co]):
    """One query of a client, for one use."""

    def messages(self) -> tuple[bytes, ...]:
        """Returns the messages: one for each server, in their order, or all for the only one.

        Raises:
            ReplayError: they have been taken before. To ask again, make a new query.
        """
        ...

    def decode(self, replies: Sequence[bytes]) -> FoundT_co:
        """Returns the rows, from one reply to each message.

        What is raised must depend on what a server knows when it sends a reply, and on nothing that
        a query hides: on the reply's length, its head and its check. What the rows hold is
        compared later, and then nothing is raised: see `Retrieved`.

        Raises:
            MalformedError, StaleError: a reply is not one to this query.
            ReplayError: replies have been opened before.
        """
        ...


class SelectClient(Protocol[KeysT_contra, FoundT_co]):
    """The client of one table, or of one round."""

    def query(self, keys: KeysT_contra, prg: Prg | None = None) -> Query[FoundT_co]:
        """Makes a query for keys; repeats and order are the client's own business.

        Args:
            keys: (n,) int64 with no more different ones than queries hold.
            prg: where secrets come from; a fresh one if None. Given by tests only.

        Raises:
            KeySpaceError: keys are outside the table, or too many.
        """
        ...


class SelectServer(Protocol):
    """One server of one table: pure, and without a network."""

    @property
    def params(self) -> bytes:
        """What a client must know before it asks: public, and the same at every server."""
        ...

    @property
    def hint(self) -> bytes:
        """What a client must have before it asks; empty where it needs nothing."""
        ...

    def check(self, query: bytes) -> None:
        """Refuses what is no query of this table, without reading a slice: a service calls it
        before a query meets others in one pass.

        Raises:
            MalformedError, StaleError: the query cannot be answered.
        """
        ...

    def answer(self, queries: Sequence[bytes]) -> list[bytes]:
        """Answers queries in one pass over the table.

        Raises:
            MalformedError, StaleError, ReplayError: a query cannot be answered; raised before any
                slice is read, and none of the others is answered either.
        """
        ...


@dataclass(frozen=True)
class PrivateTable:
    """One table of a round, to be retrieved from. A row is a record and its path.

    Args:
        id: of the round and its table. No other round and table of one run has it.
        model: 32 bytes, the digest of the round's manifest.
        records: (K, record_bytes) uint8, all of them.
        tree: over the records.
        max_keys: m, to which every query is padded; public.
        popular: keys that a small table holds, of which a share of every query is asked; public.
    """

    id: str
    model: bytes
    records: NDArray[np.uint8]
    tree: HashTree
    max_keys: int
    popular: PopularKeys | None = None

    @staticmethod
    def of(
        id: str,
        model: bytes,
        records: NDArray[np.uint8],
        max_keys: int,
        popular: PopularKeys | None = None,
    ) -> PrivateTable:
        """Returns a table with the tree of its records."""
        return PrivateTable(id, model, records, tree_of(records), max_keys, popular)

    @property
    def name(self) -> bytes:
        """The 16 bytes that stand for it in params and messages."""
        return name_of_round(self.id)

    @property
    def num_keys(self) -> int:
        """K."""
        return len(self.records)

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a record and its path."""
        return int(self.records.shape[1]) + path_bytes(self.num_keys)

    def rows(self) -> NDArray[np.uint8]:
        """Makes all rows, (K, row_bytes)."""
        out = np.empty((self.num_keys, self.row_bytes), np.uint8)
        fill_rows(self.tree, self.records, out)
        return out

    @property
    def public(self) -> PublicTable:
        """What everybody may know."""
        limit = min(self.max_keys, self.num_keys)
        numbers = self.num_keys, self.row_bytes, limit
        return PublicTable(self.name, self.model, self.tree.root, *numbers, self.popular)


_MAX = 1 << 40  # of keys, and of bytes of a row: beyond what anybody can scan


@dataclass(frozen=True)
class PublicTable:
    """What params say of a table; nothing else decides what an observer sees.

    Args:
        name: 16 bytes, those of `PrivateTable.name`.
        model: 32 bytes, the digest of the round's manifest.
        root: 32 bytes, of the tree over all records.
        row_bytes: of a record and its path.
        max_keys: m, to which every query is padded.
        popular: keys that a small table holds beside it, where there is one.
    """

    name: bytes
    model: bytes
    root: bytes
    num_keys: int
    row_bytes: int
    max_keys: int
    popular: PopularKeys | None = None

    def __post_init__(self) -> None:
        names = len(self.name), len(self.model), len(self.root)
        numbers = (self.num_keys, self.row_bytes, self.max_keys)
        in_range = min(numbers) >= 1 and max(numbers) <= _MAX and self.max_keys <= self.num_keys
        if names != (16, 32, 32) or not in_range:
            raise InputError(
                f"params of a table that make no sense: got {self.num_keys} keys, {self.row_bytes} "
                f"bytes, {self.max_keys} a query, names of {names} bytes; expected 1..2^40, no "
                "more keys per query than there are, and names of 16, 32 and 32 bytes; check "
                "num_keys, row_bytes and max_keys"
            )
        if self.popular is not None:
            self.popular.check(self.num_keys, self.max_keys)


@dataclass(frozen=True)
class Lengths:
    """Bytes of a query to one server, of its reply, and of the hint, which is 0 where there is
    none: the same for all keys."""

    query: int
    reply: int
    hint: int = 0


class QueryDelivery(Delivery, Protocol):
    """A delivery by private queries, with what a service and a device need of it: its `about.route`
    is "queries", and `about.servers` says how many servers there are."""

    def open(self, table: PrivateTable) -> tuple[SelectServer, ...]:
        """Returns the servers of a table, in their order; a service keeps one of them."""
        ...

    def client(self, params: bytes, hint: bytes = b"") -> SelectClient[KeyArray, Retrieved]:
        """Returns the client of a table.

        Raises:
            ProtocolError: the hint is not the one that the params cover.
        """
        ...

    def read_params(self, params: bytes) -> PublicTable:
        """Returns what params say; a server may have put anything into them.

        Raises:
            ProtocolError: they are not params of this delivery.
        """
        ...

    def lengths(self, params: bytes) -> Lengths:
        """Returns the lengths of messages; the params have been compared with the round."""
        ...

    def held_bytes(self, num_keys: int, row_bytes: int, max_keys: int) -> int:
        """Returns what a server keeps in memory for a table: its rows, and what it made of them."""
        ...


def name_of_round(round_id: str) -> bytes:
    """Returns the 16 bytes that stand for a round and its tables in messages."""
    return blake2b(round_id.encode("utf-8"), digest_size=16, person=b"keyhole-round").digest()


def served_by_queries(delivery: Delivery) -> QueryDelivery:
    """Returns a delivery as one by private queries.

    Raises:
        InputError: it declares another route, or lacks a method of `QueryDelivery`.
    """
    needed = ("open", "client", "read_params", "lengths", "held_bytes")
    missing = [name for name in needed if not callable(getattr(delivery, name, None))]
    if delivery.about.route != "queries" or missing:
        got = f"no {', '.join(missing)}" if missing else f"the route {delivery.about.route!r}"
        raise InputError(
            f"{delivery.about.name} is not delivered by private queries: got {got}; "
            'expected the route "queries" and the methods of QueryDelivery; choose '
            "another delivery, or see docs/own-delivery.md"
        )
    return cast("QueryDelivery", delivery)


def making_seconds(load: Workload, speeds: Speeds) -> float:
    """Returns the CPU seconds for making all slices."""
    return load.table_bytes / speeds.gather
