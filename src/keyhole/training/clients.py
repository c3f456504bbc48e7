"""Clients: what the simulator knows of the devices of a run, and the work that one of them does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.primitives.layout import ClientKeys
from keyhole.training.client_update import ClientUpdateFn
from keyhole.training.randomness import Place, generator
from keyhole.types import Tree

__all__ = ["Clients", "Job"]


def _as_they_are(data: Any, _: ClientKeys) -> Any:
    return data


@dataclass(frozen=True)
class Clients:
    """The population: its data, how a client chooses keys, and how it trains.

    Args:
        count: how many there are; they are numbered from 0.
        data: `client -> its data`; may load it from disk.
        choose: `(data, most keys of each key space, rng) -> keys`.
        train: `(sub-model, data, rng) -> update`, start minus end, shaped as the sub-model.
        localize: `(data, keys) -> data` in which keys are counted among the client's own, as the
            sub-model has them; data that name no keys stay as they are.
    """

    count: int
    data: Callable[[int], Any]
    choose: Callable[[Any, Mapping[str, int], np.random.Generator], ClientKeys]
    train: ClientUpdateFn
    localize: Callable[[Any, ClientKeys], Any] = _as_they_are


@dataclass(frozen=True)
class Job:
    """One client's training in one round: all that a worker needs besides `Clients`."""

    client: int
    place: tuple[int, ...]
    keys: ClientKeys
    submodel: Tree

    def run(self, clients: Clients) -> Tree:
        """Trains; a function of the job and the client's data alone."""
        data = clients.localize(clients.data(self.client), self.keys)
        return clients.train(self.submodel, data, generator(*self.place))

    @staticmethod
    def of(seed: int, trial: int, t: int, client: int, keys: ClientKeys, submodel: Tree) -> Job:
        """The job of a client in round t; its randomness is the client's in that round."""
        return Job(client, (seed, trial, Place.CLIENT, t, client), keys, submodel)
