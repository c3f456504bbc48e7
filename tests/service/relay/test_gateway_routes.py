"""The gateway of the service: slices for whoever can seal, one refusal for everything else."""

import json

import numpy as np
import pytest

from keyhole.delivery.relay.binary_http import BinaryRequest, decode_response, encode_request
from keyhole.delivery.relay.client import slice_path, slice_reply_bytes
from keyhole.delivery.relay.gateway import (
    ANSWERS_TYPE,
    ERROR_BYTES,
    PROBLEM,
    REQUESTS_TYPE,
    decode_answers,
    encode_requests,
)
from keyhole.delivery.relay.ohttp import (
    REQUEST_TYPE,
    GatewayKey,
    decode_configs,
    open_response,
    seal_request,
)
from keyhole.errors import StorageError
from keyhole.service.access import Access
from keyhole.service.gateway import gateway_routes
from keyhole.service.limits import Limits
from tests.helpers import DIGEST
from tests.service.in_process import NOW, RING, SHAPE, WORD_TABLE, Service

KEY = GatewayKey.fresh(1)


class Later:
    """The rounds of a service that is only being made."""

    def current(self, newest=False):
        return self.rounds.current(newest)

    def hold(self, round_id):
        return self.rounds.hold(round_id)


def made(max_remembered=9, **settings):
    later = Later()
    routes = gateway_routes(later, [KEY], max_remembered)
    service = Service(extra_routes=[routes], **settings)
    later.rounds = service.rounds
    return service


def path_of(service, key, table=WORD_TABLE, round_id=None):
    return slice_path(round_id or service.round.id, table, key)


def sealed(path, method=b"GET", length=120):
    return seal_request(KEY.config, encode_request(BinaryRequest(method, path), length))


def post(service, body, kind=REQUESTS_TYPE, **headers):
    return service.ask(
        "POST", "/v1/gateway", content=body, headers={"content-type": kind, **headers}
    )


def ask(service, *paths):
    """Responses to a batch of paths, and the lengths of the sealed answers."""
    pairs = [sealed(path) for path in paths]
    got = post(service, encode_requests([request for request, _ in pairs]))
    assert got.status_code == 200, got.text
    assert got.headers["content-type"] == ANSWERS_TYPE
    answers = decode_answers(got.content, len(pairs))
    found = [
        decode_response(open_response(exchange, answer))
        for (_, exchange), answer in zip(pairs, answers, strict=True)
    ]
    return found, [len(answer) for answer in answers]


def test_the_key_configuration_is_given_to_everybody():
    got = made(access=Access(RING, reads_need_token=True)).ask("GET", "/v1/gateway/keys")
    assert got.headers["content-type"] == "application/ohttp-keys"
    assert decode_configs(got.content) == (KEY.config,)


def test_a_batch_is_answered_with_the_slices_of_its_requests():
    service = made()
    table = service.round.tables[WORD_TABLE]
    keys = [3, 39, 0, 3]
    found, lengths = ask(service, *[path_of(service, key) for key in keys])
    assert [response.status for response in found] == [200] * 4
    np.testing.assert_array_equal(
        [np.frombuffer(response.content, np.uint8) for response in found], table.records[keys]
    )
    assert set(lengths) == {slice_reply_bytes(table.info.record_bytes) + 32}
    assert table.fetches == 1  # one gather for all of them


def test_a_single_request_is_answered_in_the_form_of_the_rfc():
    service = made()
    request, exchange = sealed(path_of(service, 5))
    got = post(service, request, REQUEST_TYPE)
    assert (got.status_code, got.headers["content-type"]) == (200, "message/ohttp-res")
    record = decode_response(open_response(exchange, got.content)).content
    assert record == service.round.tables[WORD_TABLE].records[5].tobytes()


def test_a_single_request_that_does_not_open_gets_one_and_the_same_problem():
    service = made()
    good, _ = sealed(path_of(service, 5))
    foreign = seal_request(GatewayKey.fresh(1).config, b"")[0]
    unknown = b"\x09" + good[1:]
    bad = [b"", good[:-1], good[:54], foreign, unknown, good[:7] + bytes(32) + good[39:]]
    seen = {
        (got.status_code, got.headers["content-type"], got.content)
        for got in (post(service, body, REQUEST_TYPE) for body in bad)
    }
    assert seen == {(400, "application/problem+json", PROBLEM)}
    assert service.round.tables[WORD_TABLE].fetches == 0


