"""The secure sparse sum with two servers: each holds a share of the sum, and neither an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from keyhole.delivery.assembly import most_keys_of
from keyhole.errors import ThresholdError
from keyhole.primitives.parts import Part
from keyhole.private.dp.gaussian import add_ring_noise
from keyhole.private.secure_sum.fixed_point import FixedPoint, RingArray
from keyhole.private.secure_sum.masks import add_mask
from keyhole.private.secure_sum.sparse_client import dense_shares, share_rows
from keyhole.private.secure_sum.sparse_messages import upload_bytes
from keyhole.private.secure_sum.sparse_server import SparseServer, combine
from keyhole.private.secure_sum.sparse_terms import SparseTerms
from keyhole.training.aggregation.contract import Adding, Contribution, Summed
from keyhole.training.aggregation.parts import PartSum
from keyhole.training.aggregation.rounding import RingRows, Rounding, derived

__all__ = ["TwoServers"]

_SEEN_BY = {
    "first server": "who takes part; with the second's share, the sum of all updates",
    "second server": "who takes part; with the first's share, the sum of all updates",
}


@dataclass(frozen=True)
class TwoServers:
    """Point functions with the rows as payload (see `private.secure_sum.sparse_client`).

    Hidden from each server: keys and updates, if both do not collude. Clients that drop out need
    nothing: they are in both lists or in none.

    Args:
        rounding: of updates.
        least_clients: below which neither server releases anything.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
    """

    rounding: Rounding = field(default_factory=Rounding)
    least_clients: int = 2
    noise: float = 0.0

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        sent = adding.sent
        if len(sent) < self.least_clients:
            few = ThresholdError(
                "too few clients for a sum to be released",
                got=len(sent),
                allowed=f"{self.least_clients} or more",
                fix="ask more clients",
            )
            return Summed(None, {}, seen_by=_SEEN_BY, error=str(few))
        fixed = self.rounding.fixed_point(adding)
        rows = {one.client: self.rounding.rows(adding, one) for one in sent}
        up = dict.fromkeys(rows, 0)
        sums, unplaced = [], 0
        most = most_keys_of(adding.layout, adding.keys_per_client)
        for place, (part, m) in enumerate(zip(adding.layout.parts, most, strict=True)):
            own = [rows[one.client][place] for one in sent]
            terms = self._terms(adding, part, place, m)
            # Where nearly every key is sent, or rows are short, all rows take fewer bytes.
            if upload_bytes(terms) < part.space.num_keys * terms.row * terms.dtype.itemsize:
                total, lost = self._sparse(terms, sent, own, up)
                unplaced += lost
            else:
                total = self._dense(terms, sent, own, up)
            chosen = total[:, -1].astype(np.int64) if adding.needs_counts else None
            self._add_noise(total, fixed, adding, place)
            decoded = fixed.decode(total[:, : part.slice_size])
            sums.append(PartSum.of_dense(decoded, chosen))
        updates = tuple(part.divided(adding.over, len(sent)) for part in sums)
        counts = tuple(part.known_counts for part in sums) if adding.with_counts else None
        return Summed(updates, up, counts, unplaced_keys=unplaced, seen_by=_SEEN_BY)

    def _add_noise(self, total: RingArray, fixed: FixedPoint, adding: Adding, place: int) -> None:
        """What both servers add to their shares, each by itself, is in the sum."""
        for server in (0, 1):
            prg = derived(b"noise", adding.place, place, server)
            add_ring_noise(total, self.noise * fixed.scale, prg, out=total)

    def _terms(self, adding: Adding, part: Part, place: int, most_keys: int) -> SparseTerms:
        return SparseTerms(
            round=derived(b"sparse sum", adding.place, place).bytes(16),
            num_keys=part.space.num_keys,
            width=part.slice_size,
            most_keys=max(1, most_keys),
            bits=self.rounding.bits,
            least_clients=self.least_clients,
            with_counts=adding.needs_counts,
        )

    def _sparse(
        self,
        terms: SparseTerms,
        sent: Sequence[Contribution],
        rows: Sequence[RingRows],
        up: dict[int, int],
    ) -> tuple[RingArray, int]:
        """The sum over a part of which clients touch some keys, and how many found no place."""
        servers, lost = [SparseServer(terms, party) for party in (0, 1)], 0
        for number, (one, (keys, own)) in enumerate(zip(sent, rows, strict=True)):
            shares = share_rows(terms, keys, own)
            for server, message in zip(servers, shares.to, strict=True):
                server.add(number, shares.public, message)
            up[one.client] += len(shares.public) + sum(map(len, shares.to))
            lost += int(np.count_nonzero(~shares.is_placed))
        lists = [server.accepted for server in servers]
        for server, other in zip(servers, reversed(lists), strict=True):
            server.agree(other)
        return combine(*(server.share() for server in servers)), lost

    def _dense(
        self,
        terms: SparseTerms,
        sent: Sequence[Contribution],
        rows: Sequence[RingRows],
        up: dict[int, int],
    ) -> RingArray:
        """The sum over a part of which every client sends every row."""
        totals = [np.zeros((terms.num_keys, terms.row), terms.dtype) for _ in range(2)]
        for one, (keys, own) in zip(sent, rows, strict=True):
            whole = np.zeros_like(totals[0])
            whole[keys, : terms.width] = own
            whole[keys, terms.width :] = 1
            seed, rest = dense_shares(whole)
            add_mask(totals[0], seed, 1)
            totals[1] += rest
            up[one.client] += len(seed) + rest.nbytes
        return combine(*totals)
