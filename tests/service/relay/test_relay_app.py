"""The relay: passes on bodies and nothing else, to one place, and says plainly when it cannot."""

import asyncio
import logging
import time
from contextlib import ExitStack

import httpx
import pytest

from keyhole.delivery.relay.binary_http import BinaryRequest, decode_response, encode_request
from keyhole.delivery.relay.client import slice_path
from keyhole.delivery.relay.gateway import (
    ANSWERS_TYPE,
    PROBLEM,
    REQUESTS_TYPE,
    decode_answers,
    encode_answers,
    encode_requests,
)
from keyhole.delivery.relay.ohttp import REQUEST_TYPE, GatewayKey, open_response, seal_request
from keyhole.device.relayed import RelayedFetch
from keyhole.errors import ServiceError
from keyhole.service import relay as gateway_line
from keyhole.service.access import Access, Keyring
from keyhole.service.app import App
from keyhole.service.gateway import gateway_routes
from keyhole.service.limits import Limits
from keyhole.service.relay import Mix, RelayApp
from keyhole.service.transport import Listen, serving
from tests.helpers import LONG, assert_trees_equal
from tests.service.in_process import SHAPE
from tests.service.relay.relayed import SETTINGS, line_to, relayed
from tests.service.scripted import answer, scripted
from tests.service.small_service import Service
from tests.service.sockets import make_certificates

TELLING = {"cookie": "me=1", "user-agent": "phone-7", "x-forwarded-for": "10.1.2.3", "via": "1.1 a"}


@pytest.fixture
def both(tmp_path):
    with relayed(tmp_path) as made:
        made.state, made.round = made.publish()
        yield made


@pytest.fixture(scope="module", autouse=True)
def http():
    """One client for all tests: to make one takes longer than to use it."""
    with httpx.Client(timeout=LONG) as client:
        yield client


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


def sealed(both, key):
    plain = encode_request(BinaryRequest(b"GET", slice_path(both.round, 1, key)), 128)
    return seal_request(both.key.config, plain)


def post(http, both, body, kind=REQUESTS_TYPE, **headers):
    headers = {"content-type": kind, **headers}
    return http.post(f"{both.url}/v1/relay", content=body, headers=headers)


def test_a_batch_and_a_single_request_are_answered(http, both):
    pairs = [sealed(both, key) for key in (0, 5)]
    got = post(http, both, encode_requests([request for request, _ in pairs]))
    assert (got.status_code, got.headers["content-type"]) == (200, ANSWERS_TYPE)
    for (_, exchange), one in zip(pairs, decode_answers(got.content, 2), strict=True):
        assert decode_response(open_response(exchange, one)).status == 200
    request, exchange = sealed(both, 3)
    got = post(http, both, request, REQUEST_TYPE)
    assert (got.status_code, got.headers["content-type"]) == (200, "message/ohttp-res")
    assert decode_response(open_response(exchange, got.content)).status == 200


def test_nothing_of_a_clients_head_reaches_the_gateway(http, both):
    post(http, both, encode_requests([sealed(both, 1)[0]]), **TELLING, authorization="Bearer abc")
    (method, path, query, _, headers) = both.gateway.seen[-1]
    assert (method, path, query) == ("POST", "/v1/gateway", b"")
    assert {name for name, _ in headers} == {
        b"host",
        b"accept",
        b"accept-encoding",
        b"content-type",
        b"content-length",
    }
    told = b" ".join(value for _, value in headers)
    assert not any(value.encode() in told for value in (*TELLING.values(), "abc"))


def test_a_single_request_that_does_not_open_gets_the_problem_of_the_rfc(http, both):
    request = sealed(both, 1)[0]
    for body in (b"", b"x", request[:-1], bytes(len(request))):
        got = post(http, both, body, REQUEST_TYPE)
        assert (got.status_code, got.content) == (400, PROBLEM)
        assert got.headers["content-type"] == "application/problem+json"


