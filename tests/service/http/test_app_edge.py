"""The edge of the service: what it logs, counts and says when something is wrong.

Renew the golden errors with KEYHOLE_RENEW_GOLDEN=1.
"""

import asyncio
import json
import logging
import os
import re

import numpy as np
import pytest

from keyhole import errors
from keyhole.service.routes import Route, error_response, json_response
from keyhole.service.spool import UpdateSpool
from keyhole.wire import messages as wire
from tests.helpers import ROOT
from tests.service.in_process import (
    SHAPE,
    WORD_TABLE,
    Service,
    send_update,
)

GOLDEN = ROOT / "tests" / "golden" / "service" / "errors.json"


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def taking(tmp_path):
    """A service that takes updates."""
    return Service(spool=UpdateSpool(tmp_path / "updates"))


def test_an_unexpected_error_is_500_without_a_word_about_it(service, caplog):
    async def broken(keys, out):
        raise RuntimeError(f"secret {keys}")

    service.round.tables[WORD_TABLE].fetch = broken
    answer = service.query(wire.Ask(WORD_TABLE, np.array([31])))
    service.assert_refused(answer, 500, "KeyholeError")
    (record,) = caplog.records
    assert re.fullmatch(r"unexpected RuntimeError at test_app_edge.py:\d+", record.getMessage())
    assert record.exc_info is None
    assert "secret" not in answer.text
    assert 'keyhole_refused_total{kind="Unexpected"} 1.0' in service.app.metrics.page().decode()
    assert b"keyhole_requests_in_flight 0.0" in service.app.metrics.page()


def test_further_routes_can_be_mounted():
    async def relay(request):
        return json_response({"said": request.params[0]}, 201)

    more = Route("relay", ("POST",), "/v1/relay/{word}", relay)
    service = Service(extra_routes=[lambda _: [more]])
    answer = service.ask("POST", "/v1/relay/hello")
    assert (answer.status_code, answer.json()) == (201, {"said": "hello"})
    service.assert_refused(service.ask("GET", "/v1/relay/hello"), 405, "MethodError")
    page = service.app.metrics.page().decode()
    assert 'keyhole_requests_total{route="relay",status="201"} 1.0' in page


def test_a_client_that_leaves_is_counted_and_gets_nothing(service):
    async def story():
        sent = []

        async def receive():
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/octet-stream")]
        path = f"/v1/rounds/{service.round.id}/slices"
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
        await service.app(scope, receive, send)
        return sent

    assert asyncio.run(story()) == []
    assert b"keyhole_gone_total 1.0" in service.app.metrics.page()


def test_metrics_count_without_naming_anyone(taking):
    taking.query(wire.Ask(WORD_TABLE, np.array([3, 31])))
    taking.ask("GET", "/v1/rounds/{id}/tables/1/slices/31")
    send_update(taking)
    send_update(taking)
    send_update(taking, b"junk")
    page = taking.app.metrics.page().decode()
    lines = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    expected = {
        "keyhole_keys_total": 3,
        "keyhole_ideal_bytes_total": 36,
        "keyhole_updates_stored_total": 1,
        "keyhole_updates_repeated_total": 1,
        "keyhole_updates_refused_total": 1,
        'keyhole_refused_total{kind="RequestError"}': 1,
        'keyhole_requests_total{route="slices",status="200"}': 1,
        'keyhole_request_seconds_count{route="updates"}': 3,
    }
    assert {name: float(lines[name]) for name in expected} == expected
    assert float(lines["keyhole_sent_bytes_total"]) > 36
    assert "phone" not in page
    assert taking.round.id not in page
    labels = set(re.findall(r'(\w+)="', page))
    assert labels == {"route", "status", "kind", "le"}


def test_nothing_is_logged_about_what_was_asked(taking, caplog):
    with caplog.at_level(logging.DEBUG, logger="keyhole"):
        taking.query(wire.Ask(WORD_TABLE, np.array([31, 10**6])))
        send_update(taking)
        send_update(taking, b"junk")
    assert [r for r in caplog.records if r.name.startswith("keyhole")] == []


def test_every_kind_of_error_has_one_shape():
    shown = {}
    for name in errors.__all__:
        error = getattr(errors, name)("what is wrong: got got; expected GET, POST; fix")
        response = error_response(error, 1.2 if error.http_status in (429, 503) else None)
        headers = [f"{key.decode()}: {value.decode()}" for key, value in response.headers]
        shown[name] = {"headers": headers, "body": json.loads(response.body)}
        assert shown[name]["body"]["error"].keys() == SHAPE
        assert 400 <= response.status < 600
    text = json.dumps(shown, indent=1) + "\n"
    if os.environ.get("KEYHOLE_RENEW_GOLDEN"):
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
