"""Drives private retrieval: a client asks without saying for what, in process and on a device.

`retrieve` is the only driver. It knows clients, which turn keys into messages and replies into
rows, and links, which carry messages to the parties: function calls in process, POSTs on a
device. No reply is opened before everything has been asked: a client that cannot read one of them
stops, and must not show of which table. No message is sent twice: after a failure all keys are
asked for again, with fresh secrets. What is asked again shows which reply could not be read, and
never what was in it: that a row is wrong makes nobody ask again, nor fail (`Retrieved.checked`).

`deliver_privately` runs it for a cohort. Every slice of every cut part is made before the round;
what everyone receives is sent to everyone, and so is a part of which clients take every key; of the
others each client retrieves the slices it wants (section 6 of the paper). What a client asks for is
padded to the most that any client may ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from keyhole.about import Leak
from keyhole.arrays import KeyArray
from keyhole.delivery.base import (
    Cost,
    Delivered,
    Lengths,
    PrivateTable,
    Query,
    QueryDelivery,
    Retrieved,
    SelectClient,
    SelectServer,
)
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.popular import NO_POPULAR, PopularShares, popular_of_part
from keyhole.delivery.records import (
    PLAIN,
    Coding,
    Demand,
    RecordArray,
    assemble,
    count_asked,
    count_distinct,
    cut_parts,
    keep_found,
    records_of,
)
from keyhole.errors import KeyholeError, MalformedError, ServiceError
from keyhole.primitives.layout import KeysBySpace, Layout, max_keys_of

if TYPE_CHECKING:
    from keyhole.crypto.prg import Prg
    from keyhole.server.state import ServerState

KeysT = TypeVar("KeysT")
FoundT = TypeVar("FoundT")

_MAX_HELD = 512 << 20  # bytes of messages of all clients that are answered together


@dataclass(frozen=True, repr=False)
class Retrieval(Generic[KeysT, FoundT]):
    """What is to be retrieved."""

    client: SelectClient[KeysT, FoundT]
    keys: KeysT


@dataclass(frozen=True)
class Unanswered:
    """Why there is no answer that can be used.

    Args:
        after: seconds to wait, where a server said so.
    """

    reason: str
    after: float | None = None
    error: KeyholeError | None = None


class Links(Protocol):
    """The way of messages to the parties and back."""

    def exchange(
        self, sent: Mapping[int, tuple[bytes, ...]]
    ) -> Mapping[int, Sequence[bytes] | Unanswered]:
        """Carries the messages of queries, each once: place of a want -> the messages of its query.

        Returns:
            Place -> a reply to each message, or why there are none.
        """
        ...

    def failed(self, place: int, failure: Unanswered) -> None:
        """Waits until it makes sense to ask again; raises where it does not."""
        ...


def retrieve(wants: Sequence[Retrieval[KeysT, FoundT]], links: Links) -> list[FoundT]:
    """Asks until there is a whole answer to every want.

    Raises:
        KeyholeError: what a reply or `links` found wrong; all wants have been asked by then.
    """
    queries = dict(enumerate([want.client.query(want.keys) for want in wants]))
    found: dict[int, FoundT] = {}
    while queries:
        replies = _replies(wants, queries, links)
        unread = _decode_all(queries, replies, found)
        for place, failure in unread.items():
            links.failed(place, failure)
        queries = {place: wants[place].client.query(wants[place].keys) for place in unread}
    return [found[place] for place in range(len(wants))]


def _replies(
    wants: Sequence[Retrieval[KeysT, FoundT]], queries: dict[int, Query[FoundT]], links: Links
) -> dict[int, Sequence[bytes]]:
    """Whole replies to all queries, not opened; a query that fails is replaced by a new one."""
    replies: dict[int, Sequence[bytes]] = {}
    while left := [place for place in queries if place not in replies]:
        got = links.exchange({place: queries[place].messages() for place in left})
        for place, answer in got.items():
            if isinstance(answer, Unanswered):
                links.failed(place, answer)
                queries[place] = wants[place].client.query(wants[place].keys)
            else:
                replies[place] = answer
    return replies


def _decode_all(
    queries: Mapping[int, Query[FoundT]],
    replies: Mapping[int, Sequence[bytes]],
    found: dict[int, FoundT],
) -> dict[int, Unanswered]:
    """Opens all replies, then raises what was wrong with the first of them; returns the wants whose
    replies cannot be read."""
    unread, errors = {}, []
    for place, query in queries.items():
        try:
            found[place] = query.decode(replies[place])
        except MalformedError as error:
            unread[place] = Unanswered("an unreadable reply", error=error)
        except KeyholeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return unread


@dataclass
class ByteTally:
    """Bytes that each client received and sent."""

    down: dict[int, int] = field(default_factory=dict)
    up: dict[int, int] = field(default_factory=dict)

    def add(self, client: int, down: int = 0, up: int = 0) -> None:
        """Counts bytes of one client."""
        self.down[client] = self.down.get(client, 0) + down
        self.up[client] = self.up.get(client, 0) + up


Answer: TypeAlias = Callable[[Sequence[tuple[bytes, ...]]], Sequence[Sequence[bytes]]]
"""Answers the messages of some queries: for each a reply to each of its messages."""


@dataclass(frozen=True)
class LocalLinks:
    """Links to parties in this process: what goes wrong is raised."""

    answer: Answer
    clients: Sequence[int]
    tally: ByteTally

    def exchange(self, sent: Mapping[int, tuple[bytes, ...]]) -> Mapping[int, Sequence[bytes]]:
        """Implements `Links.exchange`."""
        replies = dict(zip(sent, self.answer(list(sent.values())), strict=True))
        for place, messages in sent.items():
            up, down = sum(map(len, messages)), sum(map(len, replies[place]))
            self.tally.add(self.clients[place], down, up)
        return replies

    def failed(self, place: int, failure: Unanswered) -> None:
        """Implements `Links.failed`: nothing in one process gets better with time."""
        assert failure.error is not None
        raise failure.error


def _answer_by(servers: Sequence[SelectServer]) -> Answer:
    """Returns what has each message answered by the server of its place, many in one pass."""

    def answer(sent: Sequence[tuple[bytes, ...]]) -> Sequence[Sequence[bytes]]:
        pairs = zip(servers, zip(*sent, strict=True), strict=True)
        return list(zip(*(server.answer(messages) for server, messages in pairs), strict=True))

    return answer


Retrieve: TypeAlias = Callable[
    [PrivateTable, Mapping[int, KeyArray], ByteTally], Mapping[int, Retrieved]
]
"""`(table, wanted, tally)`: what each client finds of the keys it wants; bytes go to the tally."""


def deliver_privately(
    retrieve_from: Retrieve,
    state: ServerState,
    demand: Demand,
    keys_per_client: Mapping[str, int],
    coding: Coding,
    leaks: Mapping[str, Leak],
    popular: PopularShares = NO_POPULAR,
) -> Delivered:
    """Delivers one round of pre-generated slices by private retrieval.

    Equal in bytes to slices in the clear, but for keys that found no place in a query: those are
    left out of `Delivered.keys`.
    """
    layout, tally = state.layout, ByteTally()
    tables, limit = records_of(layout, coding), max_keys_of(layout, keys_per_client)
    model = sha256(str(state.steps).encode("ascii")).digest()  # there is no manifest in a process
    found: dict[int, list[Retrieved]] = {client: [] for client in demand}
    for client in demand:
        tally.add(client)
    for place, (part, records) in enumerate(zip(layout.parts, tables, strict=True)):
        every = np.arange(part.space.num_keys)
        rows = records.encode_rows(state.rows(place, every), every)
        wanted = {c: part.keys_of(z).array for c, z in demand.items()}
        # A part of which clients take every key, or none, has nothing to hide.
        if 0 < limit[place] < part.space.num_keys:
            name, few = f"{state.steps}-{place:064x}", popular_of_part(popular, part, limit[place])
            table = PrivateTable.of(name, model, rows, limit[place], few)
            got = _retrieve_checked(retrieve_from, table, wanted, tally)
        else:
            got = _send_all(rows, limit[place], wanted, tally)
        for client, one in got.items():
            found[client].append(one)
    submodels, kept = {}, {}
    for client, parts in found.items():
        left, z = keep_retrieved(layout, parts, demand[client])
        submodels[client] = assemble(layout, tables, left, z)
        kept[client] = z
    cost = Cost(
        bytes_down=tally.down,
        bytes_up=tally.up,
        select_calls=sum(part.space.num_keys for part in cut_parts(layout)),
        cache_hits=count_asked(layout, demand),
        distinct_slices=count_distinct(layout, demand),
        leaks=leaks,
    )
    return Delivered(submodels, kept, cost)


def keep_retrieved(
    layout: Layout, parts: Sequence[Retrieved], keys: KeysBySpace
) -> tuple[list[RecordArray], KeysBySpace]:
    """Returns the records of each part and the keys that are left without those of which a row is
    missing; see `keep_found`."""
    records, is_found = [got.records for got in parts], [got.is_found for got in parts]
    return keep_found(layout, records, is_found, keys)


def deliver_by_queries(
    delivery: QueryDelivery,
    keys_per_client: Mapping[str, int],
    state: ServerState,
    keys: Demand,
    coding: Coding = PLAIN,
    popular: PopularShares = NO_POPULAR,
) -> Delivered:
    """Delivers one round by private queries, with all servers and clients in this process: the
    `deliver` of every `QueryDelivery`."""

    def retrieve_from(
        table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
    ) -> Mapping[int, Retrieved]:
        servers = delivery.open(table)
        params, hint = servers[0].params, servers[0].hint
        asking, found = delivery.client(params, hint), dict[int, Retrieved]()
        for some in _groups(list(wanted), delivery.lengths(params)):
            links = LocalLinks(_answer_by(servers), some, tally)
            for client in some:
                tally.add(client, down=len(hint))
            got = retrieve([Retrieval(asking, wanted[client]) for client in some], links)
            found |= zip(some, got, strict=True)
        return found

    about = delivery.about.leaks, popular
    return deliver_privately(retrieve_from, state, keys, keys_per_client, coding, *about)


def _groups(clients: Sequence[int], lengths: Lengths) -> Iterator[Sequence[int]]:
    """Clients whose messages fit into memory together; one at the least."""
    size = max(1, _MAX_HELD // (2 * (lengths.query + lengths.reply)))
    return (clients[start : start + size] for start in range(0, len(clients), size))


def _retrieve_checked(
    retrieve_from: Retrieve,
    table: PrivateTable,
    wanted: Mapping[int, KeyArray],
    tally: ByteTally,
) -> dict[int, Retrieved]:
    """Every client fetches the top, asks, and compares what it gets with the root."""
    sent = top_of(table.tree)
    for client in wanted:
        tally.add(client, down=len(sent))
    top = Top.of(table.num_keys, table.tree.root, sent)
    found = retrieve_from(table, wanted, tally)
    return {client: got.checked(top, wanted[client]) for client, got in found.items()}


def _send_all(
    records: RecordArray, max_keys: int, wanted: Mapping[int, KeyArray], tally: ByteTally
) -> dict[int, Retrieved]:
    """Every client receives the table and takes from it what it wants: nobody learns a key."""
    found = {}
    for client, keys in wanted.items():
        tally.add(client, down=records.nbytes if max_keys else 0)
        found[client] = Retrieved.whole(records[keys])
    return found


@dataclass(frozen=True, repr=False)
class Mixed:
    """Requests of many clients in one order, and the way back.

    Args:
        places: where each of them stood, clients one after the other.
    """

    requests: list[bytes]
    places: Sequence[int]
    counts: Sequence[int]

    def __repr__(self) -> str:
        """Who sent which request is what mixing hides."""
        return f"Mixed({len(self.requests)} requests of {len(self.counts)} clients)"

    def hand_back(self, answers: Sequence[bytes]) -> list[list[bytes]]:
        """Returns to each client its answers, in the order of its requests; `answers` has one to
        each of `requests`, in their order."""
        if len(answers) != len(self.requests):
            raise ServiceError(
                f"the gateway leaves requests without an answer: got {len(answers)} answers; "
                f"expected {len(self.requests)}; ask again; check that both sides have one version"
            )
        by_place = dict(zip(self.places, answers, strict=True))
        found = iter(by_place[place] for place in range(len(answers)))
        return [[next(found) for _ in range(count)] for count in self.counts]


def mix(batches: Sequence[Sequence[bytes]], prg: Prg) -> Mixed:
    """Returns the requests of all clients in an order that nobody can foresee."""
    sealed = [one for batch in batches for one in batch]
    places = prg.permutation(len(sealed)).tolist()
    return Mixed([sealed[place] for place in places], places, [len(batch) for batch in batches])
