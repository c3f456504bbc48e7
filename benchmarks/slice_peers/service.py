"""The slice service itself: over published files, on demand, or computing for every request anew.

    python service.py files PORT DIRECTORY
    python service.py slab PORT COUNTS
    python service.py naive PORT COUNTS

COUNTS is a file of one 32-bit number for each key, in which the select function counts its calls.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from keyhole.crypto.merkle import hash_leaves
from keyhole.delivery.records import RecordField, Records
from keyhole.delivery.sources import FunctionSource
from keyhole.service.app import App
from keyhole.service.on_demand import OnDemandRounds
from keyhole.service.reading import RoundsDirectory
from keyhole.service.transport import Listen, run
from keyhole.wire.assignment import Current, Fetched, OpenRound, RoundSource
from keyhole.wire.manifest import TableInfo, describe_round, encode_manifest, name_round, table_info

WIDTH = 512  # numbers of a slice of 2 KB
MAX_BYTES = 1 << 30


class NaiveTable:
    """Computes the slices of every request, whatever others have asked for."""

    tree = None

    def __init__(self, source: FunctionSource, info: TableInfo) -> None:
        self._source, self.info = source, info

    async def fetch(self, keys: np.ndarray, out: np.ndarray | None = None) -> Fetched:
        records = self._source.read(keys)
        if out is not None:
            out[:] = records
        return Fetched(records, hash_leaves(records))

    def segment(self, place: int) -> memoryview:
        raise NotImplementedError


class NaiveRounds:
    """One round of one such table."""

    def __init__(self, source: FunctionSource) -> None:
        info = table_info(source.records)
        manifest = describe_round(None, [info], 0, 0, {})
        encoded = encode_manifest(manifest)
        name = name_round(encoded, 0)
        self._round = OpenRound(name, manifest, encoded, (NaiveTable(source, info),))

    def current(self) -> Current:
        return Current(self._round.id, 0, "open")

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        yield self._round


def expensive(counts: Path) -> FunctionSource:
    """psi(x, k) = tanh(x_k W), which counts how often it is evaluated for each key."""
    evaluated = np.memmap(counts, np.uint32, "r+")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(evaluated), WIDTH)).astype(np.float32)
    W = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5

    def select_batch(x: np.ndarray, keys: np.ndarray) -> dict[str, np.ndarray]:
        np.add.at(evaluated, keys, 1)
        return {"w": np.tanh(x[keys] @ W)}

    fields = (RecordField("w", (WIDTH,), np.dtype("f4")),)
    return FunctionSource(Records("row", len(evaluated), fields), x, select_batch)


def rounds_of(kind: str, path: Path) -> RoundSource:
    if kind == "files":
        return RoundsDirectory(path)
    if kind == "naive":
        return NaiveRounds(expensive(path))
    rounds = OnDemandRounds(max_bytes=MAX_BYTES, executor=ThreadPoolExecutor(1))
    rounds.publish([expensive(path)], None, number=0)
    return rounds


def main(kind: str, port: str, path: str) -> None:
    run(lambda metrics: App(rounds_of(kind, Path(path)), metrics=metrics), Listen(port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
