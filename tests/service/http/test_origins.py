"""Pages of named origins may use a service from a browser, and no others."""

import http.client

import pytest
from click.testing import CliRunner

from keyhole.cli.serve import serve
from keyhole.errors import InputError
from keyhole.service.origins import WithOrigins, check_origin
from keyhole.service.transport import serving
from tests.service.in_process import Service

PAGE, OTHER = "https://app.example", "https://elsewhere.example"
ASKS = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}


def allowing(*origins):
    service = Service()
    service.app = WithOrigins(service.app, origins)
    return service


def test_an_allowed_page_may_send_a_token_and_read_what_comes_back():
    service = allowing("http://127.0.0.1:8300", PAGE)
    told = service.ask("OPTIONS", "/v1/checkin", headers={"origin": PAGE, **ASKS})
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in told.headers["access-control-allow-headers"]
    assert "POST" in told.headers["access-control-allow-methods"]
    assert "access-control-allow-credentials" not in told.headers  # no cookie means anything here
    answer = service.ask("GET", "/v1/rounds/current", headers={"origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert {"keyhole-server", "keyhole-signature", "retry-after"} <= set(
        answer.headers["access-control-expose-headers"].split(", ")
    )


def test_a_refusal_can_be_read_by_an_allowed_page():
    answer = allowing(PAGE).ask("POST", "/v1/checkin", headers={"origin": PAGE})
    assert answer.status_code == 401
    assert answer.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize("origin", [OTHER, "null", PAGE + ":444", "http://app.example", ""])
def test_a_page_of_another_origin_may_not(origin):
    service = allowing(PAGE)
    told = service.ask("OPTIONS", "/v1/checkin", headers={"origin": origin, **ASKS})
    assert told.status_code == 403
    assert told.json()["error"]["kind"] == "NotAdmittedError"
    for answer in (told, service.ask("GET", "/v1/rounds/current", headers={"origin": origin})):
        assert not [name for name in answer.headers if name.startswith("access-control")]


def test_caches_are_told_that_answers_differ_by_origin():
    """Else one could give a page the answer that another page had."""
    service = allowing(PAGE)
    for headers in ({}, {"origin": PAGE}, {"origin": OTHER}):
        assert service.ask("GET", "/v1/rounds/current", headers=headers).headers["vary"] == "origin"


def test_without_the_option_a_service_says_nothing_of_origins():
    service = Service()
    assert (
        service.ask("OPTIONS", "/v1/checkin", headers={"origin": PAGE, **ASKS}).status_code == 405
    )
    answer = service.ask("GET", "/v1/rounds/current", headers={"origin": PAGE})
    assert not {"vary", "access-control-allow-origin"} & set(answer.headers)


def test_it_is_the_same_over_a_socket():
    app = allowing(PAGE).app
    with serving(app, prepare=lambda: None) as url:
        line = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        line.request("OPTIONS", "/v1/checkin", headers={"origin": PAGE, **ASKS})
        told = line.getresponse()
        assert (told.status, told.read()) == (200, b"")
        line.request("GET", "/v1/rounds/current", headers={"origin": PAGE})
        answer = line.getresponse()
        assert answer.read()
        assert answer.headers["access-control-allow-origin"] == PAGE
        line.close()


@pytest.mark.parametrize(
    "text", ["*", "null", "app.example", "https://app.example/", "https://APP.example", "file://",
             "https://app.example:443", "https://me@app.example", "ftp://app.example", "http://x:y"]
)  # fmt: skip
def test_what_is_no_origin_is_refused(text):
    with pytest.raises(InputError, match="not the origin of a page"):
        check_origin(text)


def test_the_command_refuses_everybody(tmp_path):
    told = CliRunner().invoke(serve, [str(tmp_path), "--allow-origin", "*"])
    assert told.exit_code == 2
    assert "* would be everybody's" in " ".join(told.output.split())
