"""The two-phase union: first which keys anybody has, then a dense sum over these keys alone.

Phase 1 adds up, for every key, how many clients have it. The server announces the keys with a
count: the union. Phase 2 adds up vectors with one row for each key of the union. It sends fewer
bytes than a sketch and always decodes.

It is off by default because it leaks: a client that is counted in phase 1 and gone in phase 2
leaves the rows of its keys at zero where nobody else has them. The server reads off which keys one
or a few missing clients had; if one client dropped, whose they are. A least count takes the keys
out of the union that fewer clients have, and with them their updates, and leaves less to read off:
with a least count of t, keys that t clients share can still be told if all of them drop. It does
not close the leak: counts that the rows do not match remain. Sketches do not have this leak: they
ask each client once.

Apart from it, whoever adds up learns what a sketch tells: counts and sums of each key.

The two-phase union: first which keys anybody has, then a dense secure sum over these keys alone.

Off by default, because it leaks: see `private.secure_sum.union`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import Adding, PartSum, RingRows, Rounding, Summed, derived, withheld
from keyhole.aggregation.masked.method import MIN_CLIENTS, SecAggResult, run_secagg, stages_of
from keyhole.aggregation.masked.params import SecAggSettings
from keyhole.aggregation.masked.sketch import Decoded
from keyhole.arrays import Array, KeyArray
from keyhole.crypto.ring import RingArray
from keyhole.errors import InputError, KeySpaceError, MalformedError, ShapeError, ThresholdError

VectorSum: TypeAlias = Callable[[Mapping[int, Array]], Array]
"""Adds up vectors of one ring by client; those of clients that drop are not in the sum."""


@dataclass(frozen=True)
class UnionTerms:
    """The public facts of a two-phase sum.

    Args:
        num_keys: K.
        width: elements of a row.
        max_clients: how many clients are added at most.
        bits: of an element of the ring.
        min_count: how many clients must have a key for it to be in the union.
        allows_leak: must be True: the keys of clients that drop between the phases can be read off.

    Raises:
        InputError: the leak is not allowed, or a number is out of range.
    """

    num_keys: int
    width: int
    max_clients: int
    bits: Literal[16, 32] = 32
    min_count: int = 1
    allows_leak: bool = False

    def __post_init__(self) -> None:
        if self.allows_leak is not True:
            raise InputError(
                "a two-phase union leaks the keys of clients that drop between the phases",
                got=f"allows_leak={self.allows_leak}",
                allowed="True",
                fix="use a sketch or two servers, or say allows_leak=True",
            )
        numbers = (self.num_keys, self.width, self.max_clients, self.min_count)
        if min(numbers) < 1 or self.bits not in (16, 32) or self.max_clients >= 2**self.bits:
            raise InputError(
                "a two-phase union that cannot be",
                got=f"{numbers} keys, width, clients and least count, a ring of {self.bits} bits",
                allowed="1 or more each, 16 or 32 bits, fewer clients than elements of the ring",
                fix="check the terms",
            )

    @property
    def dtype(self) -> type[np.uint16] | type[np.uint32]:
        """Of elements of the ring."""
        return np.uint16 if self.bits == 16 else np.uint32


@dataclass(frozen=True)
class Union:
    """What the server announces between the phases.

    Args:
        terms: of the sum.
        keys: (u,) int64, ascending: those that enough clients have.
        counts: (u,) int64: how many clients of phase 1 have them.
    """

    terms: UnionTerms
    keys: KeyArray
    counts: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"Union({len(self.keys)} keys)"

    @property
    def length(self) -> int:
        """Elements of a vector of phase 2."""
        return len(self.keys) * self.terms.width


def mark(terms: UnionTerms, keys: KeyArray) -> Array:
    """What a client sends in phase 1: 1 for each of its keys, (num_keys,) of the ring.

    Raises:
        KeySpaceError: keys (m,) that are not distinct numbers of 0..num_keys - 1.
    """
    marks = np.zeros(terms.num_keys, terms.dtype)
    marks[_checked(terms, keys)] = 1
    return marks


def union_of(terms: UnionTerms, counts: Array, clients: int) -> Union:
    """What the server makes of the sum of phase 1.

    Args:
        terms: of the sum.
        counts: (num_keys,) of the ring.
        clients: how many were added.

    Raises:
        ShapeError: counts of another shape or ring.
        MalformedError: a count above the number of clients; there is no union then.
    """
    _check_vector(counts, terms.num_keys, terms)
    beyond = int(np.count_nonzero(counts > clients))
    if beyond:
        raise MalformedError(
            "more marks than clients",
            got=f"{beyond} such keys",
            allowed=f"{clients} marks a key at most",
            fix="apply nothing; a client marked what no client marks",
        )
    keys = np.flatnonzero(counts >= terms.min_count)
    return Union(terms, keys, counts[keys].astype(np.int64))


def lay_out(union: Union, keys: KeyArray, rows: Array) -> tuple[Array, NDArray[np.bool_]]:
    """What a client sends in phase 2, with zeros where it has no row.

    Args:
        union: as announced.
        keys: (m,), distinct: those that the client marked.
        rows: (m, width) of the ring.

    Returns:
        (union.length,) of the ring, and which of the keys are in the union: the rows of others
        are left out.

    Raises:
        KeySpaceError: keys that are not distinct numbers of 0..num_keys - 1.
        ShapeError: rows of another shape or ring.
    """
    terms = union.terms
    keys = _checked(terms, keys)
    if rows.shape != (len(keys), terms.width) or rows.dtype != terms.dtype:
        raise ShapeError(
            "rows that do not fit the union",
            got=f"{rows.dtype} {rows.shape}",
            allowed=f"uint{terms.bits} {(len(keys), terms.width)}",
            fix="encode the rows with the ring and the width of the terms",
        )
    vector = np.zeros((len(union.keys), terms.width), terms.dtype)
    places = np.searchsorted(union.keys, keys)
    is_kept = np.zeros(len(keys), np.bool_)
    inside = places < len(union.keys)
    is_kept[inside] = union.keys[places[inside]] == keys[inside]
    vector[places[is_kept]] = rows[is_kept]
    return vector.reshape(-1), is_kept


def read_off(union: Union, total: Array) -> Decoded:
    """What the sum of phase 2 holds; counts are those of phase 1.

    Raises:
        ShapeError: a total of another length or ring.
    """
    _check_vector(total, union.length, union.terms)
    return Decoded(union.keys, union.counts, total.reshape(len(union.keys), union.terms.width))


def sum_over_union(
    terms: UnionTerms,
    inputs: Mapping[int, tuple[KeyArray, Array]],
    sum_marks: VectorSum,
    sum_rows: VectorSum,
) -> Decoded:
    """Both phases, one after the other.

    Args:
        terms: of the sum.
        inputs: keys (m,) and rows (m, width) by client.
        sum_marks: adds up phase 1.
        sum_rows: adds up phase 2.

    Returns:
        Keys of the union, counts of phase 1, sums of phase 2.

    >>> add = lambda vectors: sum(vectors.values())
    >>> row = np.array([[5]], np.uint32)
    >>> inputs = {0: (np.array([3]), row), 1: (np.array([3]), row), 2: (np.array([8]), row)}
    >>> terms = UnionTerms(num_keys=10, width=1, max_clients=3, allows_leak=True)
    >>> sum_over_union(terms, inputs, add, add).rows
    array([[10], [ 5]], dtype=uint32)
    """
    counts = sum_marks({client: mark(terms, keys) for client, (keys, _) in inputs.items()})
    union = union_of(terms, counts, terms.max_clients)
    laid = {client: lay_out(union, keys, rows)[0] for client, (keys, rows) in inputs.items()}
    return read_off(union, sum_rows(laid))


def _checked(terms: UnionTerms, keys: KeyArray) -> KeyArray:
    """Keys that can be marked: of equal ones, all rows but one would be lost."""
    keys = np.asarray(keys)
    is_whole = keys.ndim == 1 and keys.dtype.kind in "iu"
    if not is_whole or ((keys < 0) | (keys >= terms.num_keys)).any():
        raise _bad_keys(f"{keys.dtype} {keys.shape}, some outside or no keys", terms)
    if len(np.unique(keys)) < len(keys):
        raise _bad_keys(f"{len(keys)} keys with equal ones among them", terms)
    return keys


def _check_vector(vector: Array, length: int, terms: UnionTerms) -> None:
    if vector.shape != (length,) or vector.dtype != terms.dtype:
        raise ShapeError(
            "a sum that does not fit the union",
            got=f"{vector.dtype} {vector.shape}",
            allowed=f"uint{terms.bits} {(length,)}",
            fix="add up vectors of one phase",
        )


def _bad_keys(got: str, terms: UnionTerms) -> KeySpaceError:
    return KeySpaceError(
        "keys that cannot be marked",
        got=got,
        allowed=f"distinct whole numbers below {terms.num_keys}, (m,)",
        fix="add up the rows of equal keys first",
    )


_SEEN_BY = {
    "server": "for each key the sum of its updates and how many clients chose it; of clients that "
    "drop between the phases, also their keys"
}


@dataclass(frozen=True)
class UnionSum:
    """Two secure sums, one after the other.

    Args:
        rounding: of updates.
        signed: clients sign which of them are left, in both sums.
    """

    rounding: Rounding = field(default_factory=Rounding)
    signed: bool = False

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        if len(adding.contributions) < MIN_CLIENTS:
            return withheld(len(adding.contributions), MIN_CLIENTS, _SEEN_BY)
        rows = {
            place: self.rounding.rows(adding, one)
            for place, one in enumerate(adding.contributions)
            if one.update is not None
        }
        try:
            marked = self._run(adding, {p: _marks(own, adding) for p, own in rows.items()}, 0)
            unions = _unions(marked, adding, self.rounding)
            laid = {p: _laid(own, unions) for p, own in rows.items()}
            opened = self._run(adding, laid, 1)
        except ThresholdError as error:
            return Summed(None, {}, seen_by=_SEEN_BY, error=str(error))
        return self._summed(adding, unions, marked, opened)

    def _run(self, adding: Adding, vectors: Mapping[int, RingArray], phase: int) -> SecAggResult:
        name = derived(b"union", adding.place, phase).bytes(16)
        sample = next(iter(vectors.values()), np.zeros(1, f"<u{self.rounding.bits // 8}"))
        settings = SecAggSettings(
            name, len(adding.contributions), len(sample), self.rounding.bits, signed=self.signed
        )
        lost, late = stages_of(adding)
        idle = {p: np.zeros_like(sample) for p, stage in lost.items() if stage != "before"}
        return run_secagg(settings, {**vectors, **idle}, lost, late=late)

    def _summed(
        self,
        adding: Adding,
        unions: list[Union],
        marked: SecAggResult,
        opened: SecAggResult,
    ) -> Summed:
        fixed, at, sums = self.rounding.fixed_point(adding), 0, []
        for each in unions:
            decoded = read_off(each, opened.total[at : at + each.length])
            sums.append(PartSum(decoded.keys, fixed.decode(decoded.rows), decoded.counts))
            at += each.length
        clients, count = [one.client for one in adding.contributions], len(opened.survivors)
        both = (marked, opened)
        return Summed(
            tuple(part.divided(adding.over, count) for part in sums),
            {c: sum(run.bytes_up.get(p, 0) for run in both) for p, c in enumerate(clients)},
            tuple(part.known_counts for part in sums) if adding.with_counts else None,
            {c: sum(run.bytes_down.get(p, 0) for run in both) for p, c in enumerate(clients)},
            seen_by=_SEEN_BY,
        )


def _terms(adding: Adding, place: int, rounding: Rounding) -> UnionTerms:
    part = adding.layout.parts[place]
    return UnionTerms(
        part.space.num_keys,
        part.slice_size,
        len(adding.contributions),
        rounding.bits,
        allows_leak=True,
    )


def _marks(rows: list[RingRows], adding: Adding) -> RingArray:
    """What a client sends in phase 1: a mark for each of its keys, part by part."""
    pieces = []
    for part, (keys, own) in zip(adding.layout.parts, rows, strict=True):
        marks = np.zeros(part.space.num_keys, own.dtype)
        marks[keys] = 1
        pieces.append(marks)
    return np.concatenate(pieces)


def _unions(marked: SecAggResult, adding: Adding, rounding: Rounding) -> list[Union]:
    found, at = [], 0
    for place, part in enumerate(adding.layout.parts):
        terms = _terms(adding, place, rounding)
        counts = marked.total[at : at + part.space.num_keys]
        found.append(union_of(terms, counts, len(marked.survivors)))
        at += part.space.num_keys
    return found


def _laid(rows: list[RingRows], unions: list[Union]) -> RingArray:
    """What a client sends in phase 2."""
    pieces = [lay_out(each, *own)[0] for each, own in zip(unions, rows, strict=True)]
    return np.concatenate(pieces)
