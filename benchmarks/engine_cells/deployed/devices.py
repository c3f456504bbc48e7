"""What devices train: a few rows of a table, towards targets of their own.

Flower imports this anew for every message, so it imports what a device needs and no more.
"""

from __future__ import annotations

import numpy as np

import keyhole as kh
from keyhole.arrays import Array, Tree
from keyhole.rounds.clients import Clients

POPULATION = 100
ROW = kh.KeySpace("row", 10_000)
WIDTH = 64
KEYS = 100  # of each client
STEPS = 20


def make_clients(_settings: object = None) -> Clients:
    return Clients(POPULATION, _data, _choose, _train)


def _data(client: int) -> Array:
    target: Array = np.random.default_rng(client).standard_normal((KEYS, WIDTH), np.float32)
    return target


def _choose(_: Array, limit: dict[str, int], rng: np.random.Generator) -> kh.Keys:
    return ROW.keys(np.sort(rng.choice(ROW.num_keys, limit["row"], replace=False)))


def _train(submodel: Tree, target: Array, _: np.random.Generator) -> Tree:
    """Gradient descent on the squared distance."""
    start = submodel["table"]
    end = start.copy()
    for _step in range(STEPS):
        end -= np.float32(0.1) * (end - target)
    return {"table": start - end}
