"""The routes of private retrieval: what they give out, and what they refuse without a word."""

import asyncio
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest

from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.messages import seal
from keyhole.delivery.pir.two_server import TwoServerPir
from keyhole.service.access import Access
from keyhole.service.limits import Limits
from keyhole.wire.http import REFUSAL
from keyhole.wire.private import QuerySettings, Role, name_table, role_named
from tests.delivery.pir.mutations import HEAD_BYTES, body_of, flipped, resealed, with_body
from tests.delivery.pir.schemes import two_server_zero_bits
from tests.helpers import DIGEST, LONG
from tests.service.in_process import NOW, RING, bearer
from tests.service.pir.one_service import (
    BINARY,
    EVERYONE,
    SERVER_1,
    WORD,
    WORDS,
    PirService,
)

SCANS, ANSWERED = "keyhole_private_scans_total", "keyhole_private_queries_total"


@pytest.fixture(scope="module")
def service():
    return PirService()


def test_terms_are_those_of_the_table_and_may_be_cached_for_ever(service):
    answer = service.ask("GET")
    params = PirParams.decode(answer.content)
    table = service.round.tables[WORD].info
    assert (params.num_keys, params.row_bytes, params.max_keys) == (WORDS, table.record_bytes, 4)
    assert params.round == name_table(service.round.id, WORD)
    assert params.model.hex() == service.round.id.split("-")[1]
    assert params.root.hex() == table.root
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable, no-transform"
    again = service.ask("GET", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304


def test_two_replies_open_to_the_slices_that_were_asked_for(service):
    other = PirService(SERVER_1)
    assert other.params == service.params
    question = service.question([9, 2, 9])
    replies = [s.post(m) for s, m in zip((service, other), question.messages(), strict=True)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert {len(reply.content) for reply in replies} == {
        TwoServerPir().lengths(service.params.encode()).reply
    }
    assert {reply.headers["cache-control"] for reply in replies} == {"no-store"}
    found = question.decode([reply.content for reply in replies])
    np.testing.assert_array_equal(found.records, service.round.tables[WORD].records[[9, 2, 9]])


def bad_messages(service):
    """One of each kind of message that cannot be used, and the kind that it is counted as."""
    good, params = service.query(), service.params
    answered = service.query()
    assert service.post(answered).status_code == 200
    body = body_of(good)
    other_round = replace(params, round=bytes(16))
    yield "empty", b"", "MalformedError"
    yield "truncated", good[:-1], "MalformedError"
    yield "extended", good + b"\0", "MalformedError"
    yield "much longer", good * 9, "MalformedError"
    yield "a flipped bit", flipped(good, 8 * len(good) // 2), "MalformedError"
    yield "a refusal", REFUSAL, "MalformedError"
    yield "a reply", seal("reply", params, 0, body), "MalformedError"
    yield "for the other server", service.question().messages()[1], "MalformedError"
    yield "another round", seal("query", other_round, 0, body), "StaleError"
    yield "other params", resealed(flipped(good, 8 * HEAD_BYTES - 1)), "StaleError"
    at = next(iter(two_server_zero_bits(params)))
    yield "spare bits", with_body(good, flipped(body, at)), "MalformedError"
    yield "a replay", answered, "ReplayError"


def test_whatever_is_wrong_with_a_message_the_answer_is_the_same_and_nothing_is_scanned():
    service = PirService()
    answers, scans = {}, None
    for name, message, kind in bad_messages(service):
        scans = service.metric(SCANS) if scans is None else scans
        counted = service.metric(f'keyhole_refused_total{{kind="{kind}"}}')
        answer = service.post(message)
        answers[name] = (answer.status_code, sorted(answer.headers.items()), answer.content)
        assert service.metric(f'keyhole_refused_total{{kind="{kind}"}}') == counted + 1, name
    assert len(answers) == 12
    assert {status for status, _, _ in answers.values()} == {400}
    assert {body for *_, body in answers.values()} == {REFUSAL}
    assert len({str(answer) for answer in answers.values()}) == 1
    assert service.metric(SCANS) == scans == 1
    assert service.rounds.held == 0


def test_a_body_in_pieces_is_refused_alike(service):
    async def pieces():
        yield b"ab"
        yield b"c"

    answer = service.ask("POST", content=pieces(), headers=BINARY)
    assert (answer.status_code, answer.content) == (400, REFUSAL)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"/v1/rounds/3-{DIGEST}/tables/1/pir/two-server", 404),
        ("/v1/rounds/x/tables/1/pir/two-server", 404),
        ("/v1/rounds/{id}/tables/1/pir/one-server", 404),
        ("/v1/rounds/{id}/tables/1/pir/nonsense", 404),
        ("/v1/rounds/{id}/tables/9/pir/two-server", 404),
        ("/v1/rounds/{id}/tables/-1/pir/two-server", 404),
        (f"/v1/rounds/{{id}}/tables/{EVERYONE}/pir/two-server", 404),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_paths_that_do_not_exist_are_told_by_the_path(service, path, status, method):
    headers = BINARY if method == "POST" else {}
    answer = service.ask(method, path.format(id=service.round.id), headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["kind"] == "NotFoundError"
    assert service.ask("GET", service.path(rest="/hint")).status_code == 404  # needs none


def test_a_removed_round_is_told_by_the_path():
    service = PirService()
    query = service.query()
    service.rounds.removed.add(service.round.id)
    assert service.post(query).status_code == 410
    assert service.ask("GET").status_code == 410


def test_a_body_of_another_type_or_beyond_the_limit_is_refused_as_elsewhere(service):
    assert service.post(b"", **{"content-type": "text/plain"}).status_code == 415
    small = PirService(app={"limits": Limits(max_body=4096)})
    answer = small.post(bytes(4097))
    assert (answer.status_code, answer.json()["error"]["kind"]) == (413, "TooLargeError")
    assert small.post(small.query()).status_code == 200


@pytest.mark.parametrize("limits", [Limits(max_body=100), Limits(max_answer=100)])
def test_a_table_whose_messages_are_beyond_the_limits_is_not_offered(limits):
    answer = PirService(app={"limits": limits}).ask("GET")
    assert (answer.status_code, answer.json()["error"]["kind"]) == (413, "TooLargeError")


def test_tokens_are_asked_for_as_for_slices():
    app = {"access": Access(RING, reads_need_token=True), "clock": lambda: NOW}
    service, free = PirService(app=app), PirService()
    assert service.ask("GET").status_code == 401
    assert service.post(free.query()).status_code == 401

    def token(round_id=service.round.id, **more):
        made = RING.issue("round", "phone-1", now=NOW, seconds=60.0, round_id=round_id, **more)
        return bearer(made)

    answer = service.ask("GET", headers=token())
    assert answer.status_code == 200
    assert answer.headers["cache-control"].startswith("private")
    assert service.post(free.query(), **token()).status_code == 200
    assert service.post(free.query(), **token(f"2-{DIGEST}")).status_code == 403
    # A query could ask for 4 keys, whatever it does ask for.
    assert service.post(free.query([1]), **token(max_keys=3)).status_code == 403
    assert service.post(free.query([1]), **token(max_keys=4)).status_code == 200


def test_a_round_that_does_not_say_how_many_keys_a_client_chooses_is_refused():
    answer = PirService(max_keys=None).ask("GET")
    facts = answer.json()["error"]
    assert (facts["status"], facts["kind"]) == (404, "NotFoundError")
    assert "--pir-keys" in facts["fix"]
    assert PirService(max_keys=None, max_keys_of={"word": 7}).params.max_keys == 7
    assert PirService(max_keys=3, max_keys_of={"word": 7}).params.max_keys == 7
    assert PirService(max_keys=10**6).params.max_keys == WORDS


def test_logs_hold_nothing_and_counts_no_keys(service, caplog):
    caplog.set_level(logging.DEBUG)
    keys = [31, 29]
    before = service.metric(ANSWERED)
    assert service.post(service.query(keys)).status_code == 200
    assert service.post(service.query(keys)[:-1]).status_code == 400
    assert service.metric(ANSWERED) == before + 1
    assert not [record for record in caplog.records if record.name.startswith("keyhole")]
    assert service.metric("keyhole_keys_total") == 0  # how many keys were asked for is not known


def test_counts_are_the_same_for_all_keys():
    pages = []
    for keys in ([31, 29], [3], []):
        service = PirService()
        assert service.post(service.query(keys)).status_code == 200
        page = service.app.metrics.page().decode()
        pages.append([line for line in page.splitlines() if "_seconds" not in line])
    assert pages[0] == pages[1] == pages[2]


class Blocked:
    """A server that waits to be let go before each pass; counts what it is asked."""

    def __init__(self, server):
        self.server, self.params = server, server.params
        self.go, self.started, self.batches = threading.Event(), threading.Event(), []

    def answer(self, queries):
        self.started.set()
        self.go.wait(LONG)
        self.batches.append(len(queries))
        return self.server.answer(queries)


def blocked(service):
    """Puts a `Blocked` in the place of the server of the word table, which has been made."""
    assert service.ask("GET").status_code == 200
    (passes,) = _passes(service)
    passes._server = made = Blocked(passes._server)
    return made


def _passes(service):
    route = service.app._routes.find("POST", service.path().encode())[0]
    routes = route.handler.__self__
    return [entry.task.result().passes for entry in routes.tables._entries.values()]


async def wait_for(condition):
    for _ in range(12_000):  # a minute or more
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


def test_queries_that_arrive_during_a_pass_are_answered_together_in_the_next():
    service = PirService(together=5)
    server, queries = blocked(service), [service.query() for _ in range(9)]
    bad = resealed(flipped(service.query(), 8 * HEAD_BYTES - 1))

    async def run():
        async with service.client() as client:

            async def post(message):
                return await client.post(service.path(), content=message, headers=BINARY)

            first = asyncio.create_task(post(queries[0]))
            await wait_for(server.started.is_set)
            rest = [asyncio.create_task(post(message)) for message in [*queries[1:], bad]]
            (passes,) = _passes(service)
            await wait_for(lambda: len(passes._waiting) == 8)
            alive = await client.get("/healthz")  # the loop goes on while a pass runs
            server.go.set()
            return alive, await first, await asyncio.gather(*rest)

    alive, first, rest = asyncio.run(run())
    assert alive.status_code == first.status_code == 200
    assert [answer.status_code for answer in rest] == [200] * 8 + [400]
    assert server.batches == [1, 5, 3]
    assert service.metric(SCANS) == 3
    assert service.metric(ANSWERED) == 9


def test_one_bad_query_in_a_pass_spoils_no_other():
    service = PirService()
    server, queries = blocked(service), [service.query() for _ in range(6)]
    at = next(iter(two_server_zero_bits(service.params)))
    forged = with_body(queries[2], flipped(body_of(queries[2]), at))
    messages = [*queries[:2], forged, *queries[3:], queries[0]]  # the last one is a replay

    async def run():
        async with service.client() as client:

            async def post(message):
                return await client.post(service.path(), content=message, headers=BINARY)

            first = asyncio.create_task(post(service_query))
            await wait_for(server.started.is_set)
            rest = [asyncio.create_task(post(message)) for message in messages]
            (passes,) = _passes(service)
            await wait_for(lambda: len(passes._waiting) == len(messages))
            server.go.set()
            return await first, await asyncio.gather(*rest)

    service_query = service.query()
    first, rest = asyncio.run(run())
    assert first.status_code == 200
    assert [answer.status_code for answer in rest] == [200, 200, 400, 200, 200, 200, 400]
    assert {answer.content for answer in rest if answer.status_code == 400} == {REFUSAL}


def test_a_round_that_is_removed_while_queries_wait_answers_them_and_no_more():
    service = PirService()
    server, queries = blocked(service), [service.query() for _ in range(3)]

    async def run():
        async with service.client() as client:

            async def post(message):
                return await client.post(service.path(), content=message, headers=BINARY)

            waiting = [asyncio.create_task(post(message)) for message in queries[:2]]
            await wait_for(server.started.is_set)
            service.rounds.removed.add(service.round.id)
            late = await post(queries[2])
            server.go.set()
            return late, await asyncio.gather(*waiting)

    late, answered = asyncio.run(run())
    assert late.status_code == 410
    assert [answer.status_code for answer in answered] == [200, 200]
    assert service.rounds.held == 0


def test_more_queries_than_may_wait_are_told_to_come_back():
    service = PirService(app={"limits": Limits(max_held=1, waiting=1)})  # one at a time
    server, queries = blocked(service), [service.query() for _ in range(3)]

    async def run():
        async with service.client() as client:

            async def post(message):
                return await client.post(service.path(), content=message, headers=BINARY)

            tasks = [asyncio.create_task(post(queries[0]))]
            await wait_for(server.started.is_set)
            tasks.append(asyncio.create_task(post(queries[1])))
            await wait_for(lambda: service.metric("keyhole_requests_waiting") == 1)
            sent_away = await post(queries[2])
            server.go.set()
            return sent_away, await asyncio.gather(*tasks)

    sent_away, answered = asyncio.run(run())
    assert sent_away.status_code == 503
    assert int(sent_away.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in answered] == [200, 200]


def test_a_device_that_asks_too_often_is_told_so():
    app = {"access": Access(RING, reads_need_token=True), "clock": lambda: NOW}
    service = PirService(app={**app, "limits": Limits(rate=0.001, burst=1.0)})
    token = RING.issue("round", "a", now=NOW, seconds=60.0, round_id=service.round.id)
    assert service.ask("GET", headers=bearer(token)).status_code == 200
    assert service.post(b"", **bearer(token)).status_code == 429


def test_whoever_leaves_before_the_answer_disturbs_nobody():
    service = PirService()
    server, queries = blocked(service), [service.query() for _ in range(3)]

    async def run():
        async with service.client() as client:

            async def post(message):
                return await client.post(service.path(), content=message, headers=BINARY)

            tasks = [asyncio.create_task(post(message)) for message in queries]
            await wait_for(server.started.is_set)
            tasks[0].cancel()
            tasks[1].cancel()
            await asyncio.sleep(0.01)
            server.go.set()
            answer = await tasks[2]
            await wait_for(lambda: service.rounds.held == 0)
            return answer

    assert asyncio.run(run()).status_code == 200


def test_a_table_answers_as_many_queries_as_it_may_remember():
    service = PirService(Role(TwoServerPir(max_queries=2), 0))
    answers = [service.post(service.query()) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert answers[2].content == REFUSAL


def test_replies_count_as_held_until_they_are_sent(service):
    route = service.app._routes.find("POST", service.path().encode())[0]
    guards = route.handler.__self__.guards
    assert service.post(service.query()).status_code == 200
    assert (guards.memory.inside, guards.uploads.inside) == (0, 0)


def test_settings_that_let_nobody_in_are_refused():
    for settings in (
        {"max_keys": 0},
        {"max_bytes": 0},
        {"max_keys_of": {"word": 0}},
    ):
        with pytest.raises(Exception, match="let nobody in"):
            QuerySettings(role_named("0"), **settings)
