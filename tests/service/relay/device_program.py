"""A device as a program of its own, which speaks from 127.0.0.2.

python device_program.py SERVICE_URL RELAY_URL|- TOKEN KEYS...

Takes part in one round, through the relay if there is one; its update is a tenth of what it got.
"""

import socket
import sys

from keyhole import tree
from keyhole.device.device import Device
from keyhole.device.relayed import RelayedFetch
from keyhole.device.take_part import Participant, take_part
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Retry

connect = socket.create_connection


def from_another_address(address, timeout=None, source_address=None, **options):
    """`socket.create_connection`, which http.client takes when it connects."""
    return connect(address, timeout, ("127.0.0.2", 0), **options)


def participant(keys, fetch):
    return Participant(
        lambda known: {"word": keys},
        lambda known, fetched: tree.map_leaves(lambda leaf: leaf / 10, fetched.model),
        fetch,
    )


def main(service, relay, token, *words):
    socket.create_connection = from_another_address
    retry = Retry(attempts=2, first_wait=0.05)
    fetch = Device.fetch if relay == "-" else RelayedFetch(HttpClient(relay, retry=retry))
    with Device(service, token=token, retry=retry) as device:
        taken = take_part(device, participant([int(word) for word in words], fetch))
    print(f"round {taken.number}, {taken.keys} keys")


if __name__ == "__main__":
    main(*sys.argv[1:])
