"""What the service refuses: each wrong request has its status, and all have one shape."""

import asyncio
from functools import partial

import httpx
import numpy as np
import pytest

from keyhole.service.access import Access
from keyhole.service.limits import Limits
from keyhole.wire import messages as wire
from tests.helpers import DIGEST
from tests.service.in_process import (
    BINARY,
    RING,
    WORD_TABLE,
    Service,
    bearer,
    round_token,
)
from tests.service.jumping_loop import JumpingLoop
from tests.service.memory_rounds import WORDS

SLICES = "/v1/rounds/{id}/slices"
SEGMENT = "/v1/rounds/{id}/tables/1/segments/1"


@pytest.fixture
def service():
    return Service()


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/rounds",
        "/v1/rounds/",
        "/v1/rounds/{id}",
        "/v1/rounds/{id}/",
        "/v1/rounds/{id}/nope",
        "/v1/rounds/{id}/manifest/",
        "/v1//rounds/current",
        "/v1/rounds/%2e%2e/manifest",
        "/v1/rounds/{id}%2fmanifest",
        "/v1/rounds/x/manifest",
        f"/v1/rounds/9-{DIGEST}/manifest",
        "/v1/rounds/{id}/tables/2/slices/0",
        "/v1/rounds/{id}/tables/-1/slices/0",
        "/v1/rounds/{id}/tables/01/slices/0",
        "/v1/rounds/{id}/tables/1/slices/40",
        "/v1/rounds/{id}/tables/1/slices/-1",
        "/v1/rounds/{id}/tables/1/slices/1e1",
        "/v1/rounds/{id}/tables/1/slices/99999999999999999999",
        "/v1/rounds/{id}/tables/1/segments/2",
        "/v1/rounds/{id}/tables/1/segments/0/nope",
    ],
)
def test_what_does_not_exist_is_404(service, path):
    service.assert_refused(service.ask("GET", path), 404, "NotFoundError")


def test_a_round_without_a_broadcast_part_says_so(service):
    only = type(service.round)(
        service.round.id, service.round.manifest, service.round.encoded, service.round.tables[1:]
    )
    service.rounds.rounds[only.id] = only
    service.assert_refused(service.ask("GET", "/v1/rounds/{id}/broadcast"), 404, "NotFoundError")


def test_a_removed_round_is_410(service):
    service.rounds.removed.add(service.round.id)
    service.assert_refused(service.ask("GET", "/v1/rounds/{id}/manifest"), 410, "TooLateError")
    service.assert_refused(service.query(wire.Ask(1, np.array([1]))), 410, "TooLateError")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/rounds/{id}/slices", "POST, QUERY"),
        ("DELETE", "/v1/rounds/{id}/manifest", "GET, HEAD"),
        ("GET", "/v1/checkin", "POST"),
        ("OPTIONS", "/healthz", "GET, HEAD"),
        ("PUT", "/v1/rounds/{id}/updates", "POST"),
    ],
)
def test_another_method_is_405_and_told_which_ones_there_are(service, method, path, allow):
    answer = service.ask(method, path)
    service.assert_refused(answer, 405, "MethodError")
    assert answer.headers["allow"] == allow


def test_another_content_type_is_415(service):
    for kind in ({}, {"content-type": "text/plain"}):
        answer = service.ask("POST", "/v1/rounds/{id}/slices", content=b"x", headers=kind)
        service.assert_refused(answer, 415, "MediaTypeError")


@pytest.mark.parametrize("body", [b"", b"KHQ1", b"x" * 8, b"KHQ1\x01\x00\x00\x00", b"KHU2" * 20])
def test_bytes_that_are_no_query_are_400(service, body):
    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=body, headers=BINARY)
    service.assert_refused(answer, 400, "RequestError")


@pytest.mark.parametrize("key", [-1, 77, 2**40, -(2**31)])
def test_keys_outside_are_counted_and_never_shown(service, key, caplog):
    answer = service.query(wire.Ask(WORD_TABLE, np.array([1, key, 2])))
    facts = service.assert_refused(answer, 400, "KeySpaceError")
    assert facts["got"] == "1 of 3 keys"
    assert str(key) not in answer.text.replace("0..39", "")
    assert caplog.text == ""


def test_the_first_key_behind_the_end_is_refused(service):
    assert service.query(wire.Ask(WORD_TABLE, np.array([WORDS - 1]))).status_code == 200
    service.assert_refused(
        service.query(wire.Ask(WORD_TABLE, np.array([WORDS]))), 400, "KeySpaceError"
    )


