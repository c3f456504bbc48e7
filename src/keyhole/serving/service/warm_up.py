"""Warm-up: the compiled code that queries run is there before the first of them.

It is kept on disk once it has been compiled; to load it takes a third of a second, to compile it
some seconds, and while a query waits for that every other one waits too.
"""

from __future__ import annotations

import numpy as np

from keyhole.server.record_sums import compiled, sum_records
from keyhole.serving.files.mapped_tables import MappedTable
from keyhole.serving.manifest import SegmentInfo, TableInfo
from keyhole.serving.on_demand.slab import Slab

__all__ = ["warm_up"]


def warm_up() -> None:
    """Asks tables of a few bytes for a few keys, in every way in which queries do."""
    keys, halves = np.array([3, 0]), tuple(SegmentInfo(first, 2, "") for first in (0, 2))
    info = TableInfo("warm-up", 4, None, (), "plain", 0, 4, halves)
    records, sums = np.zeros((4, 4), np.uint8), np.zeros(4, np.uint64)
    records.flags.writeable = sums.flags.writeable = False  # as mapped ones are
    parts = (records[:2], records[2:]), (sums[:2], sums[2:])
    for whole in (None, (records, sums)):
        MappedTable(info, *parts, whole).gather(keys)
    Slab(2**62, 4, most_bytes=10**5).claim(keys)  # too many keys for slots of their own
    compiled()
    sum_records(np.zeros((4, 4), np.uint8))
