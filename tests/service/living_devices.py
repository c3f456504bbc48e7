"""Devices of the toy population that live beside a test, each in a thread."""

import threading
from contextlib import ExitStack, contextmanager

from keyhole.device.take_part import (
    Participant,
    PopulationClient,
    keep_taking_part,
    take_part,
)
from keyhole.errors import KeyholeError
from keyhole.wire.assignment import Wait, device_name
from keyhole.wire.sockets import Clock
from tests.rounds import toy

EVERYONE = range(len(toy.EXAMPLES))


@contextmanager
def devices(
    service, clients=EVERYONE, pause=0.01, rehearsed=toy.REHEARSED, on_round=lambda _: None
):
    """Devices that take part until the block ends, each in a thread.

    Args:
        service: that they check in at.
        clients: whose devices live.
        pause: seconds between two questions at the most; where a trainer starts anew, all of them
            wait for it, and short ones take the time that it needs.
        rehearsed: seed and trial of the run in process that they rehearse; None draws from the
            nonce of each round.
        on_round: called by each device with every round that it took part in.
    """
    stop = threading.Event()

    def live(client):
        one = PopulationClient(client, lambda settings: toy.make_clients(), rehearsed)
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, pause)))
        with service.device(name=device_name(client), stop=stop, clock=clock) as device:
            keep_taking_part(device, one.participant(), on_round=on_round)

    with living(live, clients, stop):
        yield


def lying(service, stop, send, heard):
    """Returns `live(client)` of a device that sends as `send` does in every round, and takes note
    of the errors that it is told."""

    def live(client):
        one = PopulationClient(client, lambda settings: toy.make_clients(), toy.REHEARSED)
        participant = Participant(one.choose, one.train, send=send)
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
        with service.device(name=device_name(client), stop=stop, clock=clock) as device:
            done = None
            while not stop.is_set():
                try:
                    taken = take_part(device, participant, done)
                    done = done if isinstance(taken, Wait) else taken.round
                except KeyholeError as error:
                    heard.append(error)
                    stop.wait(0.01)

    return live


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