def test_too_many_keys_are_413(service):
    limited = Service(limits=Limits(max_keys=2))
    assert limited.query(wire.Ask(1, np.arange(2))).status_code == 200
    limited.assert_refused(limited.query(wire.Ask(1, np.arange(3))), 413, "TooLargeError")


def test_an_answer_beyond_the_limit_is_413_before_it_is_made(service):
    limited = Service(limits=Limits(max_answer=100))
    limited.assert_refused(limited.query(wire.Ask(1, np.arange(20))), 413, "TooLargeError")
    assert limited.round.tables[WORD_TABLE].fetches == 0


def test_a_body_beyond_the_limit_is_413_by_its_head_and_by_its_length():
    service = Service(limits=Limits(max_keys=1))
    path, limit = "/v1/rounds/{id}/slices", wire.max_query_bytes(1)
    longer = b"x" * (limit + 1)
    service.assert_refused(
        service.ask("POST", path, content=longer, headers=BINARY), 413, "TooLargeError"
    )

    async def pieces():
        for _ in range(100):
            yield b"x" * (limit // 2)

    service.assert_refused(
        service.ask("POST", path, content=pieces(), headers=BINARY), 413, "TooLargeError"
    )


@pytest.mark.parametrize("length", ["-1", "x", "1e3", "9" * 30, "+5", "٣".encode()])
def test_a_content_length_that_is_no_number_is_400(service, length):
    headers = {**BINARY, "content-length": length}
    answer = service.ask("POST", "/v1/rounds/{id}/slices", content=b"x", headers=headers)
    service.assert_refused(answer, 400, "RequestError")


def test_a_body_that_never_comes_is_408():
    service = Service(limits=Limits(body_seconds=30.0, slowest=1e9))

    async def stalled():
        yield b"KHQ1"
        await asyncio.sleep(60.0)

    answer = service.ask("POST", SLICES, JumpingLoop, content=stalled(), headers=BINARY)
    service.assert_refused(answer, 408, "SlowError")


def test_a_slow_body_has_more_time_the_more_of_it_has_come():
    service = Service(limits=Limits(body_seconds=1.0, slowest=2.0))
    body = wire.encode_query([wire.Ask(WORD_TABLE, np.arange(10))])

    async def steady(pause):
        for at in range(0, len(body), 8):
            yield body[at : at + 8]
            await asyncio.sleep(pause)

    for pause, status in ((3.9, 200), (4.5, 408)):  # 8 bytes may take 4 s, and the first 1 s more
        answer = service.ask("POST", SLICES, JumpingLoop, content=steady(pause), headers=BINARY)
        assert answer.status_code == status


def test_a_device_that_asks_too_often_is_told_when_to_come_back(service):
    limited = Service(
        access=Access(RING, reads_need_token=True), limits=Limits(rate=1e-4, burst=2e4)
    )
    headers = bearer(round_token(limited))
    answers = [limited.ask("GET", "/v1/rounds/{id}/manifest", headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    limited.assert_refused(answers[2], 429, "TooManyError")
    assert 10_000 <= int(answers[2].headers["retry-after"]) <= 10_001
    other = bearer(round_token(limited, device="phone-2"))
    assert limited.ask("GET", "/v1/rounds/{id}/manifest", headers=other).status_code == 200


def test_a_full_service_is_503_and_spreads_those_who_come_back():
    service = Service(limits=Limits(in_flight=1, waiting=1))
    table, begun = service.round.tables[WORD_TABLE], None

    async def story():
        nonlocal begun
        begun, go = asyncio.Event(), asyncio.Event()
        fetch = table.fetch

        async def slow(keys, out=None):
            begun.set()
            await go.wait()
            return await fetch(keys, out)

        table.fetch = slow
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = wire.encode_query([wire.Ask(WORD_TABLE, np.array([1]))])
            path = f"/v1/rounds/{service.round.id}/slices"
            post = partial(client.post, path, content=body, headers=BINARY)
            first = asyncio.create_task(post())
            await begun.wait()
            second = asyncio.create_task(post())
            while service.app.metrics.page().find(b"keyhole_requests_waiting 1.0") < 0:
                await asyncio.sleep(0)
            busy = [await post() for _ in range(8)]
            go.set()
            return [await first, await second], busy

    served, busy = asyncio.run(story())
    assert [answer.status_code for answer in served] == [200, 200]
    for answer in busy:
        service.assert_refused(answer, 503, "BusyError")
    assert len({answer.headers["retry-after"] for answer in busy}) > 1
    assert b"keyhole_requests_waiting 0.0" in service.app.metrics.page()
