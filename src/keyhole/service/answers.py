"""Makes the answer to a query for slices: of each table a proof, then records, in one buffer.

Hidden: nothing. Not hidden: the keys of a query, and which of their records the device held before.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HASH_BYTES, HashArray
from keyhole.delivery.records import RecordArray
from keyhole.errors import TooLargeError
from keyhole.server.rows import copy_rows
from keyhole.service.routes import Body
from keyhole.wire.assignment import Fetched, SliceTable
from keyhole.wire.manifest import place_nodes, vouch
from keyhole.wire.messages import Ask, sent_mask, unchanged

Gather: TypeAlias = Callable[[SliceTable, KeyArray, RecordArray | None], Awaitable[Fetched]]
"""Fetches records of a table, as its `fetch` does, when it is this request's turn."""

Places: TypeAlias = NDArray[np.int64]
"""Where nodes lie in the tree of a table."""


def max_bytes_of(asks: Sequence[Ask], tables: Sequence[SliceTable], limit: int) -> int:
    """Returns the max bytes that an answer can take; raises TooLargeError above the limit."""
    total = sum([_max_bytes(ask, tables[ask.table]) for ask in asks])
    if total > limit:
        raise TooLargeError(
            f"the slices asked for are too large for one answer: got {total} bytes; expected "
            f"{limit} bytes; ask for fewer at a time"
        )
    return total


async def answer_query(
    asks: Sequence[Ask], tables: Sequence[SliceTable], gather: Gather
) -> tuple[Body, int]:
    """Returns the body of an answer, and how many bytes of it are slices.

    Args:
        tables: the table of each ask.
    """
    proofs = [_places_of(ask, table) for ask, table in zip(asks, tables, strict=True)]
    if any(ask.names is not None for ask in asks):
        return await _changed_alone(asks, tables, proofs, gather)
    sizes = [len(a.keys) * t.info.record_bytes for a, t in zip(asks, tables, strict=True)]
    whole = np.empty(HASH_BYTES * sum(map(len, proofs)) + sum(sizes), np.uint8)
    at = 0
    for ask, table, places, size in zip(asks, tables, proofs, sizes, strict=True):
        start = at + HASH_BYTES * len(places)
        out = whole[start : start + size].reshape(len(ask.keys), table.info.record_bytes)
        fetched = await gather(table, ask.keys, out)
        _write_proof(ask, table, places, fetched, whole[at:start])
        at = start + size
    return whole.data, sum(sizes)


def segment_proof(table: SliceTable, place: int) -> memoryview:
    """Returns what leads from the records of a segment to the root: a few nodes."""
    segment = table.info.segments[place]
    assert table.tree is not None  # else there is no segment
    keys = np.arange(segment.first, segment.first + segment.count)
    return table.tree.nodes[place_nodes(table.tree.shape, keys)].reshape(-1).data


async def _changed_alone(
    asks: Sequence[Ask], tables: Sequence[SliceTable], proofs: Sequence[Places], gather: Gather
) -> tuple[Body, int]:
    """The answer where the device holds some of the slices: only those that changed are sent."""
    parts: list[np.ndarray] = []
    ideal = 0
    for ask, table, places in zip(asks, tables, proofs, strict=True):
        fetched = await gather(table, ask.keys, None)
        records, same = fetched.records, unchanged(ask, _leaves(ask, table, fetched))
        parts.append(np.empty(HASH_BYTES * len(places), np.uint8))
        _write_proof(ask, table, places, fetched, parts[-1])
        if same is not None:
            parts.append(np.frombuffer(sent_mask(~same), np.uint8))
            records = records[~same]
        parts.append(records.reshape(-1))
        ideal += records.nbytes
    return np.concatenate(parts).data, ideal


def _max_bytes(ask: Ask, table: SliceTable) -> int:
    """The max bytes that the answer to one block can take: a proof, bits and records."""
    count, nodes = len(ask.keys), 0
    if ask.wants_proof:
        nodes = 1 if table.tree is None else table.tree.shape.max_proof(count)
    return HASH_BYTES * nodes + count * (table.info.record_bytes + 1)


def _leaves(ask: Ask, table: SliceTable, fetched: Fetched) -> HashArray:
    """The leaves of what was fetched."""
    return fetched.leaves if table.tree is None else table.tree.nodes[ask.keys]


def _places_of(ask: Ask, table: SliceTable) -> Places:
    """The nodes before the records of a block; any one place where the records decide the node."""
    if not ask.wants_proof or not len(ask.keys):
        return np.empty(0, np.int64)
    if table.tree is None:
        return np.zeros(1, np.int64)
    return place_nodes(table.tree.shape, ask.keys)


def _write_proof(
    ask: Ask, table: SliceTable, places: Places, fetched: Fetched, out: NDArray[np.uint8]
) -> None:
    """Writes the nodes before the records of a block, once the records are there."""
    nodes = out.reshape(len(places), HASH_BYTES)
    if table.tree is not None:
        copy_rows(table.tree.nodes, places, None, nodes, False)
    elif len(places):
        nodes[:] = vouch(ask.keys, _leaves(ask, table, fetched))
