"""Fetches a sub-model by private retrieval, which hides the slices that the device takes.

Each table that is cut takes one question, padded to a public maximum, whatever the device wants of
it: nothing, a few keys, or one key many times. What every device receives is fetched plainly. A
table of which every device may take every slice is downloaded whole.

Hidden is what is fetched. The update that a device sends afterwards carries its keys in the clear,
unless it is aggregated in a private way too.

The maximum is what the round says that a client chooses, or a number that the device was given. A
server that named each device another one could find out how many keys it has, by whether it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import KeyArray
from keyhole.delivery.pir.database import Scheme, Terms
from keyhole.delivery.pir.messages import Asker, Retrieved
from keyhole.delivery.records import RecordArray, keep_found
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import FetchTraffic, KnownRound, Submodel
from keyhole.device.links import Line, Lines, Target
from keyhole.device.segments import download_table
from keyhole.errors import DamageError, InputError, ProtocolError, ServiceError, StaleError
from keyhole.wire.assignment import Wait
from keyhole.wire.manifest import TableInfo
from keyhole.wire.private import keys_of_round, lengths_of, name_table, open_asker
from keyhole.wire.sockets import refuse_longer


@dataclass(frozen=True)
class PirFetch:
    """Fetches from two servers, neither of which learns a key unless they collude.

    Called as `Device.fetch` is: the device speaks to server 0, `second` to server 1. Tokens of one
    service are never shown to the other: where the second asks for tokens, `second` has one of its
    own and checks in there.

    Args:
        second: a device of the second service.
        scheme: that both services offer.
        max_keys: table -> keys of every query, from the operators; for other tables it is what
            the round says. Where neither says, what both services name alike is taken: as long as
            one of them is honest, it is the same for all devices.
    """

    second: Device
    scheme: Scheme = "two-server"
    max_keys: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        A key that found no place in a query, which is rare, is missing in `Submodel.keys`; nobody
        but the device knows.

        Raises:
            KeySpaceError: keys do not fit the round, or are more than a query holds.
            StaleError: both servers do not hold the same slices.
            IntegrityError: a server lies or is damaged. All tables have been asked by then.
            ServiceError: no usable answer; servers that pad queries to another number of keys; or
                messages of more than `max_answer` bytes. Then nothing was asked for, and nothing
                made. A question takes some ten times the memory of its messages while it is made.
            RequestError: a server refuses.
        """
        known = device.known(round)
        lines = [Line(device, round), Line(self.second, _joined(self.second, known.id))]
        rule = _Rule(self.scheme, self.max_keys)
        return _fetch(lines, known, keys, rule, lambda _, path, terms: open_asker(terms))


