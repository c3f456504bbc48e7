"""Sums in the clear: sparse, or dense where each client puts its update in place (section 4.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.aggregation.base import Adding, Contribution, Summed
from keyhole.primitives.keyspace import key_bytes
from keyhole.server.row_sums import (
    PLAIN_SUM_SEEN_BY,
    RowUpdate,
    choosers,
    merge_blocks,
    sum_updates,
)

_DENSE_SEEN_BY = {"server": "each update and whose it is; its keys are where it is not zero"}
_ARRIVES = ("sent", "late", "refused")


def plain(adding: Adding) -> Summed:
    """Clients send their keys and updates; the server adds them up under the keys."""
    layout = adding.layout

    def size(one: Contribution) -> int:
        counts = {name: len(z) for name, z in one.keys.items()}
        return key_bytes(one.keys.values()) + layout.client_bytes(**counts)

    up = {one.client: size(one) for one in _arrived(adding)}
    return Summed(plain_rows(adding), up, _counts(adding), seen_by=PLAIN_SUM_SEEN_BY)


def dense_at_client(adding: Adding) -> Summed:
    """Clients put their updates in place and send dense models, which the server adds up.

    The same numbers as `plain`, in which nothing but the bytes differ: what is added to zeros stays
    what it is.
    """
    whole = sum(4 * part.space.num_keys * part.slice_size for part in adding.layout.parts)
    up = {one.client: whole for one in _arrived(adding)}
    return Summed(plain_rows(adding), up, _counts(adding), seen_by=_DENSE_SEEN_BY)


def _arrived(adding: Adding) -> list[Contribution]:
    """Those who sent something, whether it counts or not: their keys are known."""
    spaces = len(adding.layout.spaces)
    return [c for c in adding.contributions if c.fate in _ARRIVES and len(c.keys) == spaces]


def _counts(adding: Adding) -> tuple[NDArray[np.int64], ...] | None:
    """How many clients chose each key, in the order of `plain_rows`."""
    if not adding.with_counts or not adding.sent:
        return None
    keys = [one.keys for one in adding.sent]
    return tuple(choosers(part, keys) for part in adding.layout.parts)


def plain_rows(adding: Adding) -> tuple[RowUpdate, ...] | None:
    """The sum, as it is defined; None if nobody is left."""
    sent = adding.sent
    if not sent:
        return None
    keys = [one.keys for one in sent]
    if adding.blocks is not None:
        return merge_blocks(adding.layout, adding.blocks, keys, adding.over)
    return sum_updates(adding.layout, [one.update for one in sent], keys, adding.over)
