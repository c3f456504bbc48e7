"""A device that takes part in two rounds by private retrieval, and all that servers see of it."""

import re

import numpy as np

import keyhole as kh
from keyhole import tree
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.exchange import NO_MODEL, SumRound, client_of
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.delivery.base import Retrieved
from keyhole.device.take_part import Participant, take_part
from keyhole.errors import IntegrityError, KeyholeError
from tests.helpers import zeros

ROWS, WANTED, OTHER = 5_000, 1234, 4321
LAYOUT = kh.Layout.of(zeros(w=(ROWS, 2), bias=(3,)), kh.Cut(kh.KeySpace("row", ROWS), {"w": 0}))
SETTINGS = {"keys_per_client": {"row": 1}}
SUM = TwoServers(Rounding(clip=4.0), min_clients=2)


def transcript(both, fetch, rounds=2):
    """What servers see of a device that wants one row, in two rounds: number, order, paths and
    lengths of its requests, and the lengths of its shares for two aggregators."""
    shares, starts = [], [len(recorder.seen) for recorder in both.recorders]

    def share(device, told, update, keys):
        known = device.known(told)
        params = SUM.params(SumRound(known.layout, {"row": 1}, bytes(16), 4))
        client = client_of(SUM, params, NO_MODEL, known.layout)
        bodies = client.shard(update, known.keys_by_space(keys)).bodies
        shares.append([len(body) for body in bodies])
        return sum(map(len, bodies))

    def train(known, fetched):
        return tree.map_leaves(np.zeros_like, fetched.model)

    habit = Participant(lambda known: {"row": [WANTED]}, train, fetch, share)
    with both.device() as device:
        for _ in range(rounds):
            both.service.publish(LAYOUT, settings=SETTINGS)
            try:
                take_part(device, habit)
            except KeyholeError:
                shares.append("left the round")
    seen = [
        [
            (method, re.sub(r"rounds/[^/]*", "rounds/ID", path), len(body))
            for method, path, _, body, _ in recorder.seen[start:]
        ]
        for recorder, start in zip(both.recorders, starts, strict=True)
    ]
    return seen, shares


def raising(monkeypatch):
    """Plants the hole: a device that fails when a row is wrong, as it did before."""
    checked = Retrieved.checked

    def fail(self, top, keys):
        found = checked(self, top, keys)
        if found.wrong:
            raise IntegrityError("a slice is wrong: got another; expected this one; ask again")
        return found

    monkeypatch.setattr(Retrieved, "checked", fail)
