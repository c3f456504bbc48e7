"""Publishing a round beside copying the same bytes from one warm array to another."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import Goal, Timing, aligned_zeros, measure, memcpy, progress
from keyhole.delivery.sources import sources_of
from keyhole.server.state import ServerState
from keyhole.serving.publishing import Publisher
from slice_peers.published import WIDTH, make_state

OF_MEMCPY, DURABLE_OF_MEMCPY = 0.4, 0.15
FIRST_SAMPLES, DURABLE_SAMPLES = 3, 5
NEW_ROUNDS = 4  # rounds that are written into new files before old ones can be written over


@dataclass(frozen=True)
class Cell:
    """Seconds to publish a round of K slices of 2 KB.

    Args:
        num_keys: K.
        copy: memcpy.
        steady: writing over the files of an older round.
        first: wall, into new files.
        durable: wall, waiting for the disk.
    """

    num_keys: int
    copy: Timing
    steady: Timing
    first: float
    durable: float

    def goals(self) -> list[Goal]:
        where = f"K={self.num_keys:.0e} memcpy"
        return [
            Goal(f"{where} over publishing, CPU", self.copy.cpu / self.steady.cpu, OF_MEMCPY),
            Goal(f"{where} over publishing, wall", self.copy.wall / self.steady.wall, OF_MEMCPY),
            Goal(f"{where} over durable", self.copy.wall / self.durable, DURABLE_OF_MEMCPY),
        ]


def measure_generation(num_keys: int, root: Path) -> Cell:
    """Steady state and memcpy in turns, then first rounds, then durable ones."""
    progress(f"publishing, K={num_keys:.0e}")
    state = make_state(num_keys, has_small=False)
    source, target = aligned_zeros((num_keys, WIDTH)), aligned_zeros((num_keys, WIDTH))
    directory = root / "generation"
    with Publisher(directory) as publisher:
        publish = _publishing(publisher, state, durable=False)
        for _ in range(NEW_ROUNDS):
            publish()
        timings = measure({"memcpy": memcpy(source, target), "publish": publish})
        durably = _publishing(publisher, state, durable=True)
        durable = [_wall(durably) for _ in range(DURABLE_SAMPLES)]
    shutil.rmtree(directory)
    first = [_first(state, root / f"first-{sample}") for sample in range(FIRST_SAMPLES)]
    return Cell(
        num_keys,
        timings["memcpy"],
        timings["publish"],
        statistics.median(first),
        statistics.median(durable),
    )


def _publishing(publisher: Publisher, state: ServerState, durable: bool) -> Callable[[], None]:
    """Publishes the whole state as the next round."""

    def publish() -> None:
        publish_round(publisher, state, durable)

    return publish


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
        seconds = _wall(_publishing(publisher, state, durable=False))
    shutil.rmtree(directory)
    return seconds


def _wall(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
