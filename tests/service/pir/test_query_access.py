"""Private queries take a token of the round, and are held to the budgets of token and address."""

import asyncio
from functools import partial

import httpx
import pytest
from click.testing import CliRunner

from keyhole.cli.serve import serve
from keyhole.service.access import Access
from keyhole.service.limits import Limits, Turns
from tests.service.in_process import NOW, RING, bearer
from tests.service.pir.one_service import BINARY, PirService


def guarded(**limits):
    return PirService(
        app={"access": Access(RING), "clock": lambda: NOW, "limits": Limits(**limits)}
    )


def token_of(service, kind="round", device="phone-1", **more):
    more = {"round_id": service.round.id, **more}
    return bearer(RING.issue(kind, device, now=NOW, seconds=60.0, **more))


def queries_of(count):
    """Fresh queries, by a service of the same tables that answers everyone."""
    return [PirService().query() for _ in range(count)]


def test_a_query_takes_a_token_of_the_round_and_params_do_not():
    service = guarded()
    first, second, third = queries_of(3)
    assert service.ask("GET").status_code == 200
    assert service.post(first).status_code == 401
    assert service.post(first, **token_of(service, "device", round_id=None)).status_code == 403
    assert service.post(first, **token_of(service, round_id="2-" + "0" * 64)).status_code == 403
    assert service.post(first, **token_of(service, audience="relay")).status_code == 403
    assert service.post(second, **token_of(service)).status_code == 200
    assert service.post(third, **token_of(service, "query")).status_code == 200


def test_without_keys_a_service_answers_no_query_unless_told():
    service = PirService(app={"access": Access()})
    assert service.post(service.query()).status_code == 401
    assert PirService().post(service.query()).status_code == 200


def test_a_token_has_a_budget_of_queries_and_the_answer_says_when_to_come_back():
    service = guarded(queries_per_token=2)
    token = token_of(service)
    answers = [service.post(query, **token) for query in queries_of(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    facts = answers[-1].json()["error"]
    assert (facts["kind"], facts["wrong"]) == ("TooManyError", "too many private queries")
    assert 1700 < int(answers[-1].headers["retry-after"]) <= 1802  # two in an hour
    other = token_of(service, device="phone-2")
    assert service.post(queries_of(1)[0], **other).status_code == 200


async def ask_from(service, address, query, name):
    transport = httpx.ASGITransport(service.app, client=(address, 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        headers = {**BINARY, **token_of(service, device=name)}
        return await client.post(service.path(), content=query, headers=headers)


def test_an_address_has_a_budget_of_cpu_seconds():
    service = guarded(cpu_per_address=1e-3, cpu_burst=1e-3)  # one query is more than that
    queries, ask = iter(queries_of(12)), partial(ask_from, service)

    async def story():
        statuses = []
        while not statuses or statuses[-1] == 200:  # each with a token of its own
            answer = await ask("192.0.2.1", next(queries), f"phone-{len(statuses)}")
            statuses.append(answer.status_code)
        other = await ask("192.0.2.2", next(queries), "phone")
        proxy = [await ask("127.0.0.1", next(queries), f"p{n}") for n in range(3)]
        return answer, [other.status_code, *(each.status_code for each in proxy)]

    refused, others = asyncio.run(story())
    assert refused.status_code == 429
    assert "CPU seconds" in refused.json()["error"]["allowed"]
    assert int(refused.headers["retry-after"]) >= 1
    assert others == [200] * 4


def test_queries_that_their_pass_refuses_take_from_the_budget_too():
    service = guarded(cpu_per_address=1e-9, cpu_burst=1.0)
    first, second = queries_of(2)
    asked = [("192.0.2.1", first), ("192.0.2.2", first), ("192.0.2.2", second)]

    async def story():
        answers = [await ask_from(service, *each, f"p{n}") for n, each in enumerate(asked)]
        return [answer.status_code for answer in answers]

    assert asyncio.run(story()) == [200, 400, 429]


def test_turns_of_one_name_come_one_by_one_and_those_of_others_meanwhile():
    turns, log = Turns("queries"), []

    async def take(name, label, done):
        async with turns.turn(name, 1, 8):
            log.append(label)
            await done.wait()

    async def story():
        first, second = asyncio.Event(), asyncio.Event()
        second.set()
        tasks = [asyncio.create_task(take("a", "a1", first))]
        tasks += [asyncio.create_task(take("a", "a2", second))]
        tasks += [asyncio.create_task(take("b", "b1", second))]
        await tasks[2]
        assert log == ["a1", "b1"]
        first.set()
        await asyncio.gather(*tasks)
        assert log == ["a1", "b1", "a2"]
        assert len(turns) == 0

    asyncio.run(story())


@pytest.mark.parametrize("flags", [("--pir", "0"), ("--open-queries",)])
def test_a_server_that_nobody_could_ask_is_refused(tmp_path, flags):
    done = CliRunner().invoke(serve, [str(tmp_path), *flags])
    assert done.exit_code == 2
    assert "--token-key" in done.output or "needs --pir" in done.output
