"""Sends shares as devices that are killed on the way; run as a script with a JSON of `Job` fields.

For each name it forks a device that kills itself at one message to an aggregator, before it leaves
or once the answer is there, and waits for its end.
"""

import json
import os
import signal
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keyhole.aggregation.privacy.ledger import Ledger
from keyhole.device.device import Device
from keyhole.device.sums import SumSend, aggregator_of
from keyhole.wire.http import HttpClient
from keyhole.wire.signing import TrainerKey


@dataclass(frozen=True)
class Job:
    """What the devices need; `deaths` is name -> number of the message, and "before" or "after";
    those in `late` note what they spend when all is sent."""

    url: str
    trainer_key: str
    aggregators: list
    tokens: dict
    ledgers: str
    deaths: dict
    late: tuple = ()


class LateLedger(Ledger):
    """The hole: what is spent is noted once everything has been sent."""

    def charge(self, entry):
        self.later = entry
        return True


def send(job, name, trainer_key):
    """One device sends the update of the round that it is told of."""
    ledger = (LateLedger if name in job.late else Ledger)(Path(job.ledgers) / name)
    token, *own = job.tokens[name]
    (one, first), (other, second) = map(aggregator_of, job.aggregators)
    with (
        closing(ledger),
        Device(one, token=own[0]) as zero,
        Device(other, token=own[1]) as party_one,
        Device(job.url, token=token, trainer_key=trainer_key) as device,
    ):
        told = device.check_in()
        keys = {space.name: np.arange(2) for space in device.known(told).layout.spaces}
        update = device.fetch(told, keys).model
        way = SumSend(zero, party_one, (first, second), ledger=ledger, name=name)
        way(device, told, update, keys)
        if name in job.late:
            Ledger.charge(ledger, ledger.later)


def die_at(number, when):
    """Kills this process at its number-th message about sums."""
    real, seen = HttpClient.exchange, []

    def exchange(client, method, path, *args, **options):
        seen.append(path) if path.startswith("/v1/sums") else None
        is_it = path.startswith("/v1/sums") and len(seen) == number
        if is_it and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        got = real(client, method, path, *args, **options)
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)
        return got

    HttpClient.exchange = exchange


def main(told):
    job = Job(**json.loads(told))
    trainer_key = TrainerKey.load(Path(job.trainer_key))
    for name, (number, when) in job.deaths.items():
        child = os.fork()
        if child == 0:
            die_at(number, when)
            send(job, name, trainer_key)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
