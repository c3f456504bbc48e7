"""A whole slice service on loopback, with a model small enough to look at."""

import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np

from keyhole import tree
from keyhole.device.device import Device
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Access, Keyring, new_key
from keyhole.service.app import App
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from keyhole.service.spool import UpdateSpool
from keyhole.service.transport import serving
from keyhole.wire.assignment import Pace, admit
from keyhole.wire.signing import SigningKey
from keyhole.wire.sockets import Clock, Retry
from tests.helpers import LAYOUTS

LAYOUT = LAYOUTS["two key spaces"]


def random_model(layout, seed=0):
    """A model whose numbers differ in every bit."""
    rng = np.random.default_rng(seed)
    leaves = {
        field.path: rng.standard_normal(field.shape).astype(field.dtype)
        for part in layout.parts
        for field in part.fields
    }
    return tree.unflatten(layout.structure, leaves)


def random_state(layout, seed=0):
    return ServerState.dense(layout, random_model(layout, seed), SGD(lr=0.5))


def at_service(records):
    """Records of a run in process as they are where devices leave their updates at a slice service,
    which sees what the server sees."""
    return [
        replace(
            record, seen_in_sum={"slice server": record.seen_in_sum["server"], **record.seen_in_sum}
        )
        for record in records
    ]


class Service:
    """A publisher and a service of its directory; `extra(rounds)` makes its further routes."""

    def __init__(self, directory, extra=lambda rounds: (), **options):
        self.directory = directory
        self._numbers = count()
        self.keyring = Keyring((bytes.fromhex(new_key()),))
        self.trainer = SigningKey.fresh()  # which devices of secure sums pin
        self.publisher = Publisher(directory, self.trainer)
        self.spool = UpdateSpool(directory / "updates")
        # A clock that runs with every look: the service never sees a round of a moment ago.
        self.rounds = RoundsDirectory(directory, clock=count(step=0.1).__next__)
        told = partial(admit, pace=Pace(again=1.0), uniform=lambda: 0.5)
        # Private queries are for everyone here: tests of what takes a token pass another access.
        access = Access(self.keyring, open_queries=True)
        options = {"access": access, "extra_routes": extra(self.rounds), **options}
        self.app = App(self.rounds, spool=self.spool, admit=told, **options)

    def next_number(self):
        """The number of the next round."""
        return next(self._numbers)

    def publish(self, layout=LAYOUT, seed=0, **options):
        """The state of a new round; what was published is its attribute `published`."""
        return self.publish_state(random_state(layout, seed), **options)

    def publish_state(self, state, **options):
        """A new round, which a crash of the machine may take: tests do not wait for the disk."""
        options = {"number": self.next_number(), "durable": False, **options}
        state.published = self.publisher.publish_state(state, **options)
        return state

    def token(self, device="phone"):
        return self.keyring.issue("device", device, now=time.time(), seconds=3600)

    def device(self, url=None, name="phone", **options):
        """A device that does not wait between attempts."""
        options = {
            "retry": Retry(attempts=4, seed=0),
            "clock": Clock(sleep=lambda _: None),
            "token": self.token(name),
            **options,
        }
        return Device(url or self.url, **options)

    def stored(self, round_id):
        return {name: self.spool.read(round_id, name) for name in self.spool.devices(round_id)}


@contextmanager
def small_service(directory, **options):
    service = Service(directory, **options)
    with service.publisher, serving(service.app) as service.url:
        service.port = int(service.url.rpartition(":")[2])
        yield service
    service.rounds.close()