def test_what_cannot_be_a_sealed_request_is_not_forwarded(http, both):
    post(http, both, b"", REQUEST_TYPE)
    got = post(http, both, encode_requests([b"short"] * 3))
    assert decode_answers(got.content, 3) == [b""] * 3
    assert not both.gateway.bodies("/v1/gateway")


def test_clients_that_come_together_are_forwarded_together(tmp_path):
    with relayed(tmp_path, mix=Mix(seconds=20.0, clients=3)) as both:
        both.state, both.round = both.publish()
        pairs = [[sealed(both, key) for key in (client, client + 1)] for client in range(3)]

        async def all_at_once():
            async with httpx.AsyncClient() as client:
                headers = {"content-type": REQUESTS_TYPE}
                bodies = [encode_requests([request for request, _ in own]) for own in pairs]
                return await asyncio.gather(
                    *[
                        client.post(f"{both.url}/v1/relay", content=body, headers=headers)
                        for body in bodies
                    ]
                )

        for own, got in zip(pairs, asyncio.run(all_at_once()), strict=True):
            for (_, exchange), one in zip(own, decode_answers(got.content, 2), strict=True):
                assert decode_response(open_response(exchange, one)).status == 200
        (batch,) = both.gateway.bodies("/v1/gateway")
        assert len(batch) == 8 + 6 * len(pairs[0][0][0])


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (("GET", "/v1/relay", {}, b""), 405),
        (("POST", "/v1/gateway", {"content-type": REQUESTS_TYPE}, b""), 404),
        (("POST", "/v1/relay", {"content-type": "text/plain"}, b"x"), 415),
        (("POST", "/v1/relay", {"content-type": REQUESTS_TYPE}, b"x"), 400),
        (("GET", "/v1/rounds/current", {}, b""), 404),
    ],
    ids=str,
)
def test_what_the_relay_refuses_has_the_shape_of_every_error(http, both, request_, status):
    method, path, headers, body = request_
    got = http.request(method, both.url + path, headers=headers, content=body)
    assert got.status_code == status
    assert got.json()["error"].keys() == SHAPE


def test_bodies_are_limited(stack):
    app = RelayApp(line_to(stack, "http://127.0.0.1:9"), limits=Limits(max_body=100, max_keys=2))

    async def post(body):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"content-type": REQUESTS_TYPE}
            return await client.post("/v1/relay", content=body, headers=headers)

    for body in (bytes(101), encode_requests([b"a"] * 3)):
        assert asyncio.run(post(body)).status_code == 413


def test_a_gateway_that_is_away_is_a_502_and_then_works_again(http, both, stack):
    away = RelayApp(line_to(stack, "http://127.0.0.1:9"), mix=Mix(0.0))

    async def post():
        transport = httpx.ASGITransport(away)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            headers = {"content-type": REQUESTS_TYPE}
            body = encode_requests([sealed(both, 1)[0]])
            return [
                await client.post("/v1/relay", content=body, headers=headers),
                await client.get("/v1/relay/keys"),
                await client.get("/readyz"),
                await client.get("/healthz"),
            ]

    assert [got.status_code for got in asyncio.run(post())] == [502, 502, 502, 200]


@pytest.mark.parametrize(
    ("told", "status"),
    [
        (answer(200, b"nonsense"), 502),
        (answer(200, b"KHB2\2\0\0\0" + bytes(8)), 502),
        (answer(503, b"", retry_after="1"), 503),
        (answer(429, b"", retry_after="1"), 503),
        (answer(401, b""), 502),
        (answer(500, b""), 502),
    ],
    ids=["nonsense", "two answers", "busy", "too many", "no token", "failed"],
)
def test_what_a_gateway_says_in_trouble_becomes_the_relays_error(stack, told, status):
    with scripted(told) as script:
        app = RelayApp(line_to(stack, f"http://127.0.0.1:{script.port}"), mix=Mix(0.0))

        async def post():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
                headers = {"content-type": REQUESTS_TYPE}
                body = encode_requests([bytes(60)])
                return await client.post("/v1/relay", content=body, headers=headers)

        got = asyncio.run(post())
        assert got.status_code == status
        assert got.json()["error"].keys() == SHAPE


