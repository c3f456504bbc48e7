"""Sums in the clear: sparse, or dense where each client puts its update in place (section 4.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from keyhole.delivery.demand import key_bytes
from keyhole.server.aggregation import PLAIN_SUM_SEEN_BY, sum_updates
from keyhole.server.updates import RowUpdate
from keyhole.training.aggregation.contract import Adding, Contribution, Summed

__all__ = ["dense_at_client", "plain", "plain_rows"]

_DENSE_SEEN_BY = {"server": "each update and whose it is; its keys are where it is not zero"}
_ARRIVES = ("sent", "late", "refused")


def plain(adding: Adding) -> Summed:
    """Clients send their keys and updates; the server adds them up under the keys."""
    layout = adding.layout

    def size(one: Contribution) -> int:
        counts = {name: len(z) for name, z in one.keys.items()}
        return key_bytes(one.keys.values()) + layout.client_bytes(**counts)

    up = {c.client: size(c) for c in adding.contributions if c.fate in _ARRIVES}
    return Summed(plain_rows(adding), up, _counts(adding), seen_by=PLAIN_SUM_SEEN_BY)


def dense_at_client(adding: Adding) -> Summed:
    """Clients put their updates in place and send dense models, which the server adds up.

    The same numbers as `plain`, in which nothing but the bytes differ: what is added to zeros stays
    what it is.
    """
    whole = sum(4 * part.space.num_keys * part.slice_size for part in adding.layout.parts)
    up = {c.client: whole for c in adding.contributions if c.fate in _ARRIVES}
    return Summed(plain_rows(adding), up, _counts(adding), seen_by=_DENSE_SEEN_BY)


def _counts(adding: Adding) -> tuple[NDArray[np.int64], ...] | None:
    """How many clients chose each key, in the order of `plain_rows`."""
    if not adding.with_counts or not adding.sent:
        return None
    counts = []
    for part in adding.layout.parts:
        chosen = [np.unique(part.keys_of(one.keys).array) for one in adding.sent]
        counts.append(np.unique(np.concatenate(chosen), return_counts=True)[1].astype(np.int64))
    return tuple(counts)


def plain_rows(adding: Adding) -> tuple[RowUpdate, ...] | None:
    """The sum, as it is defined; None if nobody is left."""
    sent = adding.sent
    if not sent:
        return None
    return sum_updates(adding.layout, [c.update for c in sent], [c.keys for c in sent], adding.over)
