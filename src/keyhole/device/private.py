"""Fetches a sub-model on a device by private queries, which hide the slices it takes.

Any `QueryDelivery` will do: it makes and reads messages, and this module carries them to all of its
servers. Each table that is cut takes one query, padded to a public maximum, whatever the device
wants of it: nothing, a few keys, or one key many times. What every device receives is fetched
plainly. A table of which every device may take every slice is downloaded whole. The top of each
table is fetched before anything is asked for, and compared with the root of the round.

A row that does not lead to the root is left out, as if its key had found no place: the device
trains on the others, and what it sends afterwards has the number, length and order that it always
has. What makes a device fail or ask again is what servers know without it: that a reply has another
length, a wrong check, or is about other params. How many rows were wrong stays on the device
(`Submodel.wrong`).

Hidden is what is fetched. The update that a device sends afterwards carries its keys in the clear,
unless it is aggregated in a private way too.

The maximum is what the round says that a client chooses, or a number that the device was given. A
server that named each device another one could find out how many keys it has, by whether it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.delivery.base import PublicTable, QueryDelivery, Retrieved, SelectClient
from keyhole.delivery.exchange import Retrieval, Unanswered, keep_retrieved, retrieve
from keyhole.delivery.paths import Top, path_bytes, top_bytes
from keyhole.delivery.popular import shares_of_round
from keyhole.device.admission import redeem, signed_tokens
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import FetchTraffic, KnownRound, Submodel, not_padded
from keyhole.errors import (
    DamageError,
    InputError,
    NotFoundError,
    ProtocolError,
    ServiceError,
    StaleError,
)
from keyhole.primitives.layout import KeysBySpace
from keyhole.wire.assignment import NO_ROUND, Wait
from keyhole.wire.http import OCTETS, Received
from keyhole.wire.manifest import TableInfo, digest_of
from keyhole.wire.private import (
    SERVER_HEADER,
    name_table,
    popular_of_table,
    queries_at,
    query_path,
    root_of_table,
    top_path,
)
from keyhole.wire.sockets import refuse_longer

_MAX_PARAMS = 1024  # bytes, without popular keys

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


@dataclass(frozen=True, repr=False)
class _Table:
    """What asks for the rows of a table, and what they are compared with."""

    client: SelectClient[KeyArray, Retrieved]
    top: Top


@dataclass(frozen=True)
class ServerLink:
    """The connection to one server: the device that speaks to it, and the round as this server
    knows the device in it."""

    device: Device
    round: Assignment | str

    def get(
        self, path: str, limit: int, check: Callable[[memoryview], None] = lambda _: None
    ) -> Received:
        """GETs something of the round; `check` as for `Client.get`."""
        token = self.device.token_for(self.round)
        return self.device.client.get(path, token=token, limit=limit, check=check)

    def post(self, message: bytes, path: str, limit: int) -> Received:
        """Sends a message, once."""
        return self.device.client.exchange(
            "POST",
            path,
            message,
            headers={"content-type": OCTETS},
            token=self.device.token_for(self.round),
            limit=limit,
            may_repeat=False,
        )


@dataclass(frozen=True)
class ServerLinks:
    """All servers of a delivery, in their order; `pool` has a thread for each, so that they are
    asked at the same time."""

    each: Sequence[ServerLink]
    pool: Executor
    traffic: FetchTraffic

    def params(self, path: str, delivery: QueryDelivery, limit: int) -> bytes:
        """Returns the params of a table, of at most `limit` bytes, which all servers must state
        alike.

        Raises:
            ServiceError: a server is not the one it is taken for. Both halves of a query at one
                server would show it all keys. Or it is set up otherwise than the first.
        """
        found = self.at_once(partial(_params, path, limit), range(len(self.each)))
        self.traffic.requests += len(found)
        self.traffic.bytes_down += sum(map(len, found))
        padded = [delivery.read_params(params).max_keys for params in found]
        if any(count != padded[0] for count in padded):
            raise _set_up_wrongly(
                "queries padded to " + " and ".join(f"{count} keys" for count in padded)
            )
        if any(params != found[0] for params in found):
            raise _differ("params that differ")
        return found[0]

    def at_once(
        self, call: Callable[[ServerLink, _Given], _Result], given: Sequence[_Given]
    ) -> list[_Result]:
        """Calls with each link and what is given for it, all to their end; then the first error
        counts."""
        pairs = zip(self.each, given, strict=True)
        started = [self.pool.submit(call, link, one) for link, one in pairs]
        wait(started)
        return [each.result() for each in started]


def _longest_params(known: KnownRound, info: TableInfo) -> int:
    """The max bytes of the params of a table. They say popular keys as the round does, in ranges of
    16 bytes where it takes two characters or more."""
    words = [words for words, _ in shares_of_round(known.manifest.settings).values()]
    return _MAX_PARAMS + 8 * sum(map(len, words if info.factors else []))


def _params(path: str, limit: int, link: ServerLink, server: int) -> bytes:
    """The params of a table as one server states them."""
    try:
        got = link.get(path, limit)
    except NotFoundError as error:
        if server == 0:
            raise
        wrong = _differ if error.wrong == NO_ROUND else _set_up_wrongly  # nor in a later round
        raise wrong(f"{error.wrong} at server {server}") from error
    if got.headers.get(SERVER_HEADER) != str(server):
        raise ServiceError(
            f"another server answers: got one that does not say that it is server {server}; "
            f"expected server {server}; name the service that runs with --pir 0 first, the other "
            "one second"
        )
    return bytes(got.body)


class TableLinks:
    """The links to the servers of some tables, as `retrieve` uses them.

    Args:
        targets: path and length of a reply of each table, such that this device takes them.
    """

    def __init__(self, links: ServerLinks, targets: Sequence[tuple[str, int]]) -> None:
        self._links, self._targets = links, targets
        client = links.each[0].device.client
        self._attempts = [client.attempts(f"POST {path}") for path, _ in targets]

    def exchange(
        self, sent: Mapping[int, tuple[bytes, ...]]
    ) -> Mapping[int, Sequence[bytes] | Unanswered]:
        """Implements `Links.exchange`, table by table."""
        return {place: self._exchange(place, messages) for place, messages in sent.items()}

    def failed(self, place: int, failure: Unanswered) -> None:
        """Implements `Links.failed`: waits, or raises ServiceError."""
        self._attempts[place].failed(failure.reason, failure.after)

    def _exchange(self, place: int, messages: Sequence[bytes]) -> Sequence[bytes] | Unanswered:
        (path, limit), traffic = self._targets[place], self._links.traffic
        traffic.requests += len(messages)
        traffic.bytes_up += sum(map(len, messages))
        post = partial(ServerLink.post, path=path, limit=limit)
        try:
            got = self._links.at_once(post, messages)
        except StaleError:
            raise
        except ProtocolError:
            return Unanswered("a message that was refused")
        traffic.bytes_down += sum(len(each.body) for each in got)
        for server, each in enumerate(got):
            if each.problem:
                which = f" at server {server}" * (len(got) > 1)
                return Unanswered(each.problem + which, max(one.after or 0.0 for one in got))
        return [bytes(each.body) for each in got]


@dataclass
class QueryFetch:
    """Fetches by private queries to the servers of a delivery, none of which learns a key under
    what the delivery rests on.

    Called as `Device.fetch` is: the device speaks to the first server, `others` to the others.
    Tokens of one service are never shown to another: where one of the others asks for tokens, its
    device has one of its own and checks in there. A hint, some megabytes, is fetched once a round.

    Args:
        others: devices of the further services, in their order.
        max_keys: table -> keys of every query, from the operators; for other tables it is what the
            round says. Where neither says, what several services name alike is taken: as long as
            one of them is honest, it is the same for all devices. One service alone says both: only
            a number that was given otherwise is known to be the same for all devices.
        anonymous: whether servers are shown tokens without a name, which the first one signs blind;
            no server then needs a token of its own for this device.
    """

    delivery: QueryDelivery
    others: tuple[Device, ...] = ()
    max_keys: Mapping[str, int] = field(default_factory=dict)
    anonymous: bool = False
    _tables: dict[bytes, _Table] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        needed = self.delivery.about.servers
        if len(self.others) != needed - 1:
            raise InputError(
                f"{self.delivery.about.name} is fetched from another number of servers: got "
                f"{1 + len(self.others)} servers; expected {needed} servers; pass one device for "
                "each server beside the first"
            )

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        A key that found no place in a query, which is rare, is missing in `Submodel.keys`, and so
        is one whose row was wrong; nobody but the device knows.

        Raises:
            InputError: neither the round nor `max_keys` says how many keys a query has, and there
                is one server.
            KeySpaceError: keys do not fit the round, or are more than a query holds.
            StaleError: the servers do not hold the slices of this round.
            DamageError: the top of a table is not that of the round, time and again. Nothing was
                asked for.
            ServiceError: no usable answer; servers that pad queries to another number of keys; or
                messages of more than `max_answer` bytes. Then nothing was asked for, and nothing
                made. A query takes some ten times the memory of its messages while it is made.
            RequestError: a server refuses.
        """
        known = device.known(round)
        chosen, traffic = known.keys_by_space(keys), FetchTraffic()
        wanted = [part.keys_of(chosen).array for part in known.layout.parts]
        with ExitStack() as stack, ThreadPoolExecutor(1 + len(self.others)) as pool:
            each = (
                self._guests(device, round, stack)
                if self.anonymous
                else [
                    ServerLink(device, round),
                    *(ServerLink(one, _joined(one, known.id)) for one in self.others),
                ]
            )
            found = self._fetch(ServerLinks(each, pool, traffic), known, wanted)
        return submodel_of(known, [found[place] for place in range(len(wanted))], chosen, traffic)

    def _guests(
        self, device: Device, round: Assignment | str, stack: ExitStack
    ) -> list[ServerLink]:
        """All servers, each of which knows this device by a token without a name, and speaks to it
        over connections of this round alone, on which no name was told."""
        if not isinstance(round, Assignment):
            raise InputError(
                "a device without a name takes part in a round: got its identifier alone; expected "
                "what check_in returns; check in first"
            )
        lines = [stack.enter_context(each.nameless()) for each in (device, *self.others)]
        places = [queries_at(server) for server in range(len(lines))]
        tokens = signed_tokens(device, round, places, lines[1:])
        pairs = zip(lines, tokens, strict=True)
        return [ServerLink(line, redeem(line, round, token)) for line, token in pairs]

    def _fetch(
        self, links: ServerLinks, known: KnownRound, wanted: Sequence[KeyArray]
    ) -> dict[int, Retrieved]:
        """The records of each table; no query is sent before the keys of all are checked."""
        device, round = links.each[0].device, links.each[0].round
        tables, found = known.manifest.tables, {}
        for place, z in enumerate(wanted):
            if tables[place].factors and not tables[place].record_bytes:
                # Nothing to ask for, and nobody is to learn by whom.
                found[place] = Retrieved.whole(np.empty((len(z), 0), np.uint8))
        cut = [at for at, table in enumerate(tables) if table.factors and table.record_bytes]
        agreed = {place: self._agreed(links, known, place) for place in cut}
        # Where every device may take every slice, a query would be no shorter than the table.
        whole = [
            at
            for at, (_, public) in agreed.items()
            if public.max_keys == public.num_keys and tables[at].segments
        ]
        hidden = {at: params for at, (params, _) in agreed.items() if at not in whole}
        self._refuse_long(list(hidden.values()), device.max_answer)
        for place in whole:
            records = device.fetch_table(round, place, links.traffic)
            found[place] = Retrieved.whole(records[wanted[place]])
        found |= self._retrieve(links, known, wanted, hidden)
        for place, table in enumerate(tables):
            if not table.factors:
                (got,) = device.fetch_records(round, [(place, wanted[place])], links.traffic)
                found[place] = Retrieved.whole(got.records)
        return found

    def _retrieve(
        self,
        links: ServerLinks,
        known: KnownRound,
        wanted: Sequence[KeyArray],
        hidden: Mapping[int, bytes],
    ) -> dict[int, Retrieved]:
        """The records of tables that are asked for in private, by place; `hidden` has their
        params."""
        used, self._tables = self._tables, {}  # those of another round go
        wants, targets = [], []
        for place, params in hidden.items():
            path = query_path(known.id, place, self.delivery)
            table = used.get(params) or self._table(links, known, place, params)
            self._tables[params] = table
            wants.append(Retrieval(table.client, wanted[place]))
            targets.append((path, self.delivery.lengths(params).reply))
        got = zip(hidden.items(), retrieve(wants, TableLinks(links, targets)), strict=True)
        return {
            place: rows.checked(self._tables[params].top, wanted[place])
            for (place, params), rows in got
        }

    def _table(self, links: ServerLinks, known: KnownRound, place: int, params: bytes) -> _Table:
        """What is fetched once a round, before anything is asked for."""
        public, first = self.delivery.read_params(params), links.each[0]
        where = first.device, first.round, place
        top = fetch_top(*where, (public.num_keys, public.root), links.traffic)
        path = query_path(known.id, place, self.delivery)
        return _Table(self._client(links, path, params), top)

    def _agreed(
        self, links: ServerLinks, known: KnownRound, place: int
    ) -> tuple[bytes, PublicTable]:
        """Params of all servers that are those of the table of the manifest."""
        info = known.manifest.tables[place]
        limit = known.max_keys(place, self.max_keys)
        if limit is None and not self.others:
            raise not_padded(info.name, "keys queries of")
        path = query_path(known.id, place, self.delivery)
        params = links.params(path, self.delivery, _longest_params(known, info))
        public = self.delivery.read_params(params)
        row_bytes = info.record_bytes + path_bytes(info.num_keys)
        about = name_table(known.id, place), digest_of(known.id), root_of_table(info) or public.root
        numbers = info.num_keys, row_bytes, public.max_keys
        if replace(public, popular=None) != PublicTable(*about, *numbers):
            raise StaleError(
                "the params of private retrieval are not those of the round: got "
                f"{public.num_keys} rows of {public.row_bytes} bytes, or another round; "
                f"expected {info.num_keys} rows of {row_bytes} bytes of round "
                f"{known.id}; check the URLs of the servers"
            )
        if limit is not None and public.max_keys != limit:
            raise ServiceError(
                f"queries of table {info.name!r} are to be padded to another number of keys: got "
                f"{public.max_keys} keys; expected {limit} keys, as the round says or the device "
                "was told; check --pir-keys at the servers, and max_keys on the device"
            )
        if public.popular != popular_of_table(self.delivery, known.manifest, info, numbers[-1]):
            raise StaleError(
                f"popular keys of table {info.name!r} are not those of the round: got others; "
                "expected those that the manifest says; check the URLs of the servers"
            )
        return params, public

    def _refuse_long(self, params: Sequence[bytes], limit: int) -> None:
        """Refuses messages that a device cannot hold, before one is made or asked for: all are held
        at once, and params are what servers say, who can say anything."""
        lengths = [self.delivery.lengths(each) for each in params]
        refuse_longer("the whole of all private queries", sum(e.query for e in lengths), limit)
        refuse_longer("the whole of all private replies", sum(e.reply for e in lengths), limit)
        refuse_longer("the whole of all private hints", sum(e.hint for e in lengths), limit)

    def _client(
        self, links: ServerLinks, path: str, params: bytes
    ) -> SelectClient[KeyArray, Retrieved]:
        """A client with its hint, which is fetched until it is the one that the params cover."""
        length = self.delivery.lengths(params).hint
        if not length:
            return self.delivery.client(params)
        made: list[SelectClient[KeyArray, Retrieved]] = []

        def check(body: memoryview) -> None:
            try:
                made.append(self.delivery.client(params, bytes(body)))
            except ProtocolError as error:
                raise DamageError(
                    f"a hint was damaged: got {error.got}; expected {error.allowed}; {error.fix}"
                ) from error

        hint = links.each[0].get(f"{path}/hint", length, check).body
        links.traffic.requests += 1
        links.traffic.bytes_down += len(hint)
        return made[-1]


