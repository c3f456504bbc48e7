"""Local training against an eager PyTorch loop of the same model, one epoch per client, one thread.

    python benchmarks/clients.py [--check] [--quick] [--json]

Both sides take turns in one process. Where PyTorch is not installed, its side is the time kept in
results/clients.json, scaled by how long NumPy takes for the same small products now and then; the
table says "kept". Last comes the time from an empty process to its first update.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness import Goal, finish, measure, parser, progress
from keyhole import tree
from keyhole.arrays import keep_freed_memory
from keyhole.models.client_update import ClientUpdate
from keyhole.models.cnn import cnn
from keyhole.models.dense import two_layer
from keyhole.models.local_training import LocalSgd, draw_batches
from keyhole.models.logistic import tag_regression
from keyhole.models.model import Model
from keyhole.models.transformer import transformer
from keyhole.rounds.cores import use_one_thread

try:
    import torch
    from torch.nn import functional
except ImportError:  # optional: the kept measurement stands in
    torch = None

RESULTS = Path(__file__).parent / "results" / "clients.json"
RATE = 0.1
Client = tuple[dict, dict[str, np.ndarray], np.random.Generator]  # slices, data, rng
FIRST_UPDATE_GOAL = 10.0  # seconds
FIRST_UPDATE = """
import sys, time
sys.modules["torch"] = None  # a user of keyhole alone does not wait for its import
start = time.perf_counter()
import clients
imported = time.perf_counter()
task = next(task for task in clients.tasks(is_quick=True) if task.name == sys.argv[1])
clients.train_alone(task)
print(imported - start, time.perf_counter() - imported)
"""


@dataclass(frozen=True)
class Cell:
    """CPU seconds of a cohort's epoch, and of PyTorch's; the ratio that was promised."""

    task: str
    clients: int
    batch_size: int
    keyhole_cpu: float
    torch_cpu: float
    yardstick_cpu: float
    is_torch_kept: bool
    ratio: float
    at_most: float


@dataclass(frozen=True)
class FirstRound:
    """Seconds from an empty process to the first client's update: the import, then the rest."""

    task: str
    import_seconds: float
    update_seconds: float


@dataclass(frozen=True)
class Task:
    """One row of the table: a model, how many keys each client has, and its data."""

    name: str
    model: Model
    keys: dict[str, int]
    clients: int
    batch_size: int
    at_most: float
    data: Callable[[np.random.Generator], dict[str, np.ndarray]]
    torch_loss: Callable[..., object]


def images(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "pixels": rng.random((200, 28, 28), np.float32),
        "label": rng.integers(0, 62, 200).astype(np.int32),
    }


