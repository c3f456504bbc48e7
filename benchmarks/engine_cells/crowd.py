"""The job: a round of the 2NN of EMNIST on synthetic writers, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from keyhole.arrays import Tree
from keyhole.data.open import make_synthetic
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import spec_of
from keyhole.rounds.clients import Clients
from keyhole.rounds.cores import use_one_thread
from keyhole.rounds.round import Executor, run_round
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts

WRITERS = 200  # with 18 to 180 images; clients beyond them have the same images again


@dataclass(frozen=True)
class Crowd:
    """A factory of clients that every worker of every engine calls.

    Args:
        clients: N; a round asks all of them.
        keys_per_client: m of 200 neurons.
        is_idle: they send their slices back instead of training.
    """

    clients: int
    keys_per_client: int
    is_idle: bool = False

    def __call__(self) -> Clients:
        """The population; both shapes that clients have are compiled before it is returned."""
        use_one_thread()
        made, submodel = _experiment(self.keys_per_client).clients, self._submodel()
        population = replace(
            made,
            count=self.clients,
            data=lambda client: made.data(client % made.count),
            train=_send_back if self.is_idle else made.train,
        )
        counts = _experiment(self.keys_per_client).dataset.splits["train"].counts
        for client in (int(counts.argmin()), int(counts.argmax())):
            population.train(submodel, population.data(client), np.random.default_rng(0))
        return population

    def round(self) -> Callable[[Executor], object]:
        """A whole round through an executor: clients choose keys, the server selects and delivers
        their slices, clients train, the server adds up and writes the record."""
        clients, state = self(), _experiment(self.keys_per_client).start(0, None).state
        plan = RunParts(Cohorts(self.clients, self.clients), {"neuron": self.keys_per_client})
        return lambda execute: run_round(0, state, clients, plan, execute)

    def _submodel(self) -> Tree:
        model = _experiment(self.keys_per_client).task.model
        keys = [space.keys(np.arange(self.keys_per_client)) for space in model.layout.spaces]
        return model.layout.select(model.init(0), keys)

    def __str__(self) -> str:
        return f"N={self.clients} m={self.keys_per_client}{' idle' if self.is_idle else ''}"


@cache
def _experiment(keys_per_client: int) -> Experiment:
    """Made once in a process; a crowd that is sent to workers stays small."""
    spec = spec_of("emnist_2nn", keys={"neuron": {"count": keys_per_client}})
    return Experiment(spec, make_synthetic("writers", 0, writers=WRITERS))


def _send_back(submodel: Tree, _data: object, _rng: np.random.Generator) -> Tree:
    return submodel
