"""The mixer: nobody goes before others had their chance, and everybody gets their own."""

import asyncio
from itertools import pairwise

import pytest

from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ServiceError
from keyhole.service.relay import Mix, Mixer

LONG = 50.0  # seconds that no test waits


class Gateway:
    """Answers, and keeps what came."""

    def __init__(self):
        self.batches = []

    async def __call__(self, sealed):
        self.batches.append(sealed)
        return [b"to " + one for one in sealed]


def requests_of(client, count):
    return [b"%d-%03d" % (client, number) for number in range(count)]


def run(mix, *clients, forward=None, prg=None):
    """The answers to several clients at once, and what the gateway saw."""
    gateway = Gateway() if forward is None else forward

    async def all_of_them():
        mixer = Mixer(gateway, mix, prg)
        return await asyncio.gather(*[mixer.ask(c) for c in clients], return_exceptions=True)

    return asyncio.run(all_of_them()), gateway


def test_clients_are_mixed_in_one_batch_and_get_their_own_answers():
    clients = [requests_of(client, 20) for client in range(3)]
    answers, gateway = run(Mix(LONG, 3), *clients, prg=Prg(bytes(16)))
    assert answers == [[b"to " + one for one in client] for client in clients]
    (batch,) = gateway.batches
    assert sorted(batch) == sorted(one for client in clients for one in client)
    changes = sum(a[0] != b[0] for a, b in pairwise(batch))
    assert changes > 20  # one client after the other would give 2


def test_the_order_is_another_one_every_time():
    client = requests_of(0, 30)
    orders = {tuple(run(Mix(0.0, 1), client)[1].batches[0]) for _ in range(5)}
    assert len(orders) == 5


def test_a_full_mix_does_not_wait():
    clients = [requests_of(client, 1) for client in range(4)]
    _, gateway = run(Mix(LONG, 2), *clients)
    assert [len(batch) for batch in gateway.batches] == [2, 2]


def test_a_mix_that_does_not_fill_up_goes_when_its_time_is_over():
    answers, gateway = run(Mix(0.01, 100), requests_of(0, 2), requests_of(1, 2))
    assert [len(batch) for batch in gateway.batches] == [4]
    assert answers[1] == [b"to 1-000", b"to 1-001"]


def test_requests_of_different_lengths_are_not_mixed():
    _, gateway = run(Mix(0.01, 100), [b"a" * 60], [b"b" * 61], [b"c" * 60])
    assert sorted({len(one) for one in batch} for batch in gateway.batches) == [{60}, {61}]
    assert sorted(len(batch) for batch in gateway.batches) == [1, 2]


def test_large_mixes_go_in_several_batches():
    clients = [requests_of(client, 7) for client in range(3)]
    answers, gateway = run(Mix(LONG, 3, requests=8), *clients)
    assert [len(batch) for batch in gateway.batches] == [8, 8, 5]
    assert answers == [[b"to " + one for one in client] for client in clients]


def test_a_failure_reaches_every_client_and_the_next_mix_starts_anew():
    calls = []

    async def forward(sealed):
        calls.append(len(sealed))
        if len(calls) == 1:
            raise ServiceError("away: got x; expected y; z")
        return sealed

    answers, _ = run(Mix(LONG, 2), *[requests_of(c, 1) for c in range(4)], forward=forward)
    assert [type(answer) for answer in answers] == [ServiceError, ServiceError, list, list]


def test_a_relay_that_breaks_off_leaves_nobody_waiting():
    class PanicError(BaseException):
        """Nothing that is caught as an Exception."""

    panics = []

    async def forward(sealed):
        raise PanicError

    async def all_of_them():
        asyncio.get_running_loop().set_exception_handler(lambda _, c: panics.append(c["exception"]))
        mixer = Mixer(forward, Mix(LONG, 2))
        asked = [mixer.ask(requests_of(client, 1)) for client in range(2)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), LONG)

    assert [type(answer) for answer in asyncio.run(all_of_them())] == [ServiceError, ServiceError]
    assert [type(panic) for panic in panics] == [PanicError]


def test_a_gateway_that_drops_answers_is_refused():
    async def forward(sealed):
        return sealed[1:]

    answers, _ = run(Mix(0.0, 1), requests_of(0, 2), forward=forward)
    assert isinstance(answers[0], ServiceError)


def test_a_client_that_leaves_does_not_hold_up_the_others():
    gateway = Gateway()

    async def leave():
        mixer = Mixer(gateway, Mix(LONG, 2))
        gone = asyncio.create_task(mixer.ask([b"gone"]))
        await asyncio.sleep(0)
        gone.cancel()
        return await mixer.ask([b"here"])

    assert asyncio.run(leave()) == [b"to here"]
    assert sorted(gateway.batches[0]) == [b"gone", b"here"]


@pytest.mark.parametrize("facts", [(-1.0, 1, 1), (61.0, 1, 1), (float("nan"), 1, 1), (1.0, 0, 1)])
def test_impossible_mixes_cannot_be_made(facts):
    with pytest.raises(InputError, match="mix"):
        Mix(*facts)
