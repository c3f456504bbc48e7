"""Peak memory of rounds: wide broadcasts, a large dense model, and selected rows.

    python benchmarks/memory.py [--check] [--quick] [--json]

Each cell runs in a process of its own, with a thread for each core, as `keyhole train` does.
Compared is the peak of that process, all that Python, NumPy, JAX and Numba take included; of
selected rows it is what the peak adds to the process before its first round. A client's training
takes memory of its own: those of `numpy` return a multiple of what they received, those of `jax`
make a step of a model with one parameter. Beside these stands the same step in plain JAX, one
client after the other, added up in NumPy: what of the peak is JAX itself, once it has started, and
what a loop without a server needs.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from harness import Goal, finish, machine_facts, parser, progress

RESULTS = Path(__file__).parent / "results" / "memory.json"
CLIENTS, ROUNDS = 50, 2
BROADCAST, DENSE, BESIDE = 0.5e9, 3.0e9, 150e6  # bytes: goals of the two, and what rows may add


@dataclass(frozen=True)
class Cell:
    """Bytes of a model or of touched rows, the peak, and what was promised."""

    name: str
    held: float
    peak: float
    at_most: float

    def goals(self) -> list[Goal]:
        """The peak is no larger than was promised."""
        return [Goal(f"{self.name}: promised peak over ours", self.at_most / self.peak, 1.0)]


def dense_peak(trainer: str, megabytes: int) -> float:
    """Rounds in which everyone trains a whole dense model; returns the peak of the process."""
    _prepare()
    import jax.numpy as jnp

    from keyhole.models.client_update import ClientUpdate
    from keyhole.models.local_training import LocalSgd
    from keyhole.models.model import Model
    from keyhole.rounds.clients import Clients
    from keyhole.rounds.cores import Cores
    from keyhole.rounds.round import run_round
    from keyhole.rounds.spec import RunParts
    from keyhole.sampling import Cohorts
    from keyhole.server.optimizers import SGD
    from keyhole.server.state import ServerState

    def init(_: int) -> dict[str, np.ndarray]:
        return {"w": np.zeros(megabytes * 250_000, np.float32)}

    def loss(params: dict, batch: dict, _: object) -> object:
        return jnp.mean(jnp.square(params["w"] - 1.0)) * jnp.mean(batch["x"])

    model = Model(init, loss, lambda _, batch: batch["x"], ())
    steps = LocalSgd(model, ClientUpdate(0.1, batch_size=4))
    train = steps if trainer == "jax" else _tenth
    ones = {"x": np.ones(4, np.float32)}
    clients = Clients(CLIENTS, lambda _: ones, lambda *_: {}, train)
    state = ServerState.dense(model.layout, init(0), SGD(1.0))
    for t in range(ROUNDS):
        updates, _ = run_round(t, state, clients, RunParts(Cohorts(CLIENTS, CLIENTS), {}), Cores())
        assert updates is not None
        state.step(updates)
        del updates
    return _peak()


@dataclass(frozen=True)
class Twin:
    """Bytes of a process that trains the clients of the `jax` cell in plain JAX: once JAX has
    started, and at the peak. No goal is tied to it."""

    name: str
    held: float
    started: float
    peak: float


def plain_jax_peak(megabytes: int) -> tuple[float, float]:
    """Trains as many clients in plain JAX; returns what the process held when JAX had started, and
    its peak."""
    _prepare()
    import jax
    import jax.numpy as jnp

    jnp.zeros(1).block_until_ready()
    started = _peak()

    def loss(model: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model - 1.0)) * jnp.mean(x)

    @jax.jit
    def client(model: jax.Array, batches: jax.Array) -> jax.Array:
        def step(i: int, params: jax.Array) -> jax.Array:
            return params - 0.1 * jax.grad(loss)(params, batches[i])

        return model - jax.lax.fori_loop(0, 1, step, model)

    model, batches = np.zeros(megabytes * 250_000, np.float32), np.ones((8, 4), np.float32)
    total = np.zeros_like(model)
    for _ in range(CLIENTS):
        total += np.asarray(client(model, batches))
    model -= total / CLIENTS
    return started, _peak()


def _tenth(slices: dict, _data: object, _rng: object) -> dict[str, np.ndarray]:
    return {"w": slices["w"] * np.float32(0.1)}


def rows_peak(m: int) -> tuple[float, float]:
    """Rounds of tag regression with m keys each; returns the bytes of rows and of an update for
    each core, and what the peak adds to the process before them."""
    _prepare()
    import round_cost

    data = [round_cost.make_data(10_000, client) for client in range(round_cost.CLIENTS)]
    distinct = len(np.unique(np.concatenate([own.ranked[:m] for own in data])))
    round_cost.keyhole_round(10_000, m, data[:1])  # loads what rounds load
    before, row = _peak(), 4 * round_cost.TAGS
    work = round_cost.keyhole_round(10_000, m, data)
    for _ in range(3):
        work()
    table = 2 * distinct * row  # values and what Adagrad keeps of them
    return table + distinct * row + (os.cpu_count() or 1) * m * row, _peak() - before


def _prepare() -> None:
    from keyhole.arrays import keep_freed_memory
    from keyhole.rounds.cores import use_one_thread

    use_one_thread()
    keep_freed_memory()


def _peak() -> float:
    """Peak bytes of this process; ru_maxrss would start from the parent's."""
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return float(peak) * 1024


def measure_dense(trainer: str, megabytes: int, at_most: float) -> Cell:
    """One dense model, in a process of its own."""
    name = f"{megabytes} MB to {CLIENTS} clients, {trainer}"
    progress(name)
    return Cell(name, megabytes * 1e6, _alone(dense_peak, trainer, megabytes), at_most)


def measure_twin(megabytes: int) -> Twin:
    """Plain JAX, in a process of its own."""
    name = f"{megabytes} MB to {CLIENTS} clients, plain JAX"
    progress(name)
    return Twin(name, megabytes * 1e6, *_alone(plain_jax_peak, megabytes))


def measure_rows(m: int) -> Cell:
    """Selected rows, in a process of their own."""
    name = f"tag regression, m={m}"
    progress(name)
    held, peak = _alone(rows_peak, m)
    return Cell(name, held, peak, held + BESIDE)


def _alone(work, *arguments):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def main() -> int:
    """Measures, prints, and checks what was promised."""
    flags = parser(__doc__ or "", RESULTS).parse_args()
    print(machine_facts())
    cells = [measure_rows(100), measure_rows(1_000), measure_dense("numpy", 20, BROADCAST)]
    cells.append(measure_dense("jax", 20, BROADCAST))
    if not flags.quick:
        cells.append(measure_dense("numpy", 400, DENSE))
        cells.append(measure_dense("jax", 400, DENSE))
    for cell in cells:
        print(
            f"{cell.name:<34} {cell.held / 1e6:6,.0f} MB, peak {cell.peak / 1e6:,.0f},"
            f" goal {cell.at_most / 1e6:,.0f}"
        )
    twin = measure_twin(20)
    print(
        f"{twin.name:<34} {twin.held / 1e6:6,.0f} MB, peak {twin.peak / 1e6:,.0f},"
        f" JAX started {twin.started / 1e6:,.0f}"
    )
    goals = [goal for cell in cells for goal in cell.goals()]
    return finish(flags, "memory", [*cells, twin], goals)


if __name__ == "__main__":
    sys.exit(main())
