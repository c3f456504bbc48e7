"""Publishing a round beside copying the same bytes from one warm array to another.

Wall time decides here: the disk takes no CPU time, and publishing uses both cores. What trees cost
is a ratio of CPU times, to publishing with the 64-bit sums of records that were there before trees,
and to publishing without either.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import numpy as np
from numba import njit
from numpy.typing import NDArray

from harness import Goal, aligned_zeros, memcpy, progress
from keyhole.crypto.merkle import HASH_BYTES, Tree
from keyhole.delivery.sources import sources_of
from keyhole.server.state import ServerState
from keyhole.service import segments
from keyhole.service.publishing import Publisher
from slice_peers.published import WIDTH, make_state

OF_MEMCPY, DURABLE_OF_MEMCPY, OF_SUMMED = 0.4, 0.15, 0.6
SAMPLES, FIRST_SAMPLES = 5, 3
NEW_ROUNDS = 4  # rounds that are written into new files before old ones can be written over


@dataclass(frozen=True)
class Cell:
    """Wall seconds of a round of K slices of 2 KB, medians; CPU seconds where they are named.

    Args:
        num_keys: K.
        copy: memcpy.
        steady: writing over the files of an older round, with as many threads as there are cores.
        steady_cpu: likewise, CPU seconds of all threads.
        first: into new files.
        durable: waiting for the disk.
        summed_cpu: as steady_cpu, with a 64-bit sum of each record in place of hashes: it finds
            damage, and binds nothing.
        treeless: as steady, but nothing is hashed: what devices receive would be bound to nothing.
        treeless_cpu: likewise, CPU seconds of all threads.
        treeless_durable: as durable, likewise.
    """

    num_keys: int
    copy: float
    steady: float
    steady_cpu: float
    first: float
    durable: float
    summed_cpu: float
    treeless: float
    treeless_cpu: float
    treeless_durable: float

    def goals(self) -> list[Goal]:
        where = f"K={self.num_keys:.0e} memcpy"
        return [
            Goal(f"{where} over publishing", self.copy / self.steady, OF_MEMCPY),
            Goal(f"{where} over durable publishing", self.copy / self.durable, DURABLE_OF_MEMCPY),
            Goal(
                f"K={self.num_keys:.0e} rate of publishing over that with 64-bit sums",
                self.summed_cpu / self.steady_cpu,
                OF_SUMMED,
            ),
        ]


def measure_generation(num_keys: int, root: Path) -> Cell:
    """Copies, rounds and durable rounds in turns; then first rounds."""
    progress(f"publishing, K={num_keys:.0e}")
    state = make_state(num_keys, has_small=False)
    source, target = aligned_zeros((num_keys, WIDTH)), aligned_zeros((num_keys, WIDTH))
    directory = root / "generation"
    with Publisher(directory) as publisher:
        works = {
            "copy": memcpy(source, target),
            "steady": _publishing(publisher, state, durable=False),
            "durable": _publishing(publisher, state, durable=True),
            "summed": _without_trees(_publishing(publisher, state, durable=False), sum_records),
            "treeless": _without_trees(_publishing(publisher, state, durable=False)),
            "treeless_durable": _without_trees(_publishing(publisher, state, durable=True)),
        }
        for _ in range(NEW_ROUNDS):
            works["steady"]()
        taken = [{name: _timed(work) for name, work in works.items()} for _ in range(SAMPLES)]
    shutil.rmtree(directory)
    first = [_first(state, root / f"first-{sample}") for sample in range(FIRST_SAMPLES)]
    wall = {name: statistics.median(each[name][1] for each in taken) for name in works}
    cpu = {name: statistics.median(each[name][0] for each in taken) for name in works}
    return Cell(
        num_keys,
        wall["copy"],
        wall["steady"],
        cpu["steady"],
        statistics.median(first),
        wall["durable"],
        cpu["summed"],
        wall["treeless"],
        cpu["treeless"],
        wall["treeless_durable"],
    )


def _publishing(publisher: Publisher, state: ServerState, durable: bool) -> Callable[[], None]:
    """Publishes the whole state as the next round."""

    def publish() -> None:
        publish_round(publisher, state, durable)

    return publish


def _none(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.zeros((1, HASH_BYTES), np.uint8)


def sum_records(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """What was made of records before they were hashed: a multilinear sum of 64 bits each (Lemire
    and Kaser, 2014), at the front of where a leaf would be."""
    words = np.ascontiguousarray(rows).view(np.uint32)
    constants = np.random.default_rng(0).integers(0, 2**64, (2, words.shape[1]), np.uint64)
    out = np.zeros((len(rows), HASH_BYTES // 8), np.uint64)
    words.flags.writeable = False
    _sum_words(words, constants[0], constants[1], out)
    return out.view(np.uint8)


@njit(cache=True, nogil=True)
def _sum_words(words, a, b, out):  # type: ignore[no-untyped-def]
    half = np.uint64(32)
    for record in range(len(words)):
        first, second = a[0], b[0]
        for i in range(words.shape[1]):
            word = np.uint64(words[record, i])
            first += a[i] * word
            second += b[i] * word
        out[record, 0] = first >> half << half | second >> half


def _without_trees(
    publish: Callable[[], None],
    make: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = _none,
) -> Callable[[], None]:
    """The same work without a tree: rounds have no roots, and records what `make` says."""

    def work() -> None:
        with (
            patch.object(segments, "hash_leaves", make),
            patch.object(Tree, "join", lambda tree: None),
        ):
            publish()

    return work


def publish_round(publisher: Publisher, state: ServerState, durable: bool) -> None:
    """All of it: nothing is said about what changed."""
    numbers = [int(path.name.split("-")[0]) for path in _rounds(publisher.directory)]
    publisher.publish(
        sources_of(state),
        layout=state.layout,
        number=max(numbers, default=-1) + 1,
        step=0,
        durable=durable,
    )


def _rounds(directory: Path) -> list[Path]:
    return [path for path in (directory / "rounds").iterdir() if path.name[0].isdigit()]


def _first(state: ServerState, directory: Path) -> float:
    with Publisher(directory) as publisher:
        seconds = _timed(_publishing(publisher, state, durable=False))[1]
    shutil.rmtree(directory)
    return seconds


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    """CPU and wall seconds."""
    os.sync()  # else one round is charged for what another left to be written
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall
