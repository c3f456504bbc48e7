"""A slice service that gives devices another model than was published, under the same name."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from keyhole.crypto.merkle import Tree, hash_leaves
from keyhole.wire.assignment import Fetched


class LyingTable:
    """A table with other records; its proofs are those of the published tree, or of its own."""

    def __init__(self, table, alter, has_own_tree):
        self._table, self.info = table, table.info
        records = [
            np.frombuffer(table.segment(i), np.uint8) for i in range(len(self.info.segments))
        ]
        whole = np.concatenate(records).reshape(self.info.num_keys, self.info.record_bytes)
        self.records = alter(whole.copy())
        self.tree = Tree.of(hash_leaves(self.records)) if has_own_tree else table.tree

    async def fetch(self, keys, out=None):
        found = self.records[keys]
        if out is not None:
            out[:] = found
        return Fetched(found)

    def segment(self, place):
        segment = self.info.segments[place]
        return self.records[segment.first : segment.first + segment.count].reshape(-1).data


@contextmanager
def lying(service, place, alter, has_own_tree=False):
    """While this lasts, the service gives out `alter(records)` for those of one table."""
    hold = service.rounds.hold

    @contextmanager
    def held(round_id):
        with hold(round_id) as opened:
            tables = list(opened.tables)
            tables[place] = LyingTable(tables[place], alter, has_own_tree)
            yield replace(opened, tables=tuple(tables))

    service.rounds.hold = held
    try:
        yield
    finally:
        service.rounds.hold = hold


def believing(monkeypatch):
    """Plants the hole: devices that compare nothing with the root."""
    for module in ("keyhole.device.fetch", "keyhole.device.device"):
        monkeypatch.setattr(f"{module}.check_records", lambda *_: None)
