"""Adds updates up at two servers: each holds a share of the sum, and neither an update.

The simulator and the service use the same pieces: terms from the layout, rows of a client in the
ring, and the update of the model from both shares.

Hidden from each server: keys and updates, if the two do not collude. Not hidden: who takes part,
and the sum once both shares are combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.about import Leak
from keyhole.aggregation.base import (
    Aggregation,
    AggregationAbout,
    ClientResult,
    PartSum,
    RingRows,
    Rounding,
    SumPrice,
    SumRequest,
    SumResult,
    derived,
    name_of_sum,
    rows_of,
    withheld,
)
from keyhole.aggregation.privacy.clipping import clip_update, norm_before_rounding
from keyhole.aggregation.two_servers.client import SumShares, share_update
from keyhole.aggregation.two_servers.messages import Share, upload_bytes
from keyhole.aggregation.two_servers.params import PartParams, SumParams, part_params
from keyhole.aggregation.two_servers.server import SumServer, combine_shares
from keyhole.aggregation.two_servers.sparse import SparseParams, sparse_upload_bytes
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint
from keyhole.errors import StaleError
from keyhole.pricing import SumSpeeds, Workload
from keyhole.primitives.layout import Layout, max_keys_of
from keyhole.server.row_sums import Over, RowUpdate

MIN_CLIENTS = 2
"""Below which two servers release nothing, unless they are told otherwise."""

_ELEMENT = 4  # bytes of a number of the ring

_ABOUT = AggregationAbout(
    name="secure-sparse",
    title="two-server sum",
    leaks=MappingProxyType(
        {
            "first server": Leak(
                updates="who takes part; with the second's share, the sum of all updates"
            ),
            "second server": Leak(
                updates="who takes part; with the first's share, the sum of all updates"
            ),
        }
    ),
    rests_on="The two servers do not work together.",
    servers=2,
    is_private=True,
    noise="by_parties",
    hides_dropouts=True,
)


@dataclass(frozen=True)
class OpenedSum:
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
) -> SumParams:
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
    return SumParams(
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
) -> tuple[PartParams, ...]:
    limit = max_keys_of(layout, keys_per_client)
    return tuple(
        part_params(part.space.num_keys, part.slice_size, m, rounding.bits, with_counts)
        for part, m in zip(layout.parts, limit, strict=True)
    )


def check_terms(terms: SumParams, layout: Layout) -> None:
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


def ring_rows(terms: SumParams, layout: Layout, one: ClientResult, prg: Prg) -> list[RingRows]:
    """What a client adds to each part: shortened where the terms say so, and rounded by its coin.

    Args:
        terms: of the sum.
        layout: the model and its cuts.
        one: with an update.
        prg: the client's own coin: a party that foresees it learns a little more than the sum.

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
    terms: SumParams, shares: tuple[Share, Share], over: Over, divisor: int | None = None
) -> OpenedSum:
    """What both shares together say.

    Args:
        terms: of the sum.
        shares: of the two servers.
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
    return OpenedSum(rows, counts_of)


class SharedSum(Aggregation, Protocol):
    """An aggregation that two aggregators run as services."""

    def terms(
        self,
        layout: Layout,
        keys_per_client: Mapping[str, int],
        *,
        name: bytes,
        asked: int,
        with_counts: bool,
        min_clients: int = 0,
        norm: float = inf,
    ) -> SumParams:
        """Returns the terms of one sum; see `terms_of`."""
        ...


@dataclass(frozen=True)
class TwoServers:
    """Adds up point functions with the rows as payload (see `two_servers.client`).

    Hidden from each server: keys and updates, if the two do not collude. Clients that drop out need
    nothing: they are in both lists or in none. The servers are those of the service
    (`service.sums`), driven in one process.

    Args:
        rounding: of updates.
        min_clients: below which neither server releases anything.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
    """

    rounding: Rounding = field(default_factory=Rounding)
    min_clients: int = MIN_CLIENTS
    noise: float = 0.0

    @property
    def about(self) -> AggregationAbout:
        """Two servers, neither of which sees an update."""
        return replace(_ABOUT, ring=self.rounding, min_clients=self.min_clients)

    def with_ring(self, ring: Rounding, noise: float = 0.0) -> TwoServers:
        """Returns the same sum with another ring, and with this noise of each server."""
        return replace(self, rounding=ring, noise=noise)

    def price(self, load: Workload) -> SumPrice:
        """Returns what a round costs."""
        FixedPoint(1.0, load.cohort)
        width = -(-load.slice_bytes // _ELEMENT)
        terms = SparseParams(
            bytes(16), load.num_keys, width, load.keys_per_client, 32, min_clients=1
        )
        speeds, row = SumSpeeds(), terms.row * _ELEMENT
        positions = terms.num_buckets * terms.bucket_size
        seconds = load.cohort * positions * (speeds.position_seconds + row / speeds.rows)
        each = speeds.key_seconds + row / speeds.sharing
        return SumPrice(
            self.about.name,
            sparse_upload_bytes(terms),
            0,
            1,
            dict.fromkeys(self.about.leaks, seconds),
            speeds.share_seconds + load.keys_per_client * each,
            load.num_keys * row + terms.placement.members_bytes,
        )

    def terms(
        self,
        layout: Layout,
        keys_per_client: Mapping[str, int],
        *,
        name: bytes,
        asked: int,
        with_counts: bool,
        min_clients: int = 0,
        norm: float = inf,
    ) -> SumParams:
        """Returns the terms of one sum; `min_clients` counts if it is above the sum's own."""
        return terms_of(
            layout,
            keys_per_client,
            self.rounding,
            name=name,
            asked=asked,
            min_clients=max(self.min_clients, min_clients),
            with_counts=with_counts,
            norm=norm,
            noise=self.noise,
        )

    def add(self, request: SumRequest) -> SumResult:
        """Adds up the updates of a round."""
        seen = self.about.seen_by(with_counts=request.needs_counts)
        if len(request.sent) < self.min_clients:  # the servers would refuse, after all the work
            return withheld(len(request.sent), self.min_clients, seen)
        terms = self.terms(
            request.layout,
            request.keys_per_client,
            name=name_of_sum(request),
            asked=len(request.results),
            with_counts=request.needs_counts,
        )
        sent = {
            str(one.client): share_update(terms, self.rounding.rows(request, one))
            for one in request.sent
        }
        opened = open_sum(terms, _shares(terms, request, sent), request.over)
        return SumResult(
            opened.rows,
            {one.client: upload_bytes(terms) for one in request.sent},
            opened.counts if request.with_counts else None,
            unplaced_keys=sum(one.unplaced for one in sent.values()),
            seen_by=seen,
        )


def _shares(
    terms: SumParams, request: SumRequest, sent: dict[str, SumShares]
) -> tuple[Share, Share]:
    """What both servers give out."""
    cohort = [str(one.client) for one in request.results]
    one, other = servers = SumServer(terms, 0, cohort), SumServer(terms, 1, cohort)
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
    return _share(one, request), _share(other, request)


def _share(server: SumServer, request: SumRequest) -> Share:
    """With noise that derives from the seed of the simulation."""
    parts = range(len(request.layout.parts))
    return server.share([derived(b"noise", request.place, part, server.party) for part in parts])
