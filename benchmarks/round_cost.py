"""The cost of a whole round: tag regression, n words x 500 tags, 50 clients with m keys each.

Each client has 96 examples of 60 Zipf words and makes one epoch in batches of 16; the server steps
with row-sparse Adagrad. A round is everything: choosing keys, delivery, training, adding up, the
step and the record. Beside it stand a round of the same work in plain NumPy, and TensorFlow
Federated 0.87, measured once on a machine of this kind (2 cores): it is not run here.

Then whole rounds of `keyhole train`, their log and its sync included, over their client kernel
alone (`round_cells/over_kernel.py`).

CPU time decides. Memory is the peak of a process that imports keyhole and runs rounds, all
included.

    python benchmarks/round_cost.py --check
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# Threads of BLAS that spin after a product would be charged to the next measurement.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from harness import Goal, Timing, finish, machine_facts, measure, parser, progress
from keyhole.arrays import keep_freed_memory
from keyhole.keys.choice import ClientContext
from keyhole.rounds.cores import use_one_thread
from round_cells import over_kernel

CLIENTS, EXAMPLES, WORDS, TAGS, BATCH = 50, 96, 60, 500, 16
CLIENT_LR, SERVER_LR, EPS, START = 0.1, 0.1, 1e-3, 0.1
SIZES = (10_000, 100_000, 1_000_000)
KEYS = (100, 1_000)
RESULTS = Path(__file__).parent / "results" / "round_cost.json"

OVER_NUMPY = 1.1

# TensorFlow Federated 0.87 on 2 cores: CPU seconds of a round, and peak bytes.
TFF_SECONDS = {(10_000, 100): 1.8, (10_000, 1_000): 5.2, (100_000, 100): 17.0}
TFF_BYTES = {(100_000, 100): 18e9}
LESS_CPU = {(10_000, 100): 25.0, (100_000, 100): 150.0}
LESS_MEMORY = {(100_000, 100): 30.0}


@dataclass(frozen=True)
class Cell:
    """One n and m."""

    num_keys: int
    keys_per_client: int
    ours: Timing
    numpy: Timing
    peak_bytes: int

    def goals(self) -> list[Goal]:
        """No slower than NumPy, and this many times less than TensorFlow Federated."""
        place = (self.num_keys, self.keys_per_client)
        where = f"round n={self.num_keys} m={self.keys_per_client}"
        over_numpy = self.numpy.cpu / self.ours.cpu
        goals = [Goal(f"{where}: NumPy's CPU over ours", over_numpy, OVER_NUMPY)]
        if place in LESS_CPU:
            less = TFF_SECONDS[place] / self.ours.cpu
            goals.append(Goal(f"{where}: TFF's CPU over ours", less, LESS_CPU[place]))
        if place in LESS_MEMORY:
            less = TFF_BYTES[place] / self.peak_bytes
            goals.append(Goal(f"{where}: TFF's memory over ours", less, LESS_MEMORY[place]))
        return goals


@dataclass(frozen=True)
class Data:
    """A client: its words by falling frequency, its examples as ranks among those, and tags."""

    ranked: np.ndarray
    ranks: np.ndarray
    tags: np.ndarray


def make_data(num_keys: int, client: int) -> Data:
    """Zipf words over the whole vocabulary, three tags for each example."""
    rng = np.random.default_rng([num_keys, client])
    weights = 1.0 / (10.0 + np.arange(num_keys))
    cumulative = np.cumsum(weights / weights.sum())
    words = np.searchsorted(cumulative, rng.random((EXAMPLES, WORDS))).clip(max=num_keys - 1)
    own, inverse, counts = np.unique(words, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.empty(len(own), np.int32)
    rank[order] = np.arange(len(own), dtype=np.int32)
    tags = np.zeros((EXAMPLES, TAGS), np.float32)
    np.put_along_axis(tags, rng.integers(TAGS, size=(EXAMPLES, 3)), 1.0, axis=1)
    return Data(own[order].astype(np.int64), rank[inverse.reshape(words.shape)], tags)


def keyhole_round(num_keys: int, m: int, data: list[Data]) -> Callable[[], object]:
    """Rounds of the library, each a call."""
    from keyhole.models.client_update import ClientUpdate
    from keyhole.models.local_training import LocalSgd
    from keyhole.models.logistic import tag_regression
    from keyhole.primitives.layout import Layout
    from keyhole.rounds.clients import Clients
    from keyhole.rounds.round import run_round
    from keyhole.rounds.spec import RunParts
    from keyhole.sampling import Cohorts
    from keyhole.server.optimizers import Adagrad
    from keyhole.server.state import ServerState

    model = tag_regression(num_keys, TAGS)
    (cut,) = model.cuts
    like = {
        "kernel": np.broadcast_to(np.float32(0), (num_keys, TAGS)),
        "bias": np.zeros(TAGS, "f4"),
    }
    layout = Layout.of(like, cut)
    local = LocalSgd(model, ClientUpdate(CLIENT_LR, batch_size=BATCH))

    def choose(own: Data, context: ClientContext) -> object:
        return cut.space.keys(own.ranked[: context.max_keys["word"]])

    def localize(own: Data, keys: object) -> dict[str, np.ndarray]:
        return {"words": np.where(own.ranks < m, own.ranks, np.int32(-1)), "tags": own.tags}

    clients = Clients(CLIENTS, data.__getitem__, choose, local, localize)
    plan = RunParts(Cohorts(CLIENTS, CLIENTS), {"word": m})
    state = ServerState.lazy(layout, Adagrad(SERVER_LR, eps=EPS, initial=START))

    def work() -> object:
        updates, record = run_round(state.steps, state, clients, plan)
        assert updates is not None
        state.step(updates)
        return record

    return work


def numpy_round(num_keys: int, m: int, data: list[Data]) -> Callable[[], object]:
    """The same work, written plainly: dense bags, one client after the other."""
    kernel, bias = np.zeros((num_keys, TAGS), np.float32), np.zeros(TAGS, np.float32)
    squares, bias_squares = {}, np.full(TAGS, START, np.float32)
    rng = np.random.default_rng(0)
    losses: list[float] = []

    def client(own: Data) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        keys = own.ranked[:m]
        start = kernel[keys]
        weights, offset = start.copy(), bias.copy()
        bags = np.zeros((EXAMPLES, len(keys) + 1), np.float32)
        np.put_along_axis(bags, np.minimum(own.ranks, len(keys)), 1.0, axis=1)
        bags = np.ascontiguousarray(bags[:, :-1])
        order = rng.permutation(EXAMPLES)
        for at in range(0, EXAMPLES, BATCH):
            batch = order[at : at + BATCH]
            x = bags[batch]
            scores = x @ weights + offset
            probability, truth = 1 / (1 + np.exp(-scores)), own.tags[batch]
            loss = -np.log(np.abs(1 - truth - probability)).sum()  # of each tag, as ours reports it
            losses.append(float(loss))
            error = (probability - truth) * np.float32(CLIENT_LR / BATCH)
            weights -= x.T @ error
            offset -= error.sum(axis=0)
        return keys, start - weights, bias - offset

    def work() -> None:
        nonlocal bias_squares, bias
        losses.clear()
        results = [client(own) for own in data]
        keys = np.concatenate([z for z, _, _ in results])
        distinct, inverse = np.unique(keys, return_inverse=True)
        total = np.zeros((len(distinct), TAGS), np.float32)
        start = 0
        for z, update, _ in results:
            total[inverse[start : start + len(z)]] += update  # keys of one client are distinct
            start += len(z)
        total /= np.float32(CLIENTS)
        mean = np.add.reduce([u for _, _, u in results]) / np.float32(CLIENTS)
        sums = np.stack([squares.get(k, _START) for k in distinct.tolist()]) + total**2
        squares.update(zip(distinct.tolist(), sums, strict=True))
        kernel[distinct] -= np.float32(SERVER_LR) * total / np.sqrt(sums + np.float32(EPS))
        bias_squares = bias_squares + mean**2
        bias = bias - np.float32(SERVER_LR) * mean / np.sqrt(bias_squares + np.float32(EPS))

    return work


_START = np.full(TAGS, START, np.float32)


def peak_bytes(num_keys: int, m: int) -> int:
    """Peak memory of a process that runs three rounds."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_run_alone, (num_keys, m))


