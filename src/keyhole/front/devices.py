"""Devices: lets the devices of a slice service train, in place of clients in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

from keyhole.delivery import delivery_named
from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.errors import InputError
from keyhole.files import kept_secret
from keyhole.rounds.spec import RunSpec
from keyhole.service.inbox import Inbox, SpoolInbox, Waiting
from keyhole.service.lobby import Lobby, WaitingRoom
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.service.status import UPDATES
from keyhole.service.sum_services import SALT_BYTES, AggregatorClient, SumServices
from keyhole.wire.http import HttpClient
from keyhole.wire.signing import SigningKey

_PATIENCE = 600.0  # seconds that a round waits for devices that nobody knows, or that keep a place
_SALT = "aggregators.salt"


@dataclass(frozen=True)
class Aggregators:
    """Two aggregators, to which updates go in shares.

    Args:
        urls: of party 0 and party 1.
        tokens: to show there, from their operators.
        ca: PEM file of the authorities to trust there; None trusts those of the system.
        min_clients: a sum of fewer is not released; 0 for what the run's aggregation declares.
        insecure: lets plain http leave this machine.
    """

    urls: tuple[str, str]
    tokens: tuple[str, str]
    ca: Path | None = None
    min_clients: int = 0
    insecure: bool = False

    def inbox(self, run: Path, stop: threading.Event) -> SumServices:
        """Returns what a run makes its sums with, whose directory keeps the salt of their names."""
        first, second = (
            AggregatorClient(
                HttpClient(url, ca=self.ca, stop=stop, insecure=self.insecure), token, party
            )
            for party, (url, token) in enumerate(zip(self.urls, self.tokens, strict=True))
        )
        salt = kept_secret(run / _SALT, SALT_BYTES)
        return SumServices(first, second, salt=salt, min_clients=self.min_clients, stop=stop)


@dataclass(frozen=True)
class Devices:
    """Where the devices of a run are reached.

    Args:
        directory: rounds are published here, and updates taken from here; `keyhole serve DIRECTORY`
            is the service.
        signing_key: a file of `keyhole token signing-key`; manifests are signed with it.
        aggregators: two, to which updates go in shares; None takes updates in the clear.
        named: draws cohorts from the seed, as a run in process does, which rehearses it.
    """

    directory: Path | str
    signing_key: Path | None = None
    aggregators: Aggregators | None = None
    named: bool = False

    @contextmanager
    def rounds(
        self,
        spec: RunSpec,
        run: Path,
        on_arrival: Callable[[Waiting], None] = lambda waiting: None,
    ) -> Iterator[Callable[[threading.Event], Served]]:
        """Gives what makes the rounds of a run that is kept in `run`, from the event that stops
        them.

        Raises:
            InputError: devices cannot fetch as the run says.
            StorageError: another run publishes to it.
        """
        directory = Path(self.directory)
        fetched = delivery_named(DEFAULT_SERVED if spec.delivery is None else spec.delivery.name)
        if not fetched.about.is_served:
            raise InputError(
                f"devices cannot fetch slices so: got delivery {fetched.about.name}; expected one "
                f"that is served, such as {DEFAULT_SERVED}; choose another delivery"
            )
        key = None if self.signing_key is None else SigningKey.load(self.signing_key)
        with Publisher(directory, key) as publisher:

            def make(stop: threading.Event) -> Served:
                inbox: Inbox = SpoolInbox(UpdateSpool(directory / UPDATES))
                if self.aggregators is not None:
                    inbox = self.aggregators.inbox(run, stop)
                lobby = _lobby(directory, spec, stop)
                is_open_ended = lobby is None and spec.asynchronous is None
                made = Served(publisher, inbox, stop=stop, on_arrival=on_arrival, lobby=lobby)
                made.seconds = spec.cohort.seconds or (inf if is_open_ended else _PATIENCE)
                made.fetched, made.named = fetched, self.named
                return made

            yield make


def _lobby(directory: Path, spec: RunSpec, stop: threading.Event) -> Lobby | None:
    """What draws cohorts from devices that check in; None where the run knows its clients."""
    room = WaitingRoom(directory)
    if spec.cohort.sampling != "check-in":
        room.close()  # of another run
        return None
    return Lobby(room, spec.cohort.min_memory_mb, spec.client.min_examples, stop)
