"""Devices of the toy population that live beside a test, each in a thread."""

import threading
from contextlib import ExitStack, contextmanager

from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.wire.assignment import device_name
from keyhole.wire.sockets import Clock
from tests.rounds import toy

EVERYONE = range(len(toy.EXAMPLES))


@contextmanager
def devices(service, clients=EVERYONE, pause=0.01, rehearsed=toy.REHEARSED):
    """Devices that take part until the block ends, each in a thread.

    Args:
        service: that they check in at.
        clients: whose devices live.
        pause: seconds between two questions at the most; where a trainer starts anew, all of them
            wait for it, and short ones take the time that it needs.
        rehearsed: seed and trial of the run in process that they rehearse; None draws from the
            nonce of each round.
    """
    stop = threading.Event()

    def live(client):
        one = PopulationClient(client, lambda settings: toy.make_clients(), rehearsed)
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, pause)))
        with service.device(name=device_name(client), stop=stop, clock=clock) as device:
            keep_taking_part(device, one.participant())

    with living(live, clients, stop):
        yield


@contextmanager
def living(live, clients, stop):
    """Calls `live(client)` in a thread for each; `stop` is set when the block ends."""
    threads = [threading.Thread(target=live, args=(client,)) for client in clients]
    with ExitStack() as stack:
        for thread in threads:
            stack.callback(thread.join)
        stack.callback(stop.set)
        for thread in threads:
            thread.start()
        yield