def posts(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {
        "words": rng.permuted(np.tile(np.arange(1000), (96, 1)), axis=1)[:, :60].astype(np.int32),
        "tags": (rng.random((96, 500)) < 0.006).astype(np.float32),
    }


def sentences(words: int) -> Callable[[np.random.Generator], dict[str, np.ndarray]]:
    return lambda rng: {"tokens": rng.integers(1, words, (64, 21)).astype(np.int32)}


def torch_two_layer(w, batch):
    x = batch["pixels"].flatten(1)
    for name in ("dense1", "dense2"):
        x = functional.relu(torch.addmm(w[f"{name}/bias"], x, w[f"{name}/kernel"]))
    logits = torch.addmm(w["dense3/bias"], x, w["dense3/kernel"])
    return functional.cross_entropy(logits, batch["label"])


def torch_cnn(w, batch):
    """Kernels are (out, in, height, width) here, the layout that PyTorch is made for."""
    x = batch["pixels"][:, None]
    for name in ("conv1", "conv2"):
        x = functional.conv2d(x, w[f"{name}/kernel"], w[f"{name}/bias"], padding=2)
        x = functional.max_pool2d(functional.relu(x), 2)
    x = functional.relu(torch.addmm(w["dense1/bias"], x.flatten(1), w["dense1/kernel"]))
    logits = torch.addmm(w["dense2/bias"], x, w["dense2/kernel"])
    return functional.cross_entropy(logits, batch["label"])


def torch_tags(w, batch):
    """Dense bags of words: faster here than `embedding_bag`, whose gradient is dense as well."""
    bags = torch.zeros(len(batch["words"]), len(w["kernel"])).scatter_(1, batch["words"], 1.0)
    scores = torch.addmm(w["bias"], bags, w["kernel"])
    losses = functional.binary_cross_entropy_with_logits(scores, batch["tags"], reduction="sum")
    return losses / len(bags)


def torch_transformer(w, batch):
    tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

    def dense(name, x):
        return functional.linear(x, w[f"{name}/kernel"].T, w[f"{name}/bias"])

    def norm(name, x):
        return functional.layer_norm(x, (512,), w[f"{name}/scale"], w[f"{name}/bias"], eps=1e-6)

    n, length = tokens.shape
    rate = 10_000.0 ** (-2.0 * torch.arange(48) / 96)
    angle = torch.arange(length)[:, None] * rate
    x = functional.embedding(tokens, w["embedding"]) * 96**0.5 + torch.cat(
        [angle.sin(), angle.cos()], 1
    )
    x = dense("widen", x)
    query, key, value = (
        dense(f"attention/{name}", x).view(n, length, 8, 64).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    mixed = mixed.transpose(1, 2).reshape(n, length, 512)
    x = norm("norm1", x + dense("attention/output", mixed))
    x = norm("norm2", x + dense("ffn_out", functional.relu(dense("ffn_in", x))))
    logits = functional.linear(dense("narrow", x), w["output/kernel"], w["output/bias"])
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def tasks(is_quick: bool) -> list[Task]:
    dense, tags = two_layer(), tag_regression()
    small = [
        Task("2NN m=200", dense, {"neuron": 200}, 50, 20, 0.6, images, torch_two_layer),
        Task("2NN m=50", dense, {"neuron": 50}, 50, 20, 0.5, images, torch_two_layer),
        Task("tags m=1000", tags, {"word": 1000}, 50, 16, 0.25, posts, torch_tags),
    ]
    if is_quick:
        return small
    conv, words = cnn(), transformer()
    return [
        Task("CNN m=64", conv, {"filter": 64}, 10, 20, 1.0, images, torch_cnn),
        Task("CNN m=8", conv, {"filter": 8}, 10, 20, 0.55, images, torch_cnn),
        *small,
        *(
            Task(
                f"transformer m={m}",
                words,
                {"word": m, "neuron": 2048},
                4,
                16,
                1.1,
                sentences(m),
                torch_transformer,
            )
            for m in (10_004, 1000)
        ),
    ]


def make_clients(task: Task, count: int) -> list[Client]:
    """Clients that hold the first m keys and data of their own."""
    spaces = task.model.layout.spaces
    keys = [space.keys(np.arange(task.keys[space.name])) for space in spaces]
    slices = task.model.layout.select(task.model.init(0), keys)
    return [
        (slices, task.data(np.random.default_rng(i)), np.random.default_rng(i))
        for i in range(count)
    ]


def train_alone(task: Task) -> None:
    """What a new process does before its first update arrives."""
    use_one_thread()
    by_keyhole(task, make_clients(task, 1))()


def by_keyhole(task: Task, clients: list[Client]) -> Callable[[], object]:
    slots = {name: [m] for name, m in task.keys.items()}
    train = LocalSgd(task.model, ClientUpdate(RATE, batch_size=task.batch_size), slots)
    return lambda: [train(*client) for client in clients]


def by_torch(task: Task, clients: list[Client]) -> Callable[[], object]:
    """Start minus end after the same epoch, in the way that is usual in PyTorch."""
    torch.set_num_threads(1)
    settings = ClientUpdate(RATE, batch_size=task.batch_size)
    start = {path: as_torch(path, array) for path, array in tree.flatten(clients[0][0]).items()}
    held = [{name: torch.tensor(a) for name, a in data.items()} for _, data, _ in clients]
    for data in held:
        for name in data.keys() & {"label", "words", "tokens"}:
            data[name] = data[name].long()

    def train(data, rng):
        w = {path: array.clone().requires_grad_() for path, array in start.items()}
        sgd = torch.optim.SGD(w.values(), lr=RATE)
        count = len(next(iter(data.values())))
        for batch in draw_batches(settings, count, rng):
            index = torch.from_numpy(batch[batch >= 0])
            sgd.zero_grad()
            task.torch_loss(w, {name: array[index] for name, array in data.items()}).backward()
            sgd.step()
        return {path: (start[path] - w[path].detach()).numpy() for path in w}

    return lambda: [train(data, rng) for data, (_, _, rng) in zip(held, clients, strict=True)]


def as_torch(path: str, array: np.ndarray):
    """The same numbers in PyTorch's layout."""
    if path.startswith("conv") and array.ndim == 4:
        array = array.transpose(3, 2, 0, 1)
    elif array.ndim == 4:
        array = array.transpose(2, 0, 1, 3).reshape(-1, array.shape[-1])
    return torch.tensor(np.ascontiguousarray(array))


def measure_cell(task: Task, kept: dict[str, float]) -> Cell:
    progress(task.name)
    clients = make_clients(task, task.clients)
    contestants = {"keyhole": by_keyhole(task, clients), "yardstick": yardstick()}
    if torch:
        contestants["torch"] = by_torch(task, clients)
    timings = measure(contestants)
    ours, unit = timings["keyhole"].cpu, timings["yardstick"].cpu
    theirs = timings["torch"].cpu if torch else kept.get(task.name, math.nan) * unit
    return Cell(
        task.name,
        task.clients,
        task.batch_size,
        ours,
        theirs,
        unit,
        not torch,
        ours / theirs,
        task.at_most,
    )


def measure_first_update(name: str) -> FirstRound:
    """In a process of its own, with an empty directory for what numba compiles."""
    progress(f"first update of {name}")
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [sys.executable, "-c", FIRST_UPDATE, name],
            cwd=here,
            env={**os.environ, "NUMBA_CACHE_DIR": empty},
            capture_output=True,
            text=True,
            check=True,
        )
    return FirstRound(name, *map(float, done.stdout.split()))


def kept_times() -> dict[str, float]:
    """PyTorch's CPU time by task as last measured, in units of the yardstick."""
    if not RESULTS.exists():
        return {}
    cells = json.loads(RESULTS.read_text())["cells"]
    return {c["task"]: c["torch_cpu"] / c["yardstick_cpu"] for c in cells if "torch_cpu" in c}


def yardstick() -> Callable[[], object]:
    """Products that NumPy computes on one thread, by which two moments can be compared."""
    a = np.random.default_rng(0).random((2000, 64, 64), np.float32)
    out = np.empty_like(a)
    return lambda: np.matmul(a, a, out=out)


def show(cells: list[Cell], firsts: list[FirstRound]) -> None:
    print("one epoch per client, CPU seconds of the cohort")
    print(f"{'task':<22} {'clients':>7} {'keyhole':>8} {'PyTorch':>8} {'ratio':>6} {'goal':>6}")
    for c in cells:
        note = "  kept" if c.is_torch_kept else ""
        row = f"{c.task:<22} {c.clients:>7} {c.keyhole_cpu:>8.3f} {c.torch_cpu:>8.3f}"
        print(f"{row} {c.ratio:>6.2f} {c.at_most:>6.2f}{note}")
    for f in firsts:
        total = f.import_seconds + f.update_seconds
        print(f"first update, {f.task}: {total:.1f} s, of which import {f.import_seconds:.1f} s")


def main() -> int:
    flags = parser(__doc__.splitlines()[0], RESULTS).parse_args()
    keep_freed_memory()  # as a run does; it serves both sides
    use_one_thread()
    kept = kept_times()
    cells = [measure_cell(task, kept) for task in tasks(flags.quick)]
    firsts = [measure_first_update(name) for name in ("2NN m=50", "tags m=1000")]
    show(cells, firsts)
    goals = [
        Goal(f"PyTorch's CPU time over ours, {c.task}", 1 / c.ratio, 1 / c.at_most)
        for c in cells
        if not math.isnan(c.ratio)
    ]
    goals += [
        Goal(
            f"{FIRST_UPDATE_GOAL:.0f} s over time to first update, {f.task}",
            FIRST_UPDATE_GOAL / (f.import_seconds + f.update_seconds),
            1.0,
        )
        for f in firsts
    ]
    return finish(flags, "clients", [*cells, *firsts], goals)


if __name__ == "__main__":
    sys.exit(main())