def test_in_a_batch_only_what_does_not_open_goes_without_an_answer():
    service = made()
    good, exchange = sealed(path_of(service, 5))
    got = post(service, encode_requests([bytes(len(good)), good]))
    nothing, answer = decode_answers(got.content, 2)
    assert nothing == b""
    assert decode_response(open_response(exchange, answer)).status == 200


def test_what_is_refused_inside_shows_no_key_and_has_the_length_of_its_table():
    service = made()
    length = slice_reply_bytes(service.round.tables[WORD_TABLE].info.record_bytes) + 32
    found, lengths = ask(
        service,
        path_of(service, 40),
        path_of(service, 1, table=9),
        path_of(service, 1, round_id=f"7-{DIGEST}"),
        path_of(service, 1, round_id="7"),
        b"/metrics",
    )
    assert [response.status for response in found] == [404] * 5
    assert lengths == [length] + [ERROR_BYTES + 32] * 4
    for response in found[1:]:
        facts = json.loads(response.content)["error"]
        assert facts.keys() == SHAPE
    service.rounds.removed.add(service.round.id)
    (gone,), _ = ask(service, path_of(service, 1))
    assert gone.status == 410


def test_a_replayed_batch_is_refused_inside_and_reads_nothing():
    service = made()
    request, exchange = sealed(path_of(service, 5))
    first, second = (post(service, encode_requests([request])) for _ in range(2))
    (answer,) = decode_answers(second.content, 1)
    response = decode_response(open_response(exchange, answer))
    assert response.status == 400
    assert json.loads(response.content)["error"]["kind"] == "ReplayError"
    assert first.status_code == 200
    assert service.round.tables[WORD_TABLE].fetches == 1


def test_a_request_that_was_forgotten_is_answered_again_until_its_round_is_gone():
    service = made(max_remembered=1)
    old, exchange = sealed(path_of(service, 5))

    def status():
        (answer,) = decode_answers(post(service, encode_requests([old])).content, 1)
        return decode_response(open_response(exchange, answer)).status

    assert (status(), status()) == (200, 400)
    ask(service, path_of(service, 6))  # takes its place
    assert status() == 200
    ask(service, path_of(service, 7))
    service.rounds.removed.add(service.round.id)
    assert status() == 410


def test_a_table_that_cannot_be_read_is_an_answer_of_the_usual_length():
    service = made()
    table = service.round.tables[WORD_TABLE]

    async def fail(keys):
        raise StorageError("damaged: got x; expected y; z")

    table.fetch = fail
    (response,), lengths = ask(service, path_of(service, 5))
    assert response.status == 507
    assert lengths == [slice_reply_bytes(table.info.record_bytes) + 32]


@pytest.mark.parametrize("kind", ["application/octet-stream", "message/bhttp", ""])
def test_other_content_types_are_refused(kind):
    assert post(made(), b"x", kind).status_code == 415


@pytest.mark.parametrize("body", [b"", b"KHB1", encode_requests([b"a" * 60])[:-1]])
def test_a_body_that_is_no_batch_is_refused_in_the_shape_of_every_error(body):
    got = post(made(), body)
    assert got.status_code == 400
    assert got.json()["error"].keys() == SHAPE


def test_batches_have_limits():
    small = made(limits=Limits(max_keys=2, max_body=1000, max_answer=100))
    body = encode_requests([sealed(path_of(small, key))[0] for key in range(3)])
    assert post(small, body).status_code == 413  # three requests
    assert post(small, bytes(1001)).status_code == 413
    two = encode_requests([sealed(path_of(small, key))[0] for key in range(2)])
    wide = made(limits=Limits(max_answer=100))
    assert (
        post(wide, encode_requests([sealed(path_of(wide, k))[0] for k in range(9)])).status_code
        == 413
    )
    assert len(two) < 1000


def test_where_reading_takes_a_token_the_relay_shows_its_own():
    service = made(access=Access(RING, reads_need_token=True))
    body = encode_requests([sealed(path_of(service, 5))[0]])
    assert post(service, body).status_code == 401
    token = RING.issue("device", "relay-1", now=NOW, seconds=60.0)
    assert post(service, body, authorization=f"Bearer {token}").status_code == 200


def test_slices_are_counted_and_rounds_are_let_go():
    service = made()
    ask(service, path_of(service, 1), path_of(service, 2))
    page = service.app.metrics.page().decode()
    assert "\nkeyhole_keys_total 2.0\n" in page
    assert service.rounds.held == 0
