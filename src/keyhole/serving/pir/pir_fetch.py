"""Private fetching on a device: its sub-model by retrieval that hides which slices it takes.

Each table that is cut takes one question, padded to a public maximum, whatever the device wants of
it: nothing, a few keys, or one key many times. What every device receives is fetched plainly. A
table of which every device may take every slice is downloaded whole.

Hidden is what is fetched. The update that a device sends afterwards carries its keys in the clear,
unless it is aggregated in a private way too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from keyhole.delivery.assembly import keep_found
from keyhole.delivery.records import RecordArray
from keyhole.errors import DamageError, ProtocolError, StaleError
from keyhole.private.pir.retrieval import Asker, Retrieved
from keyhole.private.pir.terms import Scheme, Terms
from keyhole.serving.coordinator import Wait
from keyhole.serving.device.assembly import KnownRound, Submodel
from keyhole.serving.device.device import Assignment, Device, DeviceKeys
from keyhole.serving.device.partial_body import refuse_longer
from keyhole.serving.device.segment_download import download_table
from keyhole.serving.device.slice_query import Traffic
from keyhole.serving.pir.lines import Line, Lines, Target
from keyhole.serving.pir.schemes import lengths_of, name_table, open_asker
from keyhole.types import KeyArray

__all__ = ["OneServerFetch", "PirFetch"]


@dataclass(frozen=True)
class PirFetch:
    """Fetches from two servers, neither of which learns a key unless they collude.

    Called as `Device.fetch` is: the device speaks to server 0, `second` to server 1. Tokens of one
    service are never shown to the other: where the second asks for tokens, `second` has one of its
    own and checks in there.

    Args:
        second: a device of the second service.
        scheme: that both services offer.
    """

    second: Device
    scheme: Scheme = "two-server"

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; see `Device.fetch`.

        A key that found no place in a query, which is rare, is missing in `Submodel.keys`; nobody
        but the device knows.

        Raises:
            KeySpaceError: keys do not fit the round, or are more than a query holds.
            StaleError: both servers do not hold the same slices.
            IntegrityError: a server lies or is damaged.
            ServiceError, RequestError: no usable answer.
        """
        known = device.known(round)
        lines = [Line(device, round), Line(self.second, _joined(self.second, known.id))]
        return _fetch(lines, known, keys, self.scheme, lambda _, path, terms: open_asker(terms))


@dataclass
class OneServerFetch:
    """Fetches from one server, which learns no key if learning with errors is hard.

    Called as `Device.fetch` is. The hint of a table, some megabytes, is fetched once a round.
    """

    _askers: dict[bytes, Asker] = field(default_factory=dict, repr=False)

    def __call__(self, device: Device, round: Assignment | str, keys: DeviceKeys) -> Submodel:
        """Returns the sub-model of keys; as `PirFetch` does."""
        known, used = device.known(round), dict(self._askers)
        self._askers = {}  # those of another round go

        def ask(lines: Lines, path: str, terms: Terms) -> Asker:
            asker = used.get(terms.digest) or _with_hint(lines, path, terms)
            self._askers[terms.digest] = asker
            return asker

        return _fetch([Line(device, round)], known, keys, "one-server", ask)


def _fetch(
    each: list[Line],
    known: KnownRound,
    keys: DeviceKeys,
    scheme: Scheme,
    ask: Callable[[Lines, str, Terms], Asker],
) -> Submodel:
    """A sub-model from one question for each table that is cut."""
    chosen, traffic = known.keys_by_space(keys), Traffic()
    wanted = [part.keys_of(chosen).array for part in known.layout.parts]
    with ThreadPoolExecutor(len(each)) as pool:
        lines = Lines(each, pool, traffic)
        found = _retrieve(lines, known, wanted, scheme, ask)
    records = [found[place].records for place in range(len(wanted))]
    is_found = [found[place].is_found for place in range(len(wanted))]
    records, left = keep_found(known.layout, records, is_found, chosen)
    return Submodel(known.assemble(records, left), left, traffic)


def _retrieve(
    lines: Lines,
    known: KnownRound,
    wanted: Sequence[KeyArray],
    scheme: Scheme,
    ask: Callable[[Lines, str, Terms], Asker],
) -> dict[int, Retrieved]:
    """The records of each table; no question is sent before the keys of all are checked."""
    device, round = lines.each[0].device, lines.each[0].round
    found, questions, public = {}, [], []
    for place, z in enumerate(wanted):
        info = known.manifest.tables[place]
        if not info.factors:
            public.append(place)
            continue
        if not info.record_bytes:  # nothing to ask for, and nobody is to learn by whom
            found[place] = _whole_find(np.empty((len(z), 0), np.uint8))
            continue
        path = f"/v1/rounds/{known.id}/tables/{place}/pir/{scheme}"
        terms = _checked(lines.terms(path), known, place, scheme)
        if terms.most_keys == terms.num_keys and info.segments:
            found[place] = _whole_find(_download(lines, known, place)[z])
            continue
        target = Target(path, ask(lines, path, terms), lengths_of(terms), z)
        questions.append((place, target, target.asker.ask(z)))
    for place, target, question in questions:
        found[place] = lines.retrieve(target, question)
    for place in public:
        asked = [(place, wanted[place])]
        (got,) = device.fetch_records(round, asked, lines.traffic)
        found[place] = _whole_find(got.records)
    return found


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
        most_bytes=first.device.most_answer,
        traffic=lines.traffic,
    )


def _checked(terms: Terms, known: KnownRound, place: int, scheme: Scheme) -> Terms:
    """Terms that are those of the table of the manifest; raises StaleError."""
    info = known.manifest.tables[place]
    told = terms.scheme, terms.round, terms.num_keys, terms.record_bytes
    if told != (scheme, name_table(known.id, place), info.num_keys, info.record_bytes):
        raise StaleError(
            "the terms of private retrieval are not those of the round",
            got=f"{terms.num_keys} slices of {terms.record_bytes} bytes, or another round",
            allowed=f"{info.num_keys} slices of {info.record_bytes} bytes of round {known.id}",
            fix="check the URLs of the servers",
        )
    return terms


def _with_hint(lines: Lines, path: str, terms: Terms) -> Asker:
    """An asker with its hint, which is fetched until it is the one that the terms cover."""
    line, length = lines.each[0], lengths_of(terms).hint
    refuse_longer("a hint", length, line.device.most_answer)
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
