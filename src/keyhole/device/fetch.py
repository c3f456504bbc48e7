"""Asks for slices with one query for all tables, resumes a cut answer, and checks the records.

A cut answer is not lost: records that arrived whole are kept, and only the rest is asked for. What
came in pieces is checked as one, by the proof that came first, against the root in the manifest.

A sub-model is assembled from the records of its slices as the manifest lays it out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.crypto.merkle import HashArray, hash_leaves
from keyhole.delivery.records import RecordArray, Records
from keyhole.errors import (
    DamageError,
    InputError,
    KeySpaceError,
    NotFoundError,
    RequestError,
)
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import ClientKeys, Layout
from keyhole.wire.http import OCTETS, HttpClient, Received
from keyhole.wire.manifest import (
    Manifest,
    SegmentInfo,
    TableInfo,
    check_records,
    count_nodes,
    keys_of_round,
)
from keyhole.wire.messages import (
    MAX_BLOCKS,
    Answer,
    Ask,
    decode_answer,
    encode_query,
    max_answer_bytes,
    names_of,
)
from keyhole.wire.settings import SUM_SETTING, evaluates_of
from keyhole.wire.sockets import refuse_longer

_ALIGNED = 8  # bytes of the longest number that a record holds


@dataclass(frozen=True)
class Held:
    """What a device holds of the records it wants."""

    records: RecordArray  # (m, record_bytes); those it does not hold are zeros
    leaves: HashArray  # (m, 32), likewise
    is_held: NDArray[np.bool_]  # (m,)


@dataclass(frozen=True)
class Want:
    """What a device wants of one table."""

    table: int
    info: TableInfo
    keys: NDArray[np.int64]  # (m,)
    held: Held | None = None  # what need not be sent if it has not changed

    @property
    def record_bytes(self) -> int:
        """The number of bytes of each record."""
        return self.info.record_bytes

    def __repr__(self) -> str:
        """Keys may be private: printing shows how many there are."""
        return f"Want(table {self.table}, {len(self.keys)} keys)"


@dataclass(frozen=True)
class Slices:
    """The records of one table, checked: (m, record_bytes), and their leaves, (m, 32)."""

    records: RecordArray
    leaves: HashArray

    @staticmethod
    def of(records: RecordArray) -> Slices:
        """Records with their leaves."""
        return Slices(records, hash_leaves(records))


@dataclass
class FetchTraffic:
    """What fetching has cost so far: bytes of bodies, and records that need not be sent."""

    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    reused: int = 0


def fetch_slices(
    client: HttpClient,
    round_id: str,
    wants: Sequence[Want],
    *,
    token: str | None,
    max_keys: int,
    max_bytes: int,
    traffic: FetchTraffic,
) -> list[Slices]:
    """Returns the records of each want, in order."""
    for want in wants:
        refuse_longer("a slice", want.record_bytes if len(want.keys) else 0, max_bytes)
    path = f"/v1/rounds/{round_id}/slices"
    found: list[list[Slices]] = [[] for _ in wants]
    for batch in _batches(wants, max_keys, max_bytes):
        asked = [want for _, want in batch]
        if any(len(want.keys) for want in asked):
            pieces = _fetch(client, path, asked, token, traffic)
        else:  # of no keys there is nothing to ask
            pieces = [Slices.of(np.empty((0, w.record_bytes), np.uint8)) for w in asked]
        for (place, _), piece in zip(batch, pieces, strict=True):
            found[place].append(piece)
    return [pieces[0] if len(pieces) == 1 else _joined(pieces) for pieces in found]


def _fetch(
    client: HttpClient, path: str, wants: Sequence[Want], token: str | None, traffic: FetchTraffic
) -> list[Slices]:
    """One query, until its answer is whole and right."""
    attempts = client.attempts(f"POST {path}")
    so_far = _SoFar(wants)
    while True:
        asks = so_far.asks
        limit = max_answer_bytes(asks, so_far.record_bytes, so_far.nodes)
        body = encode_query(asks)
        headers = {"content-type": OCTETS}
        got = client.exchange("POST", path, body, headers=headers, token=token, limit=limit)
        traffic.requests += 1
        traffic.bytes_up += len(body)
        traffic.bytes_down += len(got.body)
        try:
            got_further = so_far.add(got)
            if so_far.is_whole:
                slices = so_far.checked()
                traffic.reused += so_far.reused
                return slices
        except DamageError as error:
            # What the device held may be what is damaged: it is not used a second time.
            so_far = _SoFar([replace(want, held=None) for want in wants])
            attempts.failed("damage", error=error)
            continue
        if got_further:
            attempts.got_further()
        attempts.failed(got.problem, got.after)


class _SoFar:
    """What has arrived of an answer.

    Every want is a block; `at` is how many keys of a block are settled: their record has arrived,
    or is held. What is asked for next is everything behind that, without the proof once it is here:
    it is for all keys of the block.
    """

    def __init__(self, wants: Sequence[Want]) -> None:
        self._wants = wants
        self.record_bytes = {want.table: want.record_bytes for want in wants}
        self._at = [0] * len(wants)
        self._sent: list[list[Answer]] = [[] for _ in wants]
        self._nodes = [count_nodes(want.info, want.keys) for want in wants]
        self._proofs: list[HashArray | None] = [None] * len(wants)
        self._left = list(range(len(wants)))  # places of the blocks that are asked for

    @property
    def asks(self) -> list[Ask]:
        """What is left to be asked for."""
        asks = []
        for place in self._left:
            want, at = self._wants[place], self._at[place]
            names = None if want.held is None else names_of(want.held.leaves[at:])
            asks.append(Ask(want.table, want.keys[at:], names, self._proofs[place] is None))
        return asks

    @property
    def nodes(self) -> list[int]:
        """How many nodes come before each block that is left."""
        return [self._nodes[i] if self._proofs[i] is None else 0 for i in self._left]

    @property
    def is_whole(self) -> bool:
        """Whether everything has arrived."""
        return not self._left

    @property
    def reused(self) -> int:
        """How many records were not sent."""
        return sum(int(np.sum(~answer.is_sent)) for sent in self._sent for answer in sent)

    def add(self, got: Received) -> bool:
        """Takes what has arrived, whole or cut; returns whether that settled any key."""
        if got.status != 200:
            if not got.problem:
                raise _damaged(f"status {got.status}")
            return False
        if got.problem and not got.body:
            return False  # the cut may be in the headers: what they say is not to be used
        answers = decode_answer(
            got.body, self.asks, self.record_bytes, self.nodes, is_cut=bool(got.problem)
        )
        before = sum(self._at)
        for place, answer in zip(self._left, answers, strict=False):  # a cut may leave out some
            self._sent[place].append(answer)
            self._at[place] += len(answer.is_sent)
            if self._proofs[place] is None:
                self._proofs[place] = answer.proof
        arrived, rest = self._left[: len(answers)], self._left[len(answers) :]
        self._left = [i for i in arrived if not self._is_settled(i)] + rest
        return sum(self._at) > before

    def _is_settled(self, place: int) -> bool:
        is_proven = self._proofs[place] is not None
        return is_proven and self._at[place] == len(self._wants[place].keys)

    def checked(self) -> list[Slices]:
        """Returns the records, once everything has arrived."""
        slices = [self._joined(place) for place in range(len(self._wants))]
        for want, found, proof in zip(self._wants, slices, self._proofs, strict=True):
            assert proof is not None
            check_records(want.info, want.keys, found.leaves, proof)
        return slices

    def _joined(self, place: int) -> Slices:
        """The records of one block from what was sent and what is held."""
        want, answers = self._wants[place], self._sent[place]
        if len(answers) == 1 and answers[0].is_sent.all():
            return Slices.of(_aligned(answers[0].records))
        is_sent = np.concatenate([a.is_sent for a in answers]) if answers else np.zeros(0, bool)
        records = np.empty((len(want.keys), want.record_bytes), np.uint8)
        if want.held is not None:
            if not want.held.is_held[~is_sent].all():
                raise _damaged("fewer records than the device lacks")
            records[~is_sent] = want.held.records[~is_sent]
        if answers:
            records[is_sent] = np.concatenate([a.records for a in answers])
        return Slices.of(records)


def _aligned(records: RecordArray) -> RecordArray:
    """Records at a place in memory where numbers may lie; behind other records they may not."""
    place: int = records.__array_interface__["data"][0]
    return records.copy() if place % _ALIGNED else records


def _batches(
    wants: Sequence[Want], max_keys: int, max_bytes: int
) -> Iterator[list[tuple[int, Want]]]:
    """The queries that ask for everything: (place, want) of each block; one, as a rule."""
    batch: list[tuple[int, Want]] = []
    keys, room = max_keys, max_bytes  # that are left for the query under way
    for place, want in enumerate(wants):
        at, is_done = 0, False
        while not is_done:
            fits = min(keys, room // max(want.record_bytes, 1))
            if batch and (fits < 1 or len(batch) == MAX_BLOCKS):
                yield batch
                batch, keys, room = [], max_keys, max_bytes
                continue
            stop = min(len(want.keys), at + max(fits, 1))
            batch.append((place, _piece(want, at, stop)))
            keys, room = keys - (stop - at), room - (stop - at) * want.record_bytes
            at, is_done = stop, stop == len(want.keys)
    if batch:
        yield batch


def _piece(want: Want, start: int, stop: int) -> Want:
    if (start, stop) == (0, len(want.keys)):
        return want
    held = want.held
    if held is not None:
        held = Held(held.records[start:stop], held.leaves[start:stop], held.is_held[start:stop])
    return replace(want, keys=want.keys[start:stop], held=held)


def _joined(pieces: Sequence[Slices]) -> Slices:
    return Slices(
        np.concatenate([piece.records for piece in pieces]),
        np.concatenate([piece.leaves for piece in pieces]),
    )


def _damaged(what: str) -> DamageError:
    return DamageError(
        f"slices were damaged: got {what}; expected the records that the round was published with; "
        "fetch them again; if it happens every time, the service's files are damaged"
    )


@dataclass(frozen=True, repr=False)
class Submodel:
    """What a device received of a model."""

    model: Tree
    keys: Mapping[str, Keys]
    traffic: FetchTraffic
    wrong: int = 0  # rows that were not those of the round: a private fetch does without them
    is_told: bool = False  # whether the service was told the keys
    frozen: Tree | None = None  # leaves that are not trained, where the round has some

    def __repr__(self) -> str:
        return f"Submodel({_counts(self.keys)}, {self.traffic.bytes_down} bytes received)"


@dataclass(frozen=True, repr=False)
class KnownRound:
    """A round whose manifest is here: what its tables hold, and how a model is made of them."""

    id: str
    manifest: Manifest

    def __repr__(self) -> str:
        return f"KnownRound({self.id}, {len(self.manifest.tables)} tables)"

    @cached_property
    def records(self) -> tuple[Records, ...]:
        """What the records of each table hold."""
        return tuple(table.records for table in self.manifest.tables)

    @cached_property
    def trained(self) -> int:
        """How many tables hold what is trained; those of frozen leaves come after them."""
        return len(self.manifest.trained)

    @cached_property
    def frozen_layout(self) -> Layout | None:
        """The leaves that are not trained, and their cuts."""
        return self.manifest.frozen_layout

    @cached_property
    def layout(self) -> Layout:
        """The model and its cuts."""
        layout = self.manifest.layout
        if layout is None:
            raise InputError(
                f"round {self.id} does not hold a model that is cut: got tables of select "
                "functions; expected tables of a model; fetch its slices table by table, with "
                "fetch_slices"
            )
        return layout

    def table(self, name: str) -> int:
        """Returns the place of a table."""
        names = [table.name for table in self.manifest.tables]
        if name not in names:
            raise NotFoundError(
                f"round {self.id} has no such table: got {name!r}; expected {', '.join(names)}; "
                "name one of them"
            )
        return names.index(name)

    def segment(self, table: int, place: int) -> SegmentInfo:
        """Returns a segment of a table."""
        info = self.manifest.tables[table]
        if not 0 <= place < len(info.segments):
            allowed = f"0..{len(info.segments) - 1}" if info.segments else "none"
            raise NotFoundError(
                f"table {info.name!r} of round {self.id} has no such segment: got "
                f"{place}; expected {allowed}; name one of them, or ask for slices "
                "with fetch_slices"
            )
        return info.segments[place]

    def max_keys(self, place: int, told: Mapping[str, int]) -> int | None:
        """Keys that every device asks for of a table, padding included: what the operators have
        `told` of it by name, else what the round says; None where neither says."""
        info = self.manifest.tables[place]
        if info.name in told:
            return min(told[info.name], info.num_keys)
        return keys_of_round(self.manifest, info)

    def keys_of_table(self, place: int, keys: Any) -> Keys:
        """Returns the keys of one table, checked."""
        table = self.manifest.tables[place]
        return KeySpace(table.name, table.num_keys).keys(keys)

    def sent_as(self, keys: Mapping[str, Any] | ClientKeys) -> tuple[Layout, dict[str, Keys]]:
        """Returns the layout of what devices send, and under which keys: the sub-model's, or none
        where the round measures."""
        evaluates = evaluates_of(self.manifest.settings)
        if evaluates is not None:
            return evaluates.layout, {}
        return self.layout, self.keys_by_space(keys)

    def keys_by_space(self, keys: Mapping[str, Any] | ClientKeys) -> dict[str, Keys]:
        """Returns a device's keys by key space, checked; given by name, or as `Keys`."""
        if not isinstance(keys, Mapping):
            return self.layout.keys_by_space(keys)
        names = {space.name for space in self.layout.spaces}
        if keys.keys() != names:
            raise KeySpaceError(
                f"keys do not match the cuts: got {', '.join(sorted(keys)) or 'none'}; expected "
                f"{', '.join(sorted(names)) or 'none'}; pass keys of each key space of the manifest"
            )
        given = {name: z.array if isinstance(z, Keys) else z for name, z in keys.items()}
        return {space.name: space.keys(given[space.name]) for space in self.layout.spaces}

    def assemble(self, records: Sequence[RecordArray], keys: Mapping[str, Keys]) -> Tree:
        """Returns the sub-model from the records of each part, in the order of
        `part.keys_of(keys)`."""
        leaves: dict[str, Array] = {}
        tables = self.records[: self.trained]
        for part, table, found in zip(self.layout.parts, tables, records, strict=True):
            counts = [len(keys[factor.name]) for factor in part.product.factors]
            leaves |= part.from_rows(table.decode_rows(found), counts)
        return tree.unflatten(self.layout.structure, leaves)


