"""Rounds in this process: all of a round but training, on a table that holds the touched rows only.

Clients choose random keys among `DISTINCT` that lie evenly in 0..K-1, so that the work is the same
for every K, and send back a tenth of what they received: what is left is drawing, choosing, select,
adding up and the server's step with Adagrad.
"""

from __future__ import annotations

import multiprocessing
import re
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from growth_cells.places import DISTINCT, Line, Place, Spent
from harness import measure
from keyhole.keys.choice import ClientContext
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.rounds.clients import Clients
from keyhole.rounds.round import run_round
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.initial import Normal
from keyhole.server.optimizers import Adagrad
from keyhole.server.state import ServerState

_ONCE = 30_000  # clients from which a round takes seconds, and is made once


def make_rounds(place: Place) -> Callable[[], object]:
    """Returns what makes a round each time that it is called."""
    space = KeySpace("row", place.num_keys)
    like = {"w": np.broadcast_to(np.float32(0), (place.num_keys, place.width))}
    state = ServerState.lazy(Layout.of(like, Cut(space, {"w": 0})), Adagrad(0.1), {"w": Normal(1)})

    def choose(_: None, context: ClientContext) -> Keys:
        ranks = context.rng.choice(DISTINCT, place.keys_per_client, replace=False)
        return space.keys(ranks * place.spacing)

    def train(slices: dict[str, np.ndarray], *_: object) -> dict[str, np.ndarray]:
        return {"w": slices["w"] * np.float32(0.1)}

    clients = Clients(place.population, lambda _: None, choose, train)
    cohorts = Cohorts(place.population, place.cohort)
    parts = RunParts(cohorts, {space.name: place.keys_per_client})

    def work() -> None:
        updates, _ = run_round(state.steps, state, clients, parts)
        assert updates is not None
        state.step(updates)

    return work


def measure_rounds(axes: Iterable[tuple[str, list[Place]]]) -> Iterator[Line]:
    """Measures the first rounds of each place in a process of its own, for memory, and before this
    process has any to pass on; then, along an axis, rounds of all places but the largest take
    turns."""
    make_rounds(Place(2, 2, 2, 10**6, 4))()  # loads the code, for those processes too
    alone = [(axis, places, [_alone(place) for place in places]) for axis, places in axes]
    for axis, places, spent in alone:
        works = {str(n): make_rounds(p) for n, p in enumerate(places) if p.cohort < _ONCE}
        for n, timing in measure(works).items():
            spent[int(n)] = Spent(timing.cpu, spent[int(n)].memory)
        yield Line.made("a round", axis, places, spent)


def _alone(place: Place) -> Spent:
    """What the first rounds take, in a process that has nothing else."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(_first_rounds(place)))
    process.start()
    there.close()
    spent: Spent = here.recv()
    process.join()
    return spent


def _first_rounds(place: Place) -> Spent:
    """CPU seconds of the last of them, and bytes by which the peak of this process grows."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, work = status_bytes("VmRSS"), make_rounds(place)
    for _ in range(1 if place.cohort >= _ONCE else 2):
        start = time.process_time()
        work()
    return Spent(time.process_time() - start, status_bytes("VmHWM") - before)


def status_bytes(field: str, pid: int | str = "self") -> int:
    """Returns a size from the kernel's account of a process."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found, field
    return int(found[1]) * 1024
