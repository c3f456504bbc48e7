"""One server of private retrieval in this process, over rounds in memory."""

import asyncio
from contextlib import asynccontextmanager

import httpx
import numpy as np

from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.service.access import Access
from keyhole.service.app import App
from keyhole.service.private import query_routes
from keyhole.wire.private import QuerySettings, role_named
from tests.service.memory_rounds import MemoryRounds

BINARY = {"content-type": "application/octet-stream"}
WORD, EVERYONE = 1, 0
WORDS = 37  # so that the last byte of a share has bits to spare
SERVER_0, SERVER_1 = role_named("0"), role_named("1")


class PirService:
    """A service over rounds in memory; ask it inside `clients`, or once with `ask`."""

    def __init__(self, role=SERVER_0, app=None, words=WORDS, **settings):
        settings.setdefault("max_keys", 4)
        self.rounds = MemoryRounds()
        self.round = self.rounds.open(3, words=words)
        self.scheme, self.server = role.delivery.about.path_name, role.server
        routes = query_routes(self.rounds, QuerySettings(role, **settings))
        app = {"access": Access(open_queries=True), **(app or {})}
        self.app = App(self.rounds, extra_routes=[routes], **app)

    def path(self, table=WORD, rest=""):
        return f"/v1/rounds/{self.round.id}/tables/{table}/pir/{self.scheme}{rest}"

    @asynccontextmanager
    async def client(self):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            yield client

    def ask(self, method, path=None, **request):
        async def run():
            async with self.client() as client:
                return await client.request(method, path or self.path(), **request)

        return asyncio.run(run())

    def post(self, body, **headers):
        return self.ask("POST", content=body, headers={**BINARY, **headers})

    @property
    def params(self):
        return PirParams.decode(self.ask("GET").content)

    def question(self, keys=(7, 2)):
        return TwoServerPir().client(self.params.encode()).query(np.array(keys))

    def query(self, keys=(7, 2)):
        """A new message for this server."""
        return self.question(keys).messages()[self.server]

    def metric(self, name):
        page = self.app.metrics.page().decode()
        found = [line for line in page.splitlines() if line.startswith(name)]
        return float(found[0].split()[-1]) if found else 0.0
