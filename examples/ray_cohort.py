"""A cohort on Ray: 200 clients a round, trained by two workers; one worker is killed on the way.

    python examples/ray_cohort.py

The model has one weight for each of a thousand words, and a client selects the words it has. On a
cluster, pass `address="HOST:PORT"` to RayEngine, and this file must be on every machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import numpy as np

import keyhole as kh
from keyhole.engines.ray.engine import RayEngine
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState

WORD = kh.KeySpace("word", 1000)
LAYOUT = kh.Layout.of({"weight": np.zeros(1000, np.float32)}, kh.Cut(WORD, {"weight": 0}))
TRUTH = np.random.default_rng(0).normal(size=1000).astype(np.float32)


def words_of(client: int) -> np.ndarray:
    """Twenty words of a client, with what it knows of their weights."""
    return np.random.default_rng(client).choice(1000, 20, replace=False)


def choose(words: np.ndarray, context: kh.keys.ClientContext) -> kh.Keys:
    return WORD.keys(words[: context.max_keys["word"]])


def localize(words: np.ndarray, keys: Mapping[str, kh.Keys]) -> np.ndarray:
    return TRUTH[keys["word"].array]


def train(
    slices: Mapping[str, np.ndarray], truth: np.ndarray, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """One step towards the truth, through noise; an update is start minus end."""
    noise = rng.normal(scale=0.1, size=len(truth)).astype(np.float32)
    return {"weight": 0.5 * (slices["weight"] - truth + noise)}


def make_clients() -> Clients:
    """What each worker builds for itself."""
    return Clients(5000, words_of, choose, train, localize)


def error_of(state: ServerState) -> float:
    return float(np.abs(state.model()["weight"] - TRUTH).mean())


def main() -> None:
    plan = RunParts(Cohorts(5000, 200), {"word": 20}, over="choosers")
    state = ServerState.dense(LAYOUT, {"weight": np.zeros(1000, np.float32)}, SGD(1.0))
    run = start_run(state, make_clients(), plan)
    with RayEngine(make_clients, 2) as engine:
        for record in run.rounds(6, execute=engine):
            print(f"round {record.round}: error {error_of(run.state):.3f}", *record.incidents)
            if record.round == 2:
                os.kill(engine.pids[0], signal.SIGKILL)
                print("a worker is killed")
    alone = ServerState.dense(LAYOUT, {"weight": np.zeros(1000, np.float32)}, SGD(1.0))
    list(start_run(alone, make_clients(), plan).rounds(6))
    same = state.model()["weight"].tobytes() == alone.model()["weight"].tobytes()
    print(f"the bytes of one process: {same}")


if __name__ == "__main__":
    main()
