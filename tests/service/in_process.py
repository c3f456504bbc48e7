"""A service in this process: an app over rounds in memory, and a client of it."""

import asyncio
import random
from functools import partial

import httpx
import numpy as np

from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.wire import messages as wire
from keyhole.wire.assignment import Pace, admit
from keyhole.wire.manifest import digest_of
from tests.service.memory_rounds import MemoryRounds, layout, make_round

NOW = 1_800_000_000.0
RING = Keyring((b"k" * 32,))
BINARY = {"content-type": "application/octet-stream"}
IMMUTABLE = "public, max-age=31536000, immutable, no-transform"
SHAPE = {"status", "kind", "wrong", "got", "allowed", "fix"}
WORD_TABLE, EVERYONE_TABLE = 1, 0
ROUND_ID = make_round(3).id  # of a service without settings of its own


class Service:
    """A service over rounds in memory, and a client of it."""

    def __init__(self, spool=None, cohort=None, **settings):
        self.rounds = MemoryRounds()
        self.round = self.rounds.open(3, cohort)
        self.spool = spool
        settings.setdefault("access", Access(RING))
        self.app = App(
            self.rounds,
            spool=spool,
            admit=partial(admit, pace=Pace(spread=4.0), uniform=lambda: 0.5),
            clock=lambda: NOW,
            rng=random.Random(0),
            **settings,
        )

    def ask(self, method, path, loop_factory=None, **request):
        """One request; `{id}` in the path is the round."""

        async def run():
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                return await client.request(method, path.format(id=self.round.id), **request)

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(run())

    def query(self, *asks, method="POST", **headers):
        body = wire.encode_query(asks)
        path = "/v1/rounds/{id}/slices"
        return self.ask(method, path, content=body, headers={**BINARY, **headers})

    def assert_refused(self, answer, status, kind):
        """Demands an error of the one shape; nothing stays held behind it."""
        assert answer.status_code == status, answer.text
        facts = answer.json()["error"]
        assert facts.keys() == SHAPE
        assert (facts["status"], facts["kind"]) == (status, kind)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["cache-control"] == "no-store"
        assert self.rounds.held == 0
        return facts


def device_token(**changes):
    return RING.issue("device", "phone-1", **{"now": NOW, "seconds": 60.0, **changes})


def round_token(service, **changes):
    known = {"now": NOW, "seconds": 60.0, "round_id": service.round.id, "device": "phone-1"}
    return RING.issue("round", **{**known, **changes})


def bearer(token):
    return {"authorization": f"Bearer {token}"}


def update_of(value=1.0, keys=(3, 5), round_id=ROUND_ID):
    made = layout()
    z = {"word": made.spaces[0].keys(keys)}
    update = {"w": np.full((len(keys), 3), value, np.float32), "b": np.zeros(5, np.float32)}
    return wire.encode_update(made, update, z, digest_of(round_id))


def send_update(service, body=None, token=None, **headers):
    token = round_token(service) if token is None else token
    return service.ask(
        "POST",
        "/v1/rounds/{id}/updates",
        content=update_of(round_id=service.round.id) if body is None else body,
        headers={**BINARY, **bearer(token), **headers},
    )
