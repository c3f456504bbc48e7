"""Own parts, each as a user writes it outside the library: by object, or as "module:NAME"."""

from dataclasses import dataclass

import numpy as np

from keyhole.rounds.adding import add_up_jobs
from keyhole.rounds.clients import choose_all
from keyhole.server.optimizers import SGD
from keyhole.server.row_sums import BLOCK, pair_up

DIGITS, SHIFT = 3, 0


@dataclass(frozen=True)
class Damped(SGD):
    """An optimizer: SGD with shorter steps."""

    factor: float = 0.5

    def step(self, slab, slots, rows, now):
        return super().step(slab, slots, rows * np.float32(self.factor), now)


def some(context):
    """A choice of keys: some of the client's own, drawn anew in each round."""
    own = context.counts.keys
    return context.rng.permutation(own)[: min(context.max_keys, len(own)) - SHIFT]


class Reversed:
    """An engine: clients train from the last to the first, and are added up where they train."""

    def choose(self, clients, asked, t, layout, run):
        return choose_all(clients, asked, t, layout, run)

    def __call__(self, clients, jobs):
        return [job.run(clients) for job in reversed(jobs)][::-1]

    def add_up(self, clients, jobs, layout):
        blocks = [jobs[at : at + BLOCK] for at in range(0, len(jobs), BLOCK)]
        return pair_up(add_up_jobs(clients, block, layout) for block in blocks)

    def incidents(self):
        return []


def norm(state):
    """A metric."""
    (leaf,) = state.model().values()
    return {"norm": round(float(np.linalg.norm(leaf)), DIGITS)}