def _run_alone(num_keys: int, m: int) -> int:
    keep_freed_memory()
    work = keyhole_round(num_keys, m, [make_data(num_keys, c) for c in range(CLIENTS)])
    for _ in range(3):
        work()
    # ru_maxrss would start from the parent's peak; VmHWM is this process's own.
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(peak) * 1024


def measure_cell(num_keys: int, m: int) -> Cell:
    """Times both contestants in turn."""
    data = [make_data(num_keys, client) for client in range(CLIENTS)]
    makers = {"ours": keyhole_round, "numpy": numpy_round}
    timings = measure({name: make(num_keys, m, data) for name, make in makers.items()})
    return Cell(num_keys, m, **timings, peak_bytes=peak_bytes(num_keys, m))


def print_table(cells: list[Cell]) -> None:
    """CPU seconds of a round, ratios, and memory."""
    facts = machine_facts()
    print(f"{facts['cpu']}, {facts['cores']} cores, {facts['date']}, commit {facts['commit']}")
    head = ("n", "m", "keyhole s", "NumPy s", "NumPy/ours", "TFF/ours", "peak MB")
    print("{:>8} {:>5} {:>10} {:>8} {:>10} {:>9} {:>8}".format(*head))
    for cell in cells:
        place = (cell.num_keys, cell.keys_per_client)
        tff = TFF_SECONDS[place] / cell.ours.cpu if place in TFF_SECONDS else float("nan")
        print(
            f"{place[0]:8} {place[1]:5} {cell.ours.cpu:10.4f} {cell.numpy.cpu:8.4f}"
            f" {cell.numpy.cpu / cell.ours.cpu:10.2f} {tff:9.1f} {cell.peak_bytes / 1e6:8.0f}"
        )


def main() -> int:
    """Measures, prints, and checks what was promised."""
    use_one_thread()
    keep_freed_memory()  # as the command line does; NumPy gains by it, too
    flags = parser(__doc__ or "", RESULTS).parse_args()
    cells = []
    for num_keys in SIZES[:1] if flags.quick else SIZES:
        for m in KEYS:
            progress(f"round n={num_keys} m={m}")
            cells.append(measure_cell(num_keys, m))
    print_table(cells)
    rounds = []
    for cell in over_kernel.CELLS[:2] if flags.quick else over_kernel.CELLS:
        progress(f"round over its kernel: {cell.task} m={cell.keys}")
        rounds.append(over_kernel.measure_cell(cell))
    over_kernel.print_table(rounds)
    goals = [goal for cell in cells for goal in cell.goals()]
    goals += [goal for spent in rounds for goal in over_kernel.goals_of(spent)]
    return finish(flags, "round_cost", [*cells, *rounds], goals)


if __name__ == "__main__":
    sys.exit(main())
