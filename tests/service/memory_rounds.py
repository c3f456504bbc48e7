"""Rounds in memory: a small real `RoundSource` over arrays, for tests of the service alone."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from msgspec.structs import replace

import keyhole as kh
from keyhole.crypto.merkle import Tree, hash_leaves
from keyhole.delivery.records import PLAIN, Records
from keyhole.errors import NotFoundError, TooLateError
from keyhole.wire.assignment import Current, Fetched, OpenRound
from keyhole.wire.manifest import (
    SegmentInfo,
    describe_round,
    encode_manifest,
    name_round,
    table_info,
)

WORDS, WIDTH, CUT = 40, 3, 25


@dataclass
class MemoryTable:
    """A table whose two segments are parts of one array."""

    info: object
    records: np.ndarray
    tree: Tree
    fetches: int = 0

    async def fetch(self, keys, out=None):
        self.fetches += 1
        found = self.records[keys]
        if out is not None:
            out[:] = found
        return Fetched(found if out is None else out)

    def segment(self, place):
        if not 0 <= place < len(self.info.segments):
            raise NotFoundError("no such segment: got none; expected those there; look")
        found = self.info.segments[place]
        part = np.ascontiguousarray(self.records[found.first : found.first + found.count])
        part.flags.writeable = False
        return part.view(np.uint8).reshape(-1).data


@dataclass
class MemoryRounds:
    """Rounds that a test opens, closes and removes."""

    rounds: dict = field(default_factory=dict)
    removed: set = field(default_factory=set)
    now: Current | None = None
    held: int = 0

    def current(self, newest=False):
        return self.now

    @contextmanager
    def hold(self, round_id):
        if round_id in self.removed:
            raise TooLateError("removed: got an old round; expected newer; check in")
        if round_id not in self.rounds:
            raise NotFoundError("no such round: got none; expected those there; look")
        self.held += 1
        try:
            yield self.rounds[round_id]
        finally:
            self.held -= 1

    def open(self, number=0, cohort=None, words=WORDS, **settings):
        made = make_round(number, words, **settings)
        self.rounds[made.id] = made
        self.now = Current(made.id, number, "open", cohort)
        return made


def layout(words=WORDS):
    """A model with rows cut by word, and a part that everyone receives."""
    like = {"w": np.zeros((words, WIDTH), np.float32), "b": np.zeros(5, np.float32)}
    return kh.Layout.of(like, kh.Cut(kh.KeySpace("word", words), {"w": 0}))


def make_round(number=0, words=WORDS, **settings):
    made = layout(words)
    rng = np.random.default_rng(number)
    tables, infos = [], []
    for place, part in enumerate(made.parts):
        kinds = Records.of_part(part, PLAIN)
        values = rng.normal(size=(kinds.num_keys, kinds.slice_size)).astype(np.float32)
        records = kinds.encode_rows(values, np.arange(kinds.num_keys))
        tree, info = Tree.of(hash_leaves(records)), table_info(kinds, made, place)
        ends = [0, min(CUT, kinds.num_keys), kinds.num_keys]
        segments = tuple(
            SegmentInfo(start, stop - start) for start, stop in pairwise(ends) if stop > start
        )
        info = replace(info, root=tree.root.hex(), segments=segments)
        infos.append(info)
        tables.append(MemoryTable(info, records, tree))
    manifest = describe_round(made, infos, number, 0, {"keys_per_client": 4, **settings})
    encoded = encode_manifest(manifest)
    return OpenRound(name_round(encoded, number), manifest, encoded, tuple(tables))
