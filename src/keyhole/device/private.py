"""Fetches a sub-model on a device by private queries, which hide the slices it takes.

Each table that is cut takes one query, padded to a public maximum, whatever the device wants of
it: nothing, a few keys, or one key many times. What every device receives is fetched plainly. A
table of which every device may take every slice is downloaded whole.

Hidden is what is fetched. The update that a device sends afterwards carries its keys in the clear,
unless it is aggregated in a private way too.

The maximum is what the round says that a client chooses, or a number that the device was given. A
server that named each device another one could find out how many keys it has, by whether it fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.delivery.exchange import Retrieval, Retrieved, SelectClient, retrieve
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.way import PirDelivery
from keyhole.delivery.records import RecordArray, keep_found
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import FetchTraffic, KnownRound, Submodel
from keyhole.device.links import Lines, ServerLine, TableLinks, Target
from keyhole.device.segments import download_table
from keyhole.errors import DamageError, InputError, ProtocolError, ServiceError, StaleError
from keyhole.wire.assignment import Wait
from keyhole.wire.manifest import TableInfo
from keyhole.wire.private import keys_of_round, name_table
from keyhole.wire.sockets import refuse_longer


@dataclass
class PirFetch:
    """Fetches by private queries to the servers of a delivery, none of which learns a key under
    what the delivery rests on.

    Called as `Device.fetch` is: the device speaks to the first server, `others` to the others.
    Tokens of one service are never shown to another: where one of the others asks for tokens, its
    device has one of its own and checks in there. A hint, some megabytes, is fetched once a round.

    Args:
        delivery: which one.
        others: devices of the further services, in their order.
        max_keys: table -> keys of every query, from the operators; for other tables it is what the
            round says. Where neither says, what several services name alike is taken: as long as
            one of them is honest, it is the same for all devices. One service alone says both: only
            a number that was given otherwise is known to be the same for all devices.

    Raises:
        InputError: not as many devices as the delivery has servers.
    """

    delivery: PirDelivery
    others: tuple[Device, ...] = ()
    max_keys: Mapping[str, int] = field(default_factory=dict)
    _clients: dict[bytes, SelectClient[KeyArray, Retrieved]] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        needed = self.delivery.about.servers
        if len(self.others) != needed - 1:
            raise InputError(
                f"{self.delivery.about.name} is fetched from another number of servers",
                got=f"{1 + len(self.others)} servers",
                allowed=f"{needed} servers",
                fix="pass one device for each server beside the first",
            )

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        A key that found no place in a query, which is rare, is missing in `Submodel.keys`; nobody
        but the device knows.

        Raises:
            InputError: neither the round nor `max_keys` says how many keys a query has, and there
                is one server.
            KeySpaceError: keys do not fit the round, or are more than a query holds.
            StaleError: the servers do not hold the same slices.
            IntegrityError: a server lies or is damaged. All tables have been asked by then.
            ServiceError: no usable answer; servers that pad queries to another number of keys; or
                messages of more than `max_answer` bytes. Then nothing was asked for, and nothing
                made. A query takes some ten times the memory of its messages while it is made.
            RequestError: a server refuses.
        """
        known = device.known(round)
        each = [
            ServerLine(device, round),
            *(ServerLine(one, _joined(one, known.id)) for one in self.others),
        ]
        used, self._clients = self._clients, {}  # those of another round go
        chosen, traffic = known.keys_by_space(keys), FetchTraffic()
        wanted = [part.keys_of(chosen).array for part in known.layout.parts]
        with ThreadPoolExecutor(len(each)) as pool:
            found = self._retrieve(Lines(each, pool, traffic), known, wanted, used)
        records = [found[place].records for place in range(len(wanted))]
        is_found = [found[place].is_found for place in range(len(wanted))]
        records, left = keep_found(known.layout, records, is_found, chosen)
        return Submodel(known.assemble(records, left), left, traffic)

    def _retrieve(
        self,
        lines: Lines,
        known: KnownRound,
        wanted: Sequence[KeyArray],
        used: Mapping[bytes, SelectClient[KeyArray, Retrieved]],
    ) -> dict[int, Retrieved]:
        """The records of each table; no query is sent before the keys of all are checked."""
        device, round = lines.each[0].device, lines.each[0].round
        tables, found = known.manifest.tables, {}
        for place, z in enumerate(wanted):
            if tables[place].factors and not tables[place].record_bytes:
                # Nothing to ask for, and nobody is to learn by whom.
                found[place] = Retrieved.whole(np.empty((len(z), 0), np.uint8))
        cut = [at for at, table in enumerate(tables) if table.factors and table.record_bytes]
        agreed = {place: self._agreed(lines, known, place) for place in cut}
        whole = [at for at, params in agreed.items() if _is_whole(params, tables[at])]
        hidden = {place: params for place, params in agreed.items() if place not in whole}
        self._refuse_long(list(hidden.values()), device.max_answer)
        for place in whole:
            found[place] = Retrieved.whole(_download(lines, known, place)[wanted[place]])
        wants, targets = [], []
        for place, params in hidden.items():
            path = self._path(known, place)
            client = used.get(params.digest) or self._client(lines, path, params)
            self._clients[params.digest] = client
            wants.append(Retrieval(client, wanted[place]))
            targets.append(Target(path, self.delivery.lengths(params).reply))
        found |= zip(hidden, retrieve(wants, TableLinks(lines, targets)), strict=True)
        for place in [place for place, table in enumerate(tables) if not table.factors]:
            (got,) = device.fetch_records(round, [(place, wanted[place])], lines.traffic)
            found[place] = Retrieved.whole(got.records)
        return found

    def _path(self, known: KnownRound, place: int) -> str:
        return f"/v1/rounds/{known.id}/tables/{place}/pir/{self.delivery.scheme}"

    def _max_keys(self, known: KnownRound, place: int) -> int | None:
        """Keys of a query; None where only the servers say."""
        info = known.manifest.tables[place]
        told = self.max_keys.get(info.name)
        told = keys_of_round(known.manifest, info) if told is None else min(told, info.num_keys)
        if told is None and not self.others:
            raise InputError(
                f"it is not known to how many keys queries of table {info.name!r} are padded",
                got="a round that does not say how many keys a client chooses",
                allowed="keys_per_client in the settings of the round, or a number for the table",
                fix="publish it with them, or pass max_keys",
            )
        return told

    def _agreed(self, lines: Lines, known: KnownRound, place: int) -> PirParams:
        """Params of all servers that are those of the table of the manifest.

        Raises:
            StaleError: they are those of something else.
            ServiceError: queries are to be padded otherwise, in every later round too.
        """
        info, limit = known.manifest.tables[place], self._max_keys(known, place)
        params = lines.params(self._path(known, place))
        told = params.scheme, params.round, params.num_keys, params.record_bytes
        name = name_table(known.id, place)
        if told != (self.delivery.scheme, name, info.num_keys, info.record_bytes):
            raise StaleError(
                "the params of private retrieval are not those of the round",
                got=f"{params.num_keys} slices of {params.record_bytes} bytes, or another round",
                allowed=f"{info.num_keys} slices of {info.record_bytes} bytes of round {known.id}",
                fix="check the URLs of the servers",
            )
        if limit is not None and params.max_keys != limit:
            raise ServiceError(
                f"queries of table {info.name!r} are to be padded to another number of keys",
                got=f"{params.max_keys} keys",
                allowed=f"{limit} keys, as the round says or the device was told",
                fix="check --pir-keys at the servers, and max_keys on the device",
            )
        return params

    def _refuse_long(self, params: Sequence[PirParams], limit: int) -> None:
        """Refuses messages that a device cannot hold, before one is made or asked for.

        All of them are held at once; params are what servers say, and can say anything.

        Raises:
            ServiceError: those of one kind have more than `limit` bytes together.
        """
        lengths = [self.delivery.lengths(each) for each in params]
        totals = {
            "queries": sum(each.query for each in lengths),
            "replies": sum(each.reply for each in lengths),
            "hints": sum(each.hint for each in lengths),
        }
        for what, total in totals.items():
            refuse_longer(f"the whole of all private {what}", total, limit)

    def _client(
        self, lines: Lines, path: str, params: PirParams
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
                    "a hint was damaged", got=error.got, allowed=error.allowed, fix=error.fix
                ) from error

        hint = lines.each[0].get(f"{path}/hint", length, check).body
        lines.traffic.requests += 1
        lines.traffic.bytes_down += len(hint)
        return made[-1]


def _is_whole(params: PirParams, info: TableInfo) -> bool:
    """Whether every device may take every slice: a query would be no shorter than the table."""
    return params.max_keys == params.num_keys and bool(info.segments)


def _download(lines: Lines, known: KnownRound, place: int) -> RecordArray:
    """A whole table: where every slice may be asked for, a query would be no shorter."""
    first = lines.each[0]
    return download_table(
        first.device.client,
        known,
        place,
        token=first.device.token_for(first.round),
        max_bytes=first.device.max_answer,
        traffic=lines.traffic,
    )


def _joined(second: Device, round_id: str) -> Assignment | str:
    """How the second service knows this device in a round.

    Raises:
        StaleError: it has no such round, or not yet.
    """
    if second.token_for(round_id) is None:
        return round_id
    told = second.check_in()
    if isinstance(told, Wait) or told.round != round_id:
        raise StaleError(
            "the second service does not let this device take part in the round",
            got="another round, or none" if isinstance(told, Wait) else f"round {told.number}",
            allowed=f"round {round_id}",
            fix="wait until it has the round, and check the token for it",
        )
    return told
