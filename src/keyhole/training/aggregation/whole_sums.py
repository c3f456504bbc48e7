"""Whole updates and the sums of two servers: which terms a round has, and what its sum means.

The simulator and the service use the same: terms from the layout, rows of a client in the ring, and
the update of the model from both shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.delivery.assembly import most_keys_of
from keyhole.errors import StaleError
from keyhole.primitives.layout import Layout
from keyhole.private.dp.clipping import norm, norm_before_rounding
from keyhole.private.prg import Prg
from keyhole.private.secure_sum.whole_messages import Share
from keyhole.private.secure_sum.whole_server import combine_shares
from keyhole.private.secure_sum.whole_terms import PartTerms, WholeTerms, part_terms
from keyhole.server.aggregation import Over
from keyhole.server.updates import RowUpdate
from keyhole.training.aggregation.contract import Contribution
from keyhole.training.aggregation.parts import PartSum, rows_of
from keyhole.training.aggregation.rounding import RingRows, Rounding
from keyhole.types import Tree

__all__ = [
    "TWO_SERVERS_SEEN_BY",
    "Opened",
    "check_terms",
    "clip_update",
    "open_sum",
    "ring_rows",
    "terms_of",
]

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
    least_clients: int,
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
        least_clients: below which nothing is released.
        with_counts: whether the sum says how many clients chose each key.
        norm: clients shorten updates that measure more.
        noise: standard deviation of each server's noise, in the units of updates.

    Raises:
        InputError: numbers that do not belong together.
    """
    return WholeTerms(
        round=name,
        parts=_parts(layout, keys_per_client, rounding, with_counts),
        most_clients=max(rounding.least, asked),
        least_clients=least_clients,
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
    most = most_keys_of(layout, keys_per_client)
    return tuple(
        part_terms(part.space.num_keys, part.slice_size, m, rounding.bits, with_counts)
        for part, m in zip(layout.parts, most, strict=True)
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


def clip_update(layout: Layout, one: Contribution, most: float) -> Contribution:
    """The contribution, shortened so that it measures at most so much, all parts together.

    Args:
        layout: the model and its cuts.
        one: with an update.
        most: its Euclidean norm, of rows that are added up under equal keys.
    """

    def length(update: Tree) -> float:
        rows = rows_of(layout, replace(one, update=update))
        return norm({str(i): own for i, (_, own) in enumerate(rows)})

    update, found, factor = one.update, length(one.update), 1.0
    while found > most:  # rounding may lengthen it again: a little shorter then
        factor *= most / found * (1 - 2.0**-20)
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
