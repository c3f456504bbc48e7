"""Takes part in one round, as a program of somebody who has keyhole without extras.

What it is told comes as JSON on standard input; what it met goes to standard output.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.device.device import Device
from keyhole.device.private import QueryFetch
from keyhole.device.sums import SumSend
from keyhole.device.take_part import Participant, Taken, take_part
from keyhole.wire.signing import TrainerKey

HEAVY = ("jax", "numba", "scipy", "matplotlib", "uvicorn", "rich", "prometheus_client")


def ways(told):
    """How slices are fetched and updates sent: in the clear unless there is more to connect to."""
    given = {}
    if told["second"]:
        given["fetch"] = QueryFetch(TwoServerPir(), (Device(told["second"]),))
    if told["aggregators"]:
        lines = [Device(url, token=token) for url, token in told["aggregators"]]
        given["send"] = SumSend(*lines, tuple(map(bytes.fromhex, told["seals"])))
    return given


def main():
    told = json.load(sys.stdin)
    pinned = TrainerKey.load(Path(told["trainer_key"]))
    with Device(told["url"], token=told["token"], trainer_key=pinned) as device:

        def choose(known):
            return {"row": np.array(told["keys"])}

        def train(known, fetched):
            """Start minus end; exact in the ring of a secure sum."""
            return {name: leaf + np.float32(told["adds"]) for name, leaf in fetched.model.items()}

        participant = Participant(choose, train, **ways(told))
        while not isinstance(taken := take_part(device, participant), Taken):
            time.sleep(0.05)
    loaded = [name for name in HEAVY if name in sys.modules]
    print(json.dumps({"keys": taken.keys, "loaded": loaded, "cpu": time.process_time()}))


if __name__ == "__main__":
    main()
