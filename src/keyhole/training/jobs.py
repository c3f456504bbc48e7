"""Jobs: the work of clients in one round, each made when it is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from keyhole.primitives.layout import ClientKeys, RowSource
from keyhole.training.clients import Clients
from keyhole.training.randomness import Place, generator
from keyhole.types import Tree

__all__ = ["Job", "Jobs"]


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


class Jobs(Sequence[Job]):
    """The jobs of some clients of one round: sub-models come one by one, as jobs are taken.

    Args:
        place: seed, trial and round.
        keys: client -> what its sub-model holds, in the order of the jobs.
        submodel: `client -> its sub-model`.
        source: of the rows of sub-models, where they can be selected elsewhere.
    """

    def __init__(
        self,
        place: tuple[int, int, int],
        keys: Mapping[int, ClientKeys],
        submodel: Callable[[int], Tree],
        source: RowSource | None = None,
    ) -> None:
        self.place = place
        self.keys = keys
        self.source = source
        self._submodel = submodel
        self._clients = list(keys)

    @overload
    def __getitem__(self, at: int) -> Job: ...
    @overload
    def __getitem__(self, at: slice) -> list[Job]: ...
    def __getitem__(self, at: int | slice) -> Job | list[Job]:
        if isinstance(at, slice):
            return [self[place] for place in range(len(self))[at]]
        client = self._clients[at]
        return Job.of(*self.place, client, self.keys[client], self._submodel(client))

    def __len__(self) -> int:
        return len(self._clients)
