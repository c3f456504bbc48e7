"""Devices in simulated time: they end in the order of their drawn durations, as in process."""

import heapq

from keyhole.device.device import Assignment
from keyhole.device.take_part import PopulationClient
from keyhole.errors import TooLateError
from keyhole.rounds.machine import Dropped
from keyhole.sampling import Stream, generator
from keyhole.wire.assignment import device_name
from tests.rounds import toy


class InTurn:
    """A summons whose devices fetch when they are called, and send when their time has come: at
    every look those who end next."""

    def __init__(self, service, plan):
        self._service, self._plan = service, plan
        self._now, self._at_work, self._refused = 0.0, [], []
        self.called = []
        self.trailing = set()  # how many rounds trailed when an update was sent

    def call(self, round_id, t, asked, seconds, *, may_miss):
        for client in asked:
            rng = generator(self._plan.seed, self._plan.trial, Stream.DURATION, t, client)
            finish = self._now + self._plan.buffering.duration(rng)
            work = self._fetch(client, round_id, t)
            heapq.heappush(self._at_work, (finish, len(self.called), work, client))
            self.called.append(client)

    def news(self, now):
        self._now = self._at_work[0][0]
        while self._at_work and self._at_work[0][0] == self._now:
            heapq.heappop(self._at_work)[2]()
        told, self._refused = self._refused, []
        return told

    def over(self):
        pass

    def incidents(self):
        return []

    def _fetch(self, client, round_id, t):
        """What is left to do: to train and to send."""
        name = device_name(client)
        token = self._service.keyring.issue("round", name, now=0, seconds=1e12, round_id=round_id)
        one = PopulationClient(client, lambda settings: toy.make_clients(), toy.REHEARSED)
        told = Assignment(round_id, t, token)
        with self._service.device(name=name) as device:
            known = device.known(told)
            fetched = device.fetch(told, one.choose(known))

        def send():
            with device:  # opens connections as it needs them
                self.trailing.add(len(device.current().trailing))
                try:
                    device.send(told, one.train(known, fetched), fetched.keys)
                except TooLateError:
                    self._refused.append((round_id, Dropped(client, 0.0)))

        return send