def not_padded(table: str, what: str) -> InputError:
    """Returns the error where nobody says how many keys of a table every device asks for."""
    return InputError(
        f"it is not known to how many {what} table {table!r} are padded: got a round that does not "
        "say how many keys a client chooses; expected keys_per_client in the settings of the "
        "round, or a number for the table; publish it with them, or pass max_keys"
    )


@dataclass(frozen=True, repr=False)
class WholeModel:
    """A round that a device has downloaded whole: it selects at home, and nobody learns a key."""

    round: KnownRound
    tables: tuple[RecordArray, ...]  # the records of each, (K, record_bytes)
    traffic: FetchTraffic

    def __repr__(self) -> str:
        size = sum(table.nbytes for table in self.tables)
        return f"WholeModel(round {self.round.id}, {len(self.tables)} tables, {size} bytes)"

    def select(self, keys: Mapping[str, Any] | ClientKeys) -> Submodel:
        """Returns the sub-model of any keys; costs no further traffic."""
        chosen = self.round.keys_by_space(keys)
        places = [part.keys_of(chosen).array for part in self.round.layout.parts]
        records = [table[z] for table, z in zip(self.tables, places, strict=True)]
        return Submodel(self.round.assemble(records, chosen), chosen, self.traffic)

    def slices(self, table: str, keys: Any) -> dict[str, Array]:
        """Returns the slices of any keys of one table, path -> (m, *shape)."""
        place = self.round.table(table)
        z = self.round.keys_of_table(place, keys).array
        return self.round.records[place].decode(self.tables[place][z])


def _counts(keys: Mapping[str, Keys]) -> str:
    return ", ".join(f"{len(z)} of {name!r}" for name, z in keys.items()) or "nothing selected"


def refuse_unbound(manifest: Manifest, places: Sequence[int]) -> None:
    """Raises RequestError where slices without a root would be trained on for a secure sum: their
    service could give each device others, until the sum is one device's update."""
    if SUM_SETTING in manifest.settings and not all(manifest.tables[i].root for i in places):
        raise RequestError(
            "slices of this round are bound to nothing: got a table without a root, and a secure "
            "sum; expected tables that were published; nothing was fetched; publish the round "
            "with `keyhole train --devices`"
        )
