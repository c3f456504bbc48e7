"""A client of a simulated population as a device: the same keys, the same update, over the network.

What a run tells its devices is in the settings of the manifest. All randomness derives from there,
so a run over the service gives the bytes of a run in process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from keyhole.errors import InputError
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys
from keyhole.serving.device.assembly import KnownRound, Submodel
from keyhole.serving.device.device import Device
from keyhole.serving.device.participation import Fetch, Participant, Send
from keyhole.training.clients import Choosing, Clients, check_keys_per_client, choose_keys
from keyhole.training.jobs import Job
from keyhole.types import Tree

__all__ = ["PopulationClient", "RunSettings"]


class RunSettings(msgspec.Struct, frozen=True):
    """What a run tells its devices.

    Attributes:
        seed: of everything random.
        trial: which repetition.
        keys_per_client: key space -> most keys of a client.
        shared_keys: whether all clients of a round draw the same random keys.
    """

    seed: int
    trial: int
    keys_per_client: dict[str, int]
    shared_keys: bool = False

    @property
    def choosing(self) -> Choosing:
        """What decides keys; a device is of one kind, and its operator knows which."""
        keys = self.keys_per_client
        return Choosing(self.seed, self.trial, keys, shared_keys=self.shared_keys)

    @staticmethod
    def of(known: KnownRound) -> RunSettings:
        """The settings in the manifest of a round.

        Raises:
            InputError: the round does not belong to a run of a population.
        """
        try:
            return msgspec.convert(known.manifest.settings, RunSettings)
        except msgspec.ValidationError as error:
            raise InputError(
                f"round {known.id} does not belong to a run of a population",
                got=f"settings in which {error}",
                allowed="seed, trial and keys_per_client",
                fix="take part with functions of your own, or publish the run with its plan",
            ) from error


@dataclass
class PopulationClient:
    """One client of a population, as a participant of rounds.

    Args:
        client: its number.
        population: `settings -> the population`; called when a run is met for the first time.
    """

    client: int
    population: Callable[[RunSettings], Clients]
    _met: dict[bytes, Clients] = field(default_factory=dict, repr=False)
    _chosen: dict[str, ClientKeys] = field(default_factory=dict, repr=False)

    def participant(self, fetch: Fetch = Device.fetch, send: Send = Device.send) -> Participant:
        """What it does in a round."""
        return Participant(self.choose, self.train, fetch, send)

    def choose(self, known: KnownRound) -> ClientKeys:
        """The keys that the client chooses in process, too."""
        settings = RunSettings.of(known)
        clients = self._clients(settings)
        check_keys_per_client(known.layout, settings.keys_per_client)
        number, choosing = known.manifest.number, settings.choosing
        keys = choose_keys(self.client, number, known.layout, clients, choosing)
        self._chosen = {known.id: keys}
        return keys

    def train(self, known: KnownRound, fetched: Submodel) -> Tree:
        """The update that the client makes in process, too."""
        settings, keys = RunSettings.of(known), _kept(self._chosen[known.id], fetched.keys)
        run = settings.seed, settings.trial, known.manifest.number
        return Job.of(*run, self.client, keys, fetched.model).run(self._clients(settings))

    def _clients(self, settings: RunSettings) -> Clients:
        name = msgspec.json.encode(settings)
        if name not in self._met:
            clients = self.population(settings)
            if not 0 <= self.client < clients.count:
                raise InputError(
                    "the population has no such client",
                    got=self.client,
                    allowed=f"0..{clients.count - 1}",
                    fix="choose another number",
                )
            self._met = {name: clients}  # a device follows one run at a time
        return self._met[name]


def _kept(chosen: ClientKeys, fetched: Mapping[str, Keys]) -> ClientKeys:
    """What was fetched of the keys that were chosen, in the form in which they were."""
    if isinstance(chosen, Keys):
        return fetched[chosen.space.name]
    return tuple(fetched[keys.space.name] for keys in chosen)