@dataclass
class OneServerFetch:
    """Fetches from one server, which learns no key if learning with errors is hard.

    Called as `Device.fetch` is. The hint of a table, some megabytes, is fetched once a round.

    Args:
        max_keys: table -> keys of every query, from the operator; for other tables it is what the
            round says. The one server says both: only a number that was given otherwise is known to
            be the same for all devices.
    """

    max_keys: Mapping[str, int] = field(default_factory=dict)
    _askers: dict[bytes, Asker] = field(default_factory=dict, repr=False)

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; as `PirFetch` does.

        Raises:
            InputError: neither the round nor `max_keys` says how many keys a query has.
        """
        known, used = device.known(round), dict(self._askers)
        self._askers = {}  # those of another round go

        def ask(lines: Lines, path: str, terms: Terms) -> Asker:
            asker = used.get(terms.digest) or _with_hint(lines, path, terms)
            self._askers[terms.digest] = asker
            return asker

        rule = _Rule("one-server", self.max_keys)
        return _fetch([Line(device, round)], known, keys, rule, ask)


@dataclass(frozen=True)
class _Rule:
    """What terms must say: the scheme, and the keys of a query where a device was told."""

    scheme: Scheme
    pinned: Mapping[str, int]

    def max_keys(self, known: KnownRound, place: int) -> int | None:
        """Keys of a query; None where only the servers say."""
        info = known.manifest.tables[place]
        told = self.pinned.get(info.name)
        told = keys_of_round(known.manifest, info) if told is None else min(told, info.num_keys)
        if told is None and self.scheme == "one-server":
            raise InputError(
                f"it is not known to how many keys queries of table {info.name!r} are padded",
                got="a round that does not say how many keys a client chooses",
                allowed="keys_per_client in the settings of the round, or a number for the table",
                fix="publish it with them, or pass max_keys",
            )
        return told


def _fetch(
    each: list[Line],
    known: KnownRound,
    keys: DeviceKeys,
    rule: _Rule,
    ask: Callable[[Lines, str, Terms], Asker],
) -> Submodel:
    """A sub-model from one question for each table that is cut."""
    chosen, traffic = known.keys_by_space(keys), FetchTraffic()
    wanted = [part.keys_of(chosen).array for part in known.layout.parts]
    with ThreadPoolExecutor(len(each)) as pool:
        lines = Lines(each, pool, traffic)
        found = _retrieve(lines, known, wanted, rule, ask)
    records = [found[place].records for place in range(len(wanted))]
    is_found = [found[place].is_found for place in range(len(wanted))]
    records, left = keep_found(known.layout, records, is_found, chosen)
    return Submodel(known.assemble(records, left), left, traffic)


def _retrieve(
    lines: Lines,
    known: KnownRound,
    wanted: Sequence[KeyArray],
    rule: _Rule,
    ask: Callable[[Lines, str, Terms], Asker],
) -> dict[int, Retrieved]:
    """The records of each table; no question is sent before the keys of all are checked."""
    device, round = lines.each[0].device, lines.each[0].round
    tables, found = known.manifest.tables, {}
    for place, z in enumerate(wanted):
        if tables[place].factors and not tables[place].record_bytes:
            # Nothing to ask for, and nobody is to learn by whom.
            found[place] = _whole_find(np.empty((len(z), 0), np.uint8))
    cut = [at for at, table in enumerate(tables) if table.factors and table.record_bytes]
    agreed = {place: _agreed(lines, known, place, rule) for place in cut}
    whole = [at for at, terms in agreed.items() if _is_whole(terms, tables[at])]
    hidden = {place: terms for place, terms in agreed.items() if place not in whole}
    _refuse_long(list(hidden.values()), device.max_answer)
    for place in whole:
        found[place] = _whole_find(_download(lines, known, place)[wanted[place]])
    targets = []
    for place, terms in hidden.items():
        path = _path(known, place, rule)
        targets.append(Target(path, ask(lines, path, terms), lengths_of(terms), wanted[place]))
    found |= zip(hidden, lines.retrieve(targets), strict=True)
    for place in [place for place, table in enumerate(tables) if not table.factors]:
        asked = [(place, wanted[place])]
        (got,) = device.fetch_records(round, asked, lines.traffic)
        found[place] = _whole_find(got.records)
    return found


def _is_whole(terms: Terms, info: TableInfo) -> bool:
    """Whether every device may take every slice: a query would be no shorter than the table."""
    return terms.max_keys == terms.num_keys and bool(info.segments)


def _refuse_long(terms: Sequence[Terms], limit: int) -> None:
    """Refuses messages that a device cannot hold, before one is made or asked for.

    All of them are held at once; terms are what servers say, and can say anything.

    Raises:
        ServiceError: those of one kind have more than `limit` bytes together.
    """
    lengths = [lengths_of(each) for each in terms]
    totals = {
        "queries": sum(each.query for each in lengths),
        "replies": sum(each.reply for each in lengths),
        "hints": sum(each.hint for each in lengths),
    }
    for what, total in totals.items():
        refuse_longer(f"the whole of all private {what}", total, limit)


def _path(known: KnownRound, place: int, rule: _Rule) -> str:
    return f"/v1/rounds/{known.id}/tables/{place}/pir/{rule.scheme}"


def _whole_find(records: RecordArray) -> Retrieved:
    return Retrieved(records, np.ones(len(records), bool))


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


def _agreed(lines: Lines, known: KnownRound, place: int, rule: _Rule) -> Terms:
    """Terms of all servers that are those of the table of the manifest.

    Raises:
        StaleError: they are those of something else.
        ServiceError: queries are to be padded otherwise, in every later round too.
    """
    info, limit = known.manifest.tables[place], rule.max_keys(known, place)
    terms = lines.terms(_path(known, place, rule))
    told = terms.scheme, terms.round, terms.num_keys, terms.record_bytes
    if told != (rule.scheme, name_table(known.id, place), info.num_keys, info.record_bytes):
        raise StaleError(
            "the terms of private retrieval are not those of the round",
            got=f"{terms.num_keys} slices of {terms.record_bytes} bytes, or another round",
            allowed=f"{info.num_keys} slices of {info.record_bytes} bytes of round {known.id}",
            fix="check the URLs of the servers",
        )
    if limit is not None and terms.max_keys != limit:
        raise ServiceError(
            f"queries of table {info.name!r} are to be padded to another number of keys",
            got=f"{terms.max_keys} keys",
            allowed=f"{limit} keys, as the round says or the device was told",
            fix="check --pir-keys at the servers, and max_keys on the device",
        )
    return terms


def _with_hint(lines: Lines, path: str, terms: Terms) -> Asker:
    """An asker with its hint, which is fetched until it is the one that the terms cover."""
    line, length = lines.each[0], lengths_of(terms).hint
    made: list[Asker] = []

    def check(body: memoryview) -> None:
        try:
            made.append(open_asker(terms, body))
        except ProtocolError as error:
            raise DamageError(
                "a hint was damaged", got=error.got, allowed=error.allowed, fix=error.fix
            ) from error

    hint = line.get(f"{path}/hint", length, check).body
    lines.traffic.requests += 1
    lines.traffic.bytes_down += len(hint)
    return made[-1]


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
