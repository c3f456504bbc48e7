"""Whole updates and the sums of two servers: which terms a round has, and what its sum means.

The simulator and the service use the same: terms from the layout, rows of a client in the ring, and
the update of the model from both shares.

The secure sparse sum with two servers: each holds a share of the sum, and neither an update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.aggregation.base import (
    Adding,
    Contribution,
    PartSum,
    RingRows,
    Rounding,
    Summed,
    derived,
    name_of_sum,
    rows_of,
    with_counts,
    withheld,
)
from keyhole.aggregation.privacy.clipping import norm, norm_before_rounding
from keyhole.aggregation.two_servers.client import WholeShares, share_update
from keyhole.aggregation.two_servers.messages import Share, whole_upload_bytes
from keyhole.aggregation.two_servers.params import PartTerms, WholeTerms, part_terms
from keyhole.aggregation.two_servers.server import WholeServer, combine_shares
from keyhole.arrays import Tree
from keyhole.crypto.prg import Prg
from keyhole.errors import StaleError
from keyhole.primitives.layout import Layout, max_keys_of
from keyhole.server.row_sums import Over, RowUpdate

TWO_SERVERS_SEEN_BY = {
    "first server": "who takes part; with the second's share, the sum of all updates",
    "second server": "who takes part; with the first's share, the sum of all updates",
}
"""What each server learns of updates and their keys."""


@dataclass(frozen=True)
class Opened:
    """What a sum means.

    Args:
        rows: the update of each part.
        counts: how many clients chose each of its keys, where that was asked for.
    """

    rows: tuple[RowUpdate, ...]
    counts: tuple[NDArray[np.int64], ...] | None


def terms_of(
    layout: Layout,
    keys_per_client: Mapping[str, int],
    rounding: Rounding,
    *,
    name: bytes,
    asked: int,
    min_clients: int,
    with_counts: bool,
    norm: float = inf,
    noise: float = 0.0,
) -> WholeTerms:
    """The terms of a round's sum.

    Args:
        layout: the model and its cuts.
        keys_per_client: key space -> the most keys of a client; public.
        rounding: of updates.
        name: 16 bytes that name the sum among all.
        asked: clients: more cannot be added.
        min_clients: below which nothing is released.
        with_counts: whether the sum says how many clients chose each key.
        norm: clients shorten updates that measure more.
        noise: standard deviation of each server's noise, in the units of updates.

    Raises:
        InputError: numbers that do not belong together.
    """
    return WholeTerms(
        round=name,
        parts=_parts(layout, keys_per_client, rounding, with_counts),
        max_clients=max(rounding.minimum, asked),
        min_clients=min_clients,
        clip=rounding.clip,
        bits=rounding.bits,
        with_counts=with_counts,
        norm=norm,
        noise=noise,
        room=rounding.room,
    )


def _parts(
    layout: Layout, keys_per_client: Mapping[str, int], rounding: Rounding, with_counts: bool
) -> tuple[PartTerms, ...]:
    limit = max_keys_of(layout, keys_per_client)
    return tuple(
        part_terms(part.space.num_keys, part.slice_size, m, rounding.bits, with_counts)
        for part, m in zip(layout.parts, limit, strict=True)
    )


def check_terms(terms: WholeTerms, layout: Layout) -> None:
    """Raises StaleError unless the terms fit the model."""
    told = [(part.num_keys, part.width) for part in terms.parts]
    known = [(part.space.num_keys, part.slice_size) for part in layout.parts]
    if told != known:
        raise StaleError(
            "terms of a sum that do not fit the model",
            got=f"{len(told)} parts of other sizes",
            allowed=f"the {len(known)} parts of the layout",
            fix="take part in a round whose publisher means what it says",
        )


def clip_update(layout: Layout, one: Contribution, limit: float) -> Contribution:
    """The contribution, shortened so that it measures at most so much, all parts together.

    Args:
        layout: the model and its cuts.
        one: with an update.
        limit: its Euclidean norm, of rows that are added up under equal keys.
    """

    def length(update: Tree) -> float:
        rows = rows_of(layout, replace(one, update=update))
        return norm({str(i): own for i, (_, own) in enumerate(rows)})

    update, found, factor = one.update, length(one.update), 1.0
    while found > limit:  # rounding may lengthen it again: a little shorter then
        factor *= limit / found * (1 - 2.0**-20)
        update = tree.map_leaves(lambda leaf, by=factor: leaf * np.float32(by), one.update)
        found = length(update)
    return replace(one, update=update)


def ring_rows(terms: WholeTerms, layout: Layout, one: Contribution, prg: Prg) -> list[RingRows]:
    """What a client adds to each part: shortened where the terms say so, and rounded by its coin.

    Args:
        terms: of the sum.
        layout: the model and its cuts.
        one: with an update.
        prg: the client's own coin: whoever foresees it learns a little more than the sum says.

    Raises:
        NotFiniteError: NaN or infinity in the update.
    """
    if terms.norm < inf:
        counts = {name: len(z) for name, z in one.keys.items()}
        entries, step = layout.client_size(**counts), terms.fixed_point.rounding
        one = clip_update(layout, one, norm_before_rounding(terms.norm, step, entries))
    fixed = terms.fixed_point
    return [(keys, fixed.encode(rows, prg)) for keys, rows in rows_of(layout, one)]


def open_sum(
    terms: WholeTerms, shares: tuple[Share, Share], over: Over, divisor: int | None = None
) -> Opened:
    """What both shares together say.

    Args:
        terms: of the sum.
        shares: of both servers.
        over: what sums are divided by; "choosers" needs counts.
        divisor: of "cohort"; as many as were added if left out.

    Raises:
        MismatchError, ShapeError: shares that do not belong together.
    """
    sums = []
    for part, total in zip(terms.parts, combine_shares(*shares), strict=True):
        counts = total[:, -1].astype(np.int64) if terms.with_counts else None
        decoded = terms.fixed_point.decode(total[:, : part.width])
        sums.append(PartSum.of_dense(decoded, counts))
    divisor = shares[0].clients if divisor is None else divisor
    rows = tuple(part.divided(over, divisor) for part in sums)
    counts_of = tuple(part.known_counts for part in sums) if terms.with_counts else None
    return Opened(rows, counts_of)


@dataclass(frozen=True)
class TwoServers:
    """Point functions with the rows as payload (see `private.secure_sum.whole_client`).

    Hidden from each server: keys and updates, if both do not collude. Clients that drop out need
    nothing: they are in both lists or in none. The servers are those of the service
    (`serving.sums`), driven in one process.

    Args:
        rounding: of updates.
        min_clients: below which neither server releases anything.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
    """

    rounding: Rounding = field(default_factory=Rounding)
    min_clients: int = 2
    noise: float = 0.0

    def __call__(self, adding: Adding) -> Summed:
        """Adds up the updates of a round."""
        seen = with_counts(TWO_SERVERS_SEEN_BY, adding)
        if len(adding.sent) < self.min_clients:  # the servers would refuse, after all the work
            return withheld(len(adding.sent), self.min_clients, seen)
        terms = self._terms(adding)
        sent = {
            str(one.client): share_update(terms, self.rounding.rows(adding, one))
            for one in adding.sent
        }
        opened = open_sum(terms, _shares(terms, adding, sent), adding.over)
        return Summed(
            opened.rows,
            {one.client: whole_upload_bytes(terms) for one in adding.sent},
            opened.counts if adding.with_counts else None,
            unplaced_keys=sum(one.unplaced for one in sent.values()),
            seen_by=seen,
        )

    def _terms(self, adding: Adding) -> WholeTerms:
        return terms_of(
            adding.layout,
            adding.keys_per_client,
            self.rounding,
            name=name_of_sum(adding),
            asked=len(adding.contributions),
            min_clients=self.min_clients,
            with_counts=adding.needs_counts,
            noise=self.noise,
        )


def _shares(terms: WholeTerms, adding: Adding, sent: dict[str, WholeShares]) -> tuple[Share, Share]:
    """What both servers give out."""
    cohort = [str(one.client) for one in adding.contributions]
    one, other = servers = WholeServer(terms, 0, cohort), WholeServer(terms, 1, cohort)
    for server in servers:
        for name, shares in sent.items():
            server.accept(name, shares.to[server.party])
    lists = one.close(), other.close()
    agreed = one.reduce(lists[1]), other.reduce(lists[0])
    one.agree(agreed[1])
    other.agree(agreed[0])
    for server in servers:
        for name, shares in sent.items():
            server.add(name, shares.public, shares.to[server.party])
    return _share(one, adding), _share(other, adding)


def _share(server: WholeServer, adding: Adding) -> Share:
    """With noise that derives from the seed of the simulation."""
    parts = range(len(adding.layout.parts))
    return server.share([derived(b"noise", adding.place, part, server.party) for part in parts])
