"""The two-phase union: first which keys anybody has, then a dense secure sum over these keys alone.

Off by default, because it leaks: see `private.secure_sum.union`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from keyhole.errors import ThresholdError
from keyhole.private.secure_sum import union
from keyhole.private.secure_sum.fixed_point import RingArray
from keyhole.private.secure_sum.secagg_run import SecAggResult, run_secagg
from keyhole.private.secure_sum.secagg_settings import SecAggSettings
from keyhole.training.aggregation.contract import Adding, Summed, withheld
from keyhole.training.aggregation.parts import PartSum
from keyhole.training.aggregation.rounding import RingRows, Rounding, derived
from keyhole.training.aggregation.secure import LEAST_CLIENTS, stages_of

__all__ = ["UnionSum"]

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
        if len(adding.contributions) < LEAST_CLIENTS:
            return withheld(len(adding.contributions), LEAST_CLIENTS, _SEEN_BY)
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
        unions: list[union.Union],
        marked: SecAggResult,
        opened: SecAggResult,
    ) -> Summed:
        fixed, at, sums = self.rounding.fixed_point(adding), 0, []
        for each in unions:
            decoded = union.read_off(each, opened.total[at : at + each.length])
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


def _terms(adding: Adding, place: int, rounding: Rounding) -> union.UnionTerms:
    part = adding.layout.parts[place]
    return union.UnionTerms(
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


def _unions(marked: SecAggResult, adding: Adding, rounding: Rounding) -> list[union.Union]:
    found, at = [], 0
    for place, part in enumerate(adding.layout.parts):
        terms = _terms(adding, place, rounding)
        counts = marked.total[at : at + part.space.num_keys]
        found.append(union.union_of(terms, counts, len(marked.survivors)))
        at += part.space.num_keys
    return found


def _laid(rows: list[RingRows], unions: list[union.Union]) -> RingArray:
    """What a client sends in phase 2."""
    pieces = [union.lay_out(each, *own)[0] for each, own in zip(unions, rows, strict=True)]
    return np.concatenate(pieces)
