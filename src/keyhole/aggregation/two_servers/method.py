"""Adds updates up at two servers: each holds a share of the sum, and neither an update.

Hidden from each server: keys and updates, if the two do not collude. Not hidden: who takes part,
and the sum once both shares are combined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from keyhole.about import Leak
from keyhole.aggregation.base import (
    AggregationAbout,
    ClientResult,
    PartSum,
    RingRows,
    Rounding,
    SumPrice,
    SumRequest,
    SumResult,
    never,
    rows_of,
)
from keyhole.aggregation.exchange import Split, SumRound, add_shared
from keyhole.aggregation.privacy.mechanism import clip_update, norm_before_rounding
from keyhole.aggregation.shares import SplitUpdate, SumFacts
from keyhole.aggregation.two_servers.client import split_rows
from keyhole.aggregation.two_servers.params import SparseParams, SumParams, part_params
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint
from keyhole.errors import StaleError
from keyhole.pricing import SumSpeeds, Workload, measured
from keyhole.primitives.layout import Layout, max_keys_of

if TYPE_CHECKING:
    from keyhole.aggregation.two_servers.server import TwoServerAdder

MIN_CLIENTS = 2
"""Below which two servers never release anything: a sum of one is its update."""

MIN_SHARE = 2 / 3
"""Min share of those who are asked: below it two servers release nothing, unless they are told a
number."""

_ELEMENT = 4  # bytes of a number of the ring

_ABOUT = AggregationAbout(
    name="secure-sparse",
    title="two-server sum",
    leaks=MappingProxyType(
        {
            "first server": Leak(
                updates="who takes part; with the other's share, the sum of all updates"
            ),
            "second server": Leak(
                updates="who takes part; with the other's share, the sum of all updates"
            ),
        }
    ),
    rests_on="The two servers do not work together.",
    servers=2,
    is_private=True,
    noise="by_parties",
    failure=never,
    hides_dropouts=True,
)


def ring_rows(terms: SumParams, layout: Layout, one: ClientResult, prg: Prg) -> list[RingRows]:
    """Returns what a client adds to each part: shortened where the terms say so, rounded by its
    coin."""
    fixed = terms.fixed_point
    if terms.norm < inf:
        counts = {name: len(z) for name, z in one.keys.items()}
        entries = layout.client_size(**counts)
        one = clip_update(layout, one, norm_before_rounding(terms.norm, fixed.rounding, entries))
    return [(keys, fixed.encode(rows, prg)) for keys, rows in rows_of(layout, one)]


@dataclass(frozen=True)
class TwoServers:
    """Adds up point functions with the rows as payload (see `two_servers.client`).

    Hidden from each server: keys and updates, if the two do not collude. Clients that drop out need
    nothing: they are in both lists or in none. The servers are those of the service
    (`service.sums`), driven in one process.

    Args:
        min_clients: below which neither server releases anything; None for two thirds of those who
            are asked. With noise, which hides each client however few they are, None stands for 2:
            how many came must not decide, by a number that one client moves, what is released.
        noise: standard deviation of the noise that each server adds to its share, in the units of
            updates; 0 for none.
        min_per_key: rows that fewer clients sent are dropped by both servers before anything is
            opened; 0 for none. Both learn how many sent each key.
        count_noise: standard deviation of the noise that each adds to these counts, in clients.
    """

    rounding: Rounding = field(default_factory=Rounding)
    min_clients: int | None = None
    noise: float = 0.0
    min_per_key: int = 0
    count_noise: float = 0.0

    @property
    def about(self) -> AggregationAbout:
        """Two servers, neither of which sees an update."""
        is_share = self.min_clients is None and not self.noise
        return replace(
            _ABOUT,
            leaks=self._leaks(),
            min_per_key=self.min_per_key,
            ring=self.rounding,
            min_clients=MIN_CLIENTS if self.min_clients is None else self.min_clients,
            min_share=MIN_SHARE if is_share else 0.0,
            noise_added=self.noise,
        )

    def _leaks(self) -> Mapping[str, Leak]:
        if not self.min_per_key:
            return _ABOUT.leaks
        about = " about" if self.count_noise else ""
        told = f"who takes part, and{about} how many chose each key; with the other's share, the "
        told += f"sum of the rows that {self.min_per_key} or more chose"
        return dict.fromkeys(_ABOUT.leaks, Leak(updates=told))

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
        speeds, row = measured(SumSpeeds), terms.row * _ELEMENT
        positions = terms.num_buckets * terms.bucket_size
        seconds = load.cohort * positions * (speeds.position_seconds + row / speeds.rows)
        each = speeds.key_seconds + row / speeds.sharing
        return SumPrice(
            self.about.name,
            terms.upload_bytes,
            0,
            1,
            dict.fromkeys(self.about.leaks, seconds),
            speeds.share_seconds + load.keys_per_client * each,
            load.num_keys * row + terms.placement.members_bytes,
        )

    def params(self, round: SumRound) -> bytes:
        """Implements `SharedSum.params`."""
        ring, with_counts = self.rounding, round.with_counts
        is_counted = with_counts or self.min_per_key > 0
        limit = max_keys_of(round.layout, round.keys_per_client)
        parts = tuple(
            part_params(part.space.num_keys, part.slice_size, m, ring.bits, is_counted)
            for part, m in zip(round.layout.parts, limit, strict=True)
        )
        return SumParams(
            round=round.name,
            parts=parts,
            max_clients=max(ring.minimum, round.asked),
            min_clients=max(self.about.min_clients or 0, round.min_clients),
            clip=ring.clip,
            bits=ring.bits,
            with_counts=with_counts,
            norm=round.norm,
            noise=self.noise,
            room=ring.room,
            min_per_key=self.min_per_key,
            count_noise=self.count_noise,
        ).encode()

    def facts(self, params: bytes) -> SumFacts:
        """Implements `SharedSum.facts`."""
        return SumParams.decode(params).facts

    def split(self, params: bytes, layout: Layout) -> Split:
        """Implements `SharedSum.split`."""
        terms = SumParams.decode(params)
        told = [(part.num_keys, part.width) for part in terms.parts]
        known = [(part.space.num_keys, part.slice_size) for part in layout.parts]
        if told != known:
            raise StaleError(
                f"terms of a sum that do not fit the model: got {len(told)} parts of other sizes; "
                f"expected the {len(known)} parts of the layout; take part in a round whose "
                "publisher means what it says"
            )

        def split(one: ClientResult, coins: Prg, secrets: Prg) -> SplitUpdate:
            return split_rows(terms, ring_rows(terms, layout, one, coins), secrets)

        return split

    def adder(self, params: bytes, party: int) -> TwoServerAdder:
        """Implements `SharedSum.adder`."""
        from keyhole.aggregation.two_servers.server import TwoServerAdder  # it needs numba

        return TwoServerAdder(SumParams.decode(params), party)

    def decode(self, params: bytes, shares: tuple[memoryview, memoryview]) -> list[PartSum]:
        """Implements `SharedSum.decode`."""
        from keyhole.aggregation.two_servers.server import tables_of

        terms, sums = SumParams.decode(params), []
        both = zip(*(tables_of(terms, share) for share in shares), strict=True)
        for part, (one, other) in zip(terms.parts, both, strict=True):
            total = one + other
            counts = total[:, -1].astype(np.int64) if terms.with_counts else None
            decoded = terms.fixed_point.decode(total[:, : part.width])
            sums.append(PartSum.of_dense(decoded, counts))
        return sums

    def add(self, request: SumRequest) -> SumResult:
        """Implements `Aggregation.add`."""
        return add_shared(self, request)
