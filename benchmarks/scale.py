"""A round's cost does not depend on the number of keys: K = 10^4 to 10^9, lazy tables.

50 clients select 1000 keys each. A round gathers their rows, sums 50,000 update rows under their
keys and makes one optimizer step; appending the sums to the delta log (without waiting for the
disk) is measured beside it. What the clients do is not.

With K = 10^4 keys, 50,000 uniform keys hold at most 10,000 distinct ones; with K = 10^9 nearly all
are distinct, which is five times the work for the optimizer whatever the table. So there are two
workloads:

* spread: clients draw from 10,000 keys that lie evenly in 0..K-1. The work is the same for every K,
  which makes 10^4 and 10^9 comparable; the table holds those rows after the first rounds.
* uniform: clients draw from all K keys, five rounds from an empty table, growth included. Compared
  from K = 10^6 on, where 220,000 to 250,000 rows are made; K = 10^4 is shown.

Memory is the growth of the process's peak during five rounds from an empty table, in a process of
its own.

    python benchmarks/scale.py --check
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from harness import Goal, Timing, finish, machine_facts, measure, parser, progress
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.initial import Normal
from keyhole.server.log import DeltaLog, Entry, create_log
from keyhole.server.optimizers import SGD, Adagrad, Adam, Optimizer
from keyhole.server.row_sums import RowUpdate
from keyhole.server.rows import sum_rows
from keyhole.server.state import ServerState

CLIENTS, KEYS_PER_CLIENT, ROUNDS, DISTINCT = 50, 1000, 5, 10_000
SIZES = (10**4, 10**6, 10**8, 10**9)
WIDTHS = (1, 8)
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": SGD(0.1),
    "adagrad": Adagrad(0.1),
    "adam": Adam(0.1),
}
BASE = {"spread": 10**4, "uniform": 10**6}
FLAT = 1.3  # the largest cost beside that of the smallest table compared
DURABLE_ROWS, DURABLE_SECONDS = 10**6, 0.3
RESULTS = Path(__file__).parent / "results" / "scale.json"


@dataclass(frozen=True)
class Cell:
    """One optimizer on tables of one size."""

    workload: str
    optimizer: str
    width: int
    num_keys: int
    rows: int
    round: Timing
    append: Timing
    peak_bytes: int


@dataclass(frozen=True)
class DurableAppend:
    """Wall time of one append that waits for the disk, median of five."""

    width: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class Load:
    """The keys and update rows of some rounds on one table."""

    num_keys: int
    optimizer: Optimizer
    keys: Sequence[np.ndarray]
    rows: np.ndarray

    @staticmethod
    def of(workload: str, num_keys: int, width: int, optimizer: Optimizer) -> Load:
        rng = np.random.default_rng(0)
        count = CLIENTS * KEYS_PER_CLIENT
        if workload == "spread":
            spacing = num_keys // DISTINCT
            keys = [rng.integers(0, DISTINCT, count) * spacing for _ in range(ROUNDS)]
        else:
            keys = [rng.integers(0, num_keys, count) for _ in range(ROUNDS)]
        return Load(num_keys, optimizer, keys, rng.normal(size=(count, width)).astype(np.float32))

    def state(self) -> ServerState:
        """An empty lazy table."""
        word = KeySpace("word", self.num_keys)
        like = {"w": np.broadcast_to(np.float32(0), (self.num_keys, self.rows.shape[1]))}
        layout = Layout.of(like, Cut(word, {"w": 0}))
        return ServerState.lazy(layout, self.optimizer, {"w": Normal(0.1)})

    def update(self, at: int) -> RowUpdate:
        """The sum of one round."""
        return RowUpdate(*sum_rows(self.keys[at % ROUNDS], self.rows))

    def play(self, state: ServerState) -> ServerState:
        """One round: select, sum, step."""
        state.rows(0, self.keys[state.steps % ROUNDS])
        state.step([self.update(state.steps)])
        return state

    def play_from_nothing(self) -> ServerState:
        """The first rounds of a run."""
        state = self.state()
        for _ in range(ROUNDS):
            self.play(state)
        return state


def rounds_of(workload: str, load: Load) -> Callable[[], object]:
    """What is timed: rounds of a table that holds its rows, or all rounds from an empty one."""
    if workload == "uniform":
        return load.play_from_nothing
    return partial(load.play, load.play_from_nothing())


def appends_of(load: Load, directory: Path) -> Callable[[], object]:
    """Appends one round's sums to a log that starts anew each time, left to the system to write."""
    layout, updates, path = load.state().layout, (load.update(0),), directory / "log"
    end = create_log(path, layout, 0)

    def append() -> None:
        log = DeltaLog.open(path, end)
        log.append(Entry(1, updates), durable=False)
        log.close()

    return append


