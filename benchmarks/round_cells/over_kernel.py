"""A round of `keyhole train` over its client kernel alone: CPU time in one process, in turns.

A round is all of it: drawing and choosing, the data of clients, select, training, adding up, the
step, the record, and the log with its sync to the disk. The kernel is what no round can do without:
the compiled steps of its clients, here called again with the arguments that the round has just
called them with.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from harness import Goal
from keyhole.arrays import empty_on_line
from keyhole.data.federated import Dataset, FederatedData, Ragged
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.experiments.specs import spec_of
from keyhole.models import logistic
from keyhole.models.local_training import LocalSgd
from keyhole.rounds.cores import Cores

SAMPLES, WARM = 5, 10


@dataclass(frozen=True)
class Cell:
    """A task, the keys of a client in its key space, and how many times its kernel a round may
    cost."""

    task: str
    space: str
    keys: int
    at_most: float


CELLS = (
    Cell("so_tag", "word", 1_000, 4.0),
    Cell("so_tag", "word", 100, 3.0),
    Cell("emnist_2nn", "neuron", 100, 1.5),
    Cell("emnist_cnn", "filter", 16, 1.05),
)
WARM_UP_AT_MOST = 1.2  # round 2 over later ones, where buffers are largest


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a round and of its kernel, medians; and what they were in each pair."""

    task: str
    keys: int
    round_cpu: float
    kernel_cpu: float
    ratio: float
    second_over_tenth: float
    pairs: Sequence[tuple[float, float]] = field(repr=False)


def goals_of(spent: Spent) -> list[Goal]:
    """What a round may cost over its kernel, and how soon it costs no more."""
    cell = next(c for c in CELLS if (c.task, c.keys) == (spent.task, spent.keys))
    name = f"{cell.task} m={cell.keys}"
    goals = [Goal(f"{name}: kernel over a round", 1 / spent.ratio, 1 / cell.at_most)]
    if cell is CELLS[0]:
        late = 1 / spent.second_over_tenth
        goals.append(Goal(f"{name}: later rounds over round 2", late, 1 / WARM_UP_AT_MOST))
    return goals


def print_table(cells: Sequence[Spent]) -> None:
    """CPU milliseconds of a round and its kernel, and their ratio."""
    print("{:<11} {:>5} {:>9} {:>10} {:>6} {:>9}".format(*_HEAD))
    for cell in cells:
        print(
            f"{cell.task:<11} {cell.keys:5} {1e3 * cell.round_cpu:9.1f}"
            f" {1e3 * cell.kernel_cpu:10.1f} {cell.ratio:6.2f} {cell.second_over_tenth:9.2f}"
        )


_HEAD = "task", "m", "round ms", "kernel ms", "ratio", "2 / later"


def posts(users: int, examples: int, words: int, tags: int) -> Dataset:
    """Posts of Zipf words, as many of each client and as long as those of `round_cost.py`."""
    rng, vocabulary = np.random.default_rng(0), 10_000
    weights = 1.0 / (10.0 + np.arange(vocabulary))
    cumulative = np.cumsum(weights / weights.sum())
    count = users * examples

    def rows(values: np.ndarray, each: int) -> Ragged:
        ends = np.arange(len(values) // each + 1, dtype=np.int64) * each
        return Ragged(values.astype(np.int32), ends)

    drawn = np.searchsorted(cumulative, rng.random(count * words)).clip(max=vocabulary - 1)
    columns = {
        "words": rows(drawn, words),
        "title": Ragged(np.empty(0, np.int32), np.zeros(count + 1, np.int64)),
        "tags": rows(rng.integers(tags, size=3 * count), 3),
        "sentences": rows(np.full(count, words), 1),
    }
    split = FederatedData.of([f"user {i}" for i in range(users)], [examples] * users, columns)
    names = {"words": [str(w) for w in range(vocabulary)], "tags": [str(t) for t in range(tags)]}
    splits = {name: split.subset([0]) for name in ("test", "validation")}
    return Dataset("dense posts", "posts", {"train": split, **splits}, names)


def measure_cell(cell: Cell) -> Spent:
    """Makes rounds until they are warm, then pairs of a round and its kernel."""
    changes = {f"keys.{cell.space}.count": cell.keys, "client.lr": 0.1, "rounds": 1_000}
    if cell.task == "so_tag":
        changes["client.batch_size"] = 16
    spec = spec_of(cell.task, changes)
    data = posts(200, 96, 60, 500) if cell.task == "so_tag" else open_data(spec)
    experiment = Experiment(spec, data)
    with tempfile.TemporaryDirectory() as directory:
        run = experiment.start(0, Path(directory) / "trial")
        rounds = run.rounds(1_000, execute=Cores())
        warm = [_cpu(lambda: next(rounds)) for _ in range(WARM)]
        _pair(experiment, lambda: next(rounds))  # the kernel compiles once more for this thread
        pairs = [_pair(experiment, lambda: next(rounds)) for _ in range(SAMPLES)]
        rounds.close()
        run.close()
    whole, kernel = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    late = statistics.median([*warm[7:], *(a for a, _ in pairs)])
    return Spent(cell.task, cell.keys, whole, kernel, ratio, warm[1] / late, pairs)


def _pair(experiment: Experiment, make_round: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of a round, and of the kernel calls that it made."""
    with _noted_calls(experiment) as (calls, kernel):
        whole = _cpu(make_round)
    ready = [jax.tree.map(_own, arguments) for arguments in calls]
    return whole, _cpu(lambda: [jax.block_until_ready(kernel(*each)) for each in ready])


def _own(argument: Any) -> Any:
    """Arguments that a call may overwrite, and that JAX reads where they are."""
    if not isinstance(argument, np.ndarray):
        return argument
    copy = empty_on_line(argument.shape, argument.dtype)
    copy[...] = argument
    return copy


@contextmanager
def _noted_calls(experiment: Experiment) -> Iterator[tuple[list[Any], Callable[..., Any]]]:
    """The calls of the kernel within the block, and the kernel."""
    calls: list[Any] = []
    train = experiment.clients.train
    assert isinstance(train, LocalSgd)
    if train.model.plain_sgd is not None:
        place, name, kernel = vars(logistic), "_descend", logistic._descend
    else:
        place, name, kernel = vars(train), "_train", train._train

    def noting(*arguments: Any) -> Any:
        calls.append(arguments)
        return kernel(*arguments)

    place[name] = noting
    try:
        yield calls, kernel
    finally:
        place[name] = kernel


def _cpu(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
