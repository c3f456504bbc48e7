"""Attack: a gateway that wants to know whose keys it sees fills a batch with requests of its own.

It sends n - 1 bodies beside that of its victim, so that all it does not know in the batch is the
victim's. Without tokens of their own, or with one token many times, these sybils count for nothing,
and nothing is sent on. A relay that counts bodies instead of devices is the planted hole.
"""

import asyncio
import time

import httpx
import pytest

from keyhole.delivery.relay.gateway import REQUESTS_TYPE, encode_requests
from keyhole.service.access import Access, Keyring
from keyhole.service.relay import Mix, RelayApp

RING = Keyring((b"r" * 32,))
LEAST = 4
VICTIM = b"v" * 80


class Gateway:
    """What the attacker's gateway is sent, batch by batch."""

    def __init__(self):
        self.batches = []

    async def forward(self, sealed):
        self.batches.append(sorted(sealed))
        return [b"answer"] * len(sealed)


def token(name):
    return RING.issue("device", name, now=time.time(), seconds=600.0, audience="relay")


def batches_of(sybils, access, least=LEAST):
    """What arrives when a victim and sybils, given by what they show, ask at one time."""
    gateway = Gateway()
    mix = Mix(seconds=0.0, clients=LEAST, min_devices=least, longest=0.2)
    app = RelayApp(gateway, mix=mix, access=access)

    async def post(client, body, shown):
        headers = {"content-type": REQUESTS_TYPE}
        if shown is not None:
            headers["authorization"] = f"Bearer {shown}"
        answer = await client.post("/v1/relay", content=encode_requests([body]), headers=headers)
        return answer.status_code

    async def story():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            own = [post(client, b"%80d" % place, shown) for place, shown in enumerate(sybils)]
            return await asyncio.gather(post(client, VICTIM, token("victim")), *own)

    statuses = asyncio.run(story())
    return gateway.batches, statuses


@pytest.mark.parametrize(
    "sybils",
    [
        [None] * (LEAST - 1),
        ["kh2.made.up"] * (LEAST - 1),
        [token("one")] * (LEAST - 1),
        [token("one"), token("one"), token("two")],
        [RING.issue("device", f"s{n}", now=time.time(), seconds=600.0) for n in range(3)],
    ],
    ids=["no token", "made up", "one token thrice", "one device twice", "for another service"],
)
def test_sybils_without_tokens_of_their_own_get_nothing(sybils):
    batches, statuses = batches_of(sybils, Access(RING, audience="relay"))
    assert batches == []
    assert statuses[0] == 503  # the victim is told to come back, and nothing of it has gone


def test_devices_with_tokens_of_their_own_are_mixed():
    names = [token(f"phone-{n}") for n in range(LEAST - 1)]
    batches, statuses = batches_of(names, Access(RING, audience="relay"))
    assert statuses == [200] * LEAST
    (batch,) = batches
    assert len(batch) == LEAST
    assert VICTIM in batch


def test_a_relay_that_counts_bodies_lets_sybils_through():
    batches, statuses = batches_of([None] * (LEAST - 1), Access(audience="relay"))
    assert statuses == [200] * LEAST
    assert [len(batch) for batch in batches] == [LEAST]


def test_a_relay_without_a_least_number_sends_the_victim_alone():
    batches, _ = batches_of([None] * (LEAST - 1), Access(RING, audience="relay"), least=1)
    assert batches == [[VICTIM]]