def fetch_top(
    device: Device,
    round: Assignment | str,
    place: int,
    bound: tuple[int, bytes],
    traffic: FetchTraffic,
) -> Top:
    """Returns the top of a table, fetched until it is that of its number of keys and root.

    Raises:
        DamageError: it is another one, time and again.
    """
    made: list[Top] = []

    def check(body: memoryview) -> None:
        try:
            made.append(Top.of(*bound, bytes(body)))
        except StaleError as error:
            raise DamageError(
                f"the top of a table was damaged: got {error.got}; expected {error.allowed}; "
                f"{error.fix}"
            ) from error

    path, token = top_path(device.known(round).id, place), device.token_for(round)
    got = device.client.get(path, token=token, limit=top_bytes(bound[0]), check=check)
    traffic.requests += 1
    traffic.bytes_down += len(got.body)
    return made[-1]


def submodel_of(
    known: KnownRound, parts: Sequence[Retrieved], chosen: KeysBySpace, traffic: FetchTraffic
) -> Submodel:
    """Returns the sub-model without keys of which a row is missing, in no place or wrong."""
    records, left = keep_retrieved(known.layout, parts, chosen)
    wrong = sum(part.wrong for part in parts)
    return Submodel(known.assemble(records, left), left, traffic, wrong)


_LAGS = 0.5, 1.0, 2.0, 4.0
"""Seconds between looks at a second service that does not have the round yet: a copy lags behind,
and the first service has just begun the round."""


def _joined(second: Device, round_id: str) -> Assignment | str:
    """How the second service knows this device in a round."""
    if second.token_for(round_id) is None:
        return round_id
    told = second.check_in()
    for seconds in _LAGS:
        if second.stop.is_set() or not (isinstance(told, Wait) or told.round != round_id):
            break
        second.clock.sleep(seconds)
        told = second.check_in()
    if isinstance(told, Wait) or told.round != round_id:
        got = "another round, or none" if isinstance(told, Wait) else f"round {told.number}"
        raise StaleError(
            "the second service does not let this device take part in the round: got "
            f"{got}; expected round {round_id}; wait until it has the round, and "
            "check the token for it"
        )
    return told


def _set_up_wrongly(got: str) -> ServiceError:
    return ServiceError(
        f"the servers are not set up alike: got {got}; expected private retrieval with the same "
        "settings at every server; check the URLs, and --pir and --pir-keys at each"
    )


def _differ(got: str) -> StaleError:
    return StaleError(
        f"the servers do not hold the same slices: got {got}; expected the same round, slices and "
        "settings at every server; wait until the round is at all of them; else check --pir-keys "
        "at each"
    )