def test_a_batch_is_sent_once_even_if_the_gateway_hangs_up(stack):
    good = answer(200, encode_answers([b"x"]))
    with scripted(good, None, good) as script:
        line = line_to(stack, f"http://127.0.0.1:{script.port}")
        assert asyncio.run(line.forward([bytes(60)])) == [b"x"]
        with pytest.raises(ServiceError):  # over a connection that was used before
            asyncio.run(line.forward([bytes(60)]))
        assert (len(script.asked), script.connections) == (2, 1)
        assert asyncio.run(line.forward([bytes(60)])) == [b"x"]


def test_a_connection_that_has_rested_is_made_anew(stack, monkeypatch):
    monkeypatch.setattr(gateway_line, "_RESTED", 0.0)
    good = answer(200, encode_answers([b"x"]))
    with scripted(good, good) as script:
        line = line_to(stack, f"http://127.0.0.1:{script.port}")
        for _ in range(2):
            asyncio.run(line.forward([bytes(60)]))
        assert script.connections == 2


def test_all_of_it_works_over_tls(tmp_path, stack):
    folder = make_certificates(tmp_path)
    listen = Listen(certfile=folder / "server.pem", keyfile=folder / "server.key")
    service, key = Service(tmp_path / "rounds"), GatewayKey.fresh()
    routes = gateway_routes(service.rounds, [key])
    stack.callback(service.rounds.close)
    stack.enter_context(service.publisher)
    round_id = service.publish(settings=SETTINGS).published.id
    url = stack.enter_context(serving(App(service.rounds, extra_routes=[routes]), listen))
    line = line_to(stack, url, ca=folder / "ca.pem")
    relay = stack.enter_context(serving(RelayApp(line, mix=Mix(0.0)), listen))
    device = stack.enter_context(service.device(url, token=None, ca=folder / "ca.pem"))
    behind = stack.enter_context(service.device(relay, token=None, ca=folder / "ca.pem"))
    keys = {"word": [1], "neuron": [2]}
    found = RelayedFetch(behind.client)(device, round_id, keys)
    assert_trees_equal(found.model, device.fetch(round_id, keys).model)


def test_the_relay_passes_on_the_key_configuration(http, both):
    got = http.get(f"{both.url}/v1/relay/keys")
    assert got.headers["content-type"] == "application/ohttp-keys"
    assert got.content == http.get(f"{both.service.url}/v1/gateway/keys").content
    assert http.get(f"{both.url}/readyz").status_code == 200
    assert http.get(f"{both.url}/metrics").status_code == 404


def test_the_relay_shows_its_own_token_where_reading_takes_one(http, tmp_path):
    ring = Keyring((b"k" * 32,))
    token = ring.issue("device", "relay-1", now=time.time(), seconds=600.0)
    access = Access(ring, reads_need_token=True)
    with relayed(tmp_path, token=token, access=access) as both:
        both.state, both.round = both.publish()
        assert post(http, both, encode_requests([sealed(both, 1)[0]])).status_code == 200


def test_neither_addresses_nor_sizes_are_logged(http, both, caplog):
    with caplog.at_level(logging.DEBUG):
        post(http, both, encode_requests([sealed(both, 1)[0]]))
        post(http, both, b"x", REQUEST_TYPE)
        post(http, both, b"x")
    own = [r for r in caplog.records if not r.name.startswith(("httpx", "httpcore"))]
    assert not [record for record in own if "127.0.0.1" in record.getMessage()]
    assert not [record for record in own if record.name.startswith("keyhole")]