def peak_growth(load: Load) -> int:
    """Bytes by which the process's peak grew during the first rounds; kernels are loaded before."""
    Load(10, load.optimizer, [np.arange(10)] * ROUNDS, load.rows[:10]).play_from_nothing()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status_bytes("VmRSS")
    load.play_from_nothing()
    return status_bytes("VmHWM") - before


def status_bytes(field: str) -> int:
    """A size from the kernel's account of this process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found, field
    return int(found[1]) * 1024


def measure_group(workload: str, name: str, width: int, sizes: Sequence[int]) -> list[Cell]:
    """All table sizes take turns."""
    loads = {size: Load.of(workload, size, width, OPTIMIZERS[name]) for size in sizes}
    rounds = measure({str(size): rounds_of(workload, load) for size, load in loads.items()})
    per_call = ROUNDS if workload == "uniform" else 1
    cells = []
    with tempfile.TemporaryDirectory() as directory:
        for size, load in loads.items():
            append = measure({"append": appends_of(load, Path(directory))})["append"]
            with multiprocessing.get_context("forkserver").Pool(1) as pool:
                peak = pool.apply(peak_growth, (load,))
            timing = rounds[str(size)]
            one = Timing(
                timing.cpu / per_call,
                timing.wall / per_call,
                timing.samples,
                timing.calls_per_sample,
            )
            held = len(np.unique(np.concatenate(load.keys)))
            cells.append(Cell(workload, name, width, size, held, one, append, peak))
    return cells


def measure_durable(width: int, directory: Path) -> DurableAppend:
    """One million rows, five times, waiting for the disk."""
    keys = np.arange(DURABLE_ROWS, dtype=np.int64) * 1000
    load = Load(10**9, SGD(1), [keys], np.ones((DURABLE_ROWS, width), np.float32))
    update = RowUpdate(keys, load.rows)
    path, seconds = directory / "log", []
    log = DeltaLog.open(path, create_log(path, load.state().layout, 0))
    for step in range(1, 6):
        start = time.perf_counter()
        log.append(Entry(step, (update,)))
        seconds.append(time.perf_counter() - start)
    log.close()
    return DurableAppend(width, DURABLE_ROWS, float(np.median(seconds)))


def goals(cells: Sequence[Cell], durable: Sequence[DurableAppend]) -> list[Goal]:
    """Flat in time and memory, and a durable round in less than 0.3 s."""
    found = []
    for cell in cells:
        base = next(
            c
            for c in cells
            if (c.workload, c.optimizer, c.width) == (cell.workload, cell.optimizer, cell.width)
            and c.num_keys == BASE[cell.workload]
        )
        if cell.num_keys > base.num_keys:
            where = f"{cell.workload} {cell.optimizer} d={cell.width} K={cell.num_keys:.0e}"
            ratio = base.round.cpu / cell.round.cpu
            found.append(Goal(f"{where} time of K={base.num_keys:.0e} over it", ratio, 1 / FLAT))
            ratio = base.peak_bytes / cell.peak_bytes
            found.append(Goal(f"{where} memory of K={base.num_keys:.0e} over it", ratio, 1 / FLAT))
    for append in durable:
        name = f"{DURABLE_SECONDS} s over a durable append of 1e6 rows, d={append.width}"
        found.append(Goal(name, DURABLE_SECONDS / append.seconds, 1.0))
    return found


def show(cell: Cell) -> None:
    print(
        f"{cell.workload:8} {cell.optimizer:8} {cell.width:5} {cell.num_keys:8.0e} {cell.rows:8}"
        f" {cell.round.cpu * 1e3:9.2f} {cell.round.wall * 1e3:9.2f} {cell.append.cpu * 1e3:9.2f}"
        f" {cell.peak_bytes / 2**20:9.1f}"
    )


def main() -> int:
    flags = parser(__doc__.splitlines()[0], RESULTS).parse_args()
    sizes = SIZES[:2] + SIZES[-1:] if flags.quick else SIZES
    widths, names = ((8,), ("adam",)) if flags.quick else (WIDTHS, tuple(OPTIMIZERS))
    print(machine_facts())
    print("workload optimizer  width        K     rows    cpu ms   wall ms append ms   peak MB")
    cells: list[Cell] = []
    for workload in BASE:
        for width in widths:
            for name in names:
                progress(f"{workload}, {name}, width {width}")
                group = measure_group(workload, name, width, sizes)
                for cell in group:
                    show(cell)
                cells += group
    with tempfile.TemporaryDirectory() as directory:
        durable = [measure_durable(width, Path(directory)) for width in WIDTHS]
    for append in durable:
        print(f"durable append of {append.rows} rows, width {append.width}: {append.seconds:.3f} s")
    return finish(flags, "scale", [*cells, *durable], goals(cells, durable))


if __name__ == "__main__":
    sys.exit(main())
