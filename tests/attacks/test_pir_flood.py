"""Attack: one device with a good token floods a server of private queries over 64 connections.

Counted is the CPU time of the whole process between an honest query and its answer: that is what it
waits for on one core, whatever else the machine does. Without turns and budgets, the planted hole,
the queries of the flood fill the passes that the honest one waits for.
"""

import asyncio
import time
from statistics import median

import httpx
import numpy as np

from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.service.access import Access
from keyhole.service.guards import Guards
from tests.service.in_process import NOW, RING, bearer
from tests.service.pir.one_service import BINARY, PirService

CONNECTIONS, REPEATS = 64, 5
WORDS = 200_000  # a pass over them takes some milliseconds


class Flood:
    """A server, an honest device and one that floods."""

    def __init__(self):
        app = {"access": Access(RING), "clock": lambda: NOW}
        self.service = PirService(app=app, words=WORDS)
        self.client_of = TwoServerPir().client(self.service.params.encode())

    def token(self, name):
        issued = RING.issue("round", name, now=NOW, seconds=60.0, round_id=self.service.round.id)
        return {**BINARY, **bearer(issued)}

    def query(self):
        return self.client_of.query(np.array([5, 1])).messages()[0]

    async def cost(self, client, flood):
        """CPU seconds of an honest query while so many of the flood have been sent."""
        bad, good = self.token("flood"), self.token("honest")

        def post(query, headers):
            return asyncio.create_task(
                client.post(self.service.path(), content=query, headers=headers)
            )

        messages, own = [self.query() for _ in range(flood)], self.query()
        tasks = [post(message, bad) for message in messages]
        for _ in range(3):
            await asyncio.sleep(0)  # the flood is under way
        start = time.process_time()
        answer = await post(own, good)
        spent = time.process_time() - start
        assert answer.status_code == 200
        return spent, [each.status_code for each in await asyncio.gather(*tasks)]

    def measure(self, flood):
        """The median cost, and what became of the queries of the flood."""

        async def run():
            transport = httpx.ASGITransport(self.service.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                found = [await self.cost(client, flood) for _ in range(REPEATS)]
            return median(spent for spent, _ in found), [s for _, each in found for s in each]

        return asyncio.run(run())


def test_an_honest_query_stays_under_three_times_its_quiet_cost():
    made = Flood()
    quiet, _ = made.measure(0)
    loud, statuses = made.measure(CONNECTIONS)
    assert statuses.count(429) > len(statuses) // 2  # and each is told when to come back
    assert loud < 3 * quiet, (loud, quiet)


def test_without_turns_the_flood_fills_the_passes(monkeypatch):
    class Open:
        async def __aenter__(self):
            return lambda seconds: None

        async def __aexit__(self, *_):
            return None

    monkeypatch.setattr(Guards, "query_turn", lambda self, request, claims: Open())
    made = Flood()
    quiet, _ = made.measure(0)
    loud, statuses = made.measure(CONNECTIONS)
    assert set(statuses) == {200}
    assert loud > 3 * quiet, (loud, quiet)
