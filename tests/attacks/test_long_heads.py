"""Attack: a client fills the memory of a service with the head of one request, in one write or
behind a body: 100 kB in one header, 20,000 headers, a long target, headers that follow a body.

Planted hole: uvicorn's own protocol counts nothing, so whatever fits into one read is taken.
"""

import json

import pytest

from keyhole.service import connections
from keyhole.service.transport import serving
from tests.service.sockets import app_with, connect, get, read_to_end, wait_for

START = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
HEADS = {
    "one header of 100 kB": START + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    "20,000 headers": START + b"".join(b"x%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
    "a target of 100 kB": b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    "a little too much": START + b"x: " + b"y" * 16_384 + b"\r\n\r\n",
}
CHUNKED = b"POST /v1/checkin HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "a header without end": START + b"x: ",
    "a target without end": b"GET /",
    "headers behind a body": CHUNKED + b"1\r\na\r\n0\r\nx: y\r\nx: ",
    "a chunk that never begins": CHUNKED + b"1;",
}


def talk(url, sent):
    with connect(url) as connection:
        connection.sendall(sent)
        return read_to_end(connection)


@pytest.mark.parametrize("head", HEADS)
def test_a_long_head_in_one_write_is_refused(head):
    app = app_with()
    with serving(app) as url:
        start, _, body = talk(url, HEADS[head]).partition(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nconnection: close" in start
        assert json.loads(body)["error"]["kind"] == "TooLargeError"
        assert get(f"{url}/healthz").status_code == 200
    assert b'keyhole_refused_total{kind="TooLargeError"} 1.0' in app.metrics.page()


def test_behind_a_request_that_is_not_answered_yet_it_ends_the_connection():
    """A refusal in between would be taken for the answer to that one."""
    app = app_with()
    with serving(app) as url:
        answer = talk(url, START + b"\r\n" + HEADS["one header of 100 kB"])
    assert b"413" not in answer
    assert b'keyhole_refused_total{kind="TooLargeError"} 1.0' in app.metrics.page()


@pytest.mark.parametrize("begun", ENDLESS)
def test_bytes_in_which_nothing_is_found_end_the_connection(begun):
    """However many reads they come in."""
    app = app_with()
    with serving(app) as url, connect(url) as connection:
        connection.sendall(ENDLESS[begun])
        with pytest.raises(ConnectionError):  # long before all was taken
            connection.sendall(b"y" * (1 << 24))
        wait_for(lambda: b'kind="TooLargeError"} 1.0' in app.metrics.page())
        assert get(f"{url}/healthz").status_code == 200


def test_headers_up_to_the_limit_are_read():
    with serving(app_with()) as url:
        answer = talk(url, START + b"connection: close\r\nx: " + b"y" * 16_000 + b"\r\n\r\n")
    assert answer.endswith(b'{"alive":true}')


def test_without_the_count_they_would_be_taken(monkeypatch):
    class Uncounted(connections.BoundedHeads):
        def __init__(self, inner, limit):
            super().__init__(inner, 1 << 60)

    monkeypatch.setattr(connections, "BoundedHeads", Uncounted)
    app = app_with()
    with serving(app) as url:
        head = HEADS["one header of 100 kB"]
        answer = talk(url, head.replace(b"host: x", b"host: x\r\nconnection: close"))
    assert answer.endswith(b'{"alive":true}')
    assert b"TooLargeError" not in app.metrics.page()
