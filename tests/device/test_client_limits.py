"""The HTTP of a device: nobody can hold it for ever, and a slow line may take its time."""

import socket
import threading
from contextlib import contextmanager, suppress
from itertools import count

import pytest

from keyhole.errors import ServiceError
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Clock, Retry, Timeouts
from tests.helpers import LONG
from tests.service.clients import BODY, client_of, get, rest, send
from tests.service.scripted import answer, scripted


def test_a_silent_service_is_given_up_in_time_and_asked_again(by_hand):
    given_up = threading.Event()

    def silent(_):
        by_hand.now += 0.2
        given_up.wait(LONG)

    options = {
        "timeouts": Timeouts(connect=60, read=0.1),
        "clock": Clock(sleep=lambda _: given_up.set()),
    }
    with (
        scripted(silent, answer(200, b"good")) as script,
        client_of(script, **options) as client,
    ):
        assert get(client) == b"good"
        assert given_up.is_set()


@contextmanager
def talking(say):
    """The URL of a service that reads a request, and then does as `say(connection)` does."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)

    def talk():
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(1000)
            say(connection)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join()
        listener.close()


def drip(first, *, drop, on_drop=lambda count: None):
    """Says something, and then a little more every now and then, until the device hangs up."""

    def say(connection):
        connection.sendall(first)
        connection.settimeout(0.02)
        for number in count():
            connection.sendall(drop)
            on_drop(number)
            with suppress(TimeoutError):
                if not connection.recv(1):
                    return

    return say


DRIPS = pytest.mark.parametrize(
    ("first", "drop"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\nx: ", b"a", id="a header"),
        pytest.param(b"", b"HTTP/1.1 100 Continue\r\n\r\n", id="interim answers"),
    ],
)


@DRIPS
def test_a_head_that_never_ends_is_given_up_in_time(first, drop):
    with talking(drip(first, drop=drop)) as url:
        client = HttpClient(url, retry=Retry(1), timeouts=Timeouts(60, 0.3))
        with pytest.raises(ServiceError, match="no answer in time"):
            get(client)


@DRIPS
def test_a_stop_ends_the_wait_for_a_head(first, drop):
    stop = threading.Event()
    with talking(drip(first, drop=drop, on_drop=lambda n: n == 3 and stop.set())) as url:
        client = HttpClient(url, retry=Retry(9), timeouts=Timeouts(60, 60), stop=stop)
        with pytest.raises(ServiceError, match="stopped"):
            get(client)


def test_a_stop_ends_the_wait_for_a_silent_service():
    stop = threading.Event()

    def silent(connection):
        stop.set()
        connection.recv(1)

    with talking(silent) as url:
        client = HttpClient(url, retry=Retry(9), timeouts=Timeouts(60, 60), stop=stop)
        with pytest.raises(ServiceError, match="stopped"):
            get(client)


def test_a_line_that_is_slow_all_the_way_to_the_service_may_take_its_time(by_hand):
    """What the system has taken has not left yet: the wait for an answer starts soon after."""
    body = bytes(3_000_000)

    def read_slowly(connection):
        got = 0
        while got < len(body) - 1000:
            piece = connection.recv(1 << 16)
            got = got + len(piece) if piece else len(body)
            by_hand.now += 0.02
        connection.sendall(answer(201))

    with talking(read_slowly) as url:
        client = HttpClient(url, retry=Retry(1), timeouts=Timeouts(60, 0.5))
        assert send(client, body) == 201
        assert by_hand.now > 0.5  # else nothing is shown
        client.close()


def slow_clock(*seconds):
    """Looks at the clock bring these, and the last for ever."""
    looks = iter(seconds)
    return Clock(sleep=lambda _: None, monotonic=lambda: next(looks, seconds[-1]))


def test_a_trickle_is_given_up_and_what_came_is_kept():
    first = answer(200, BODY, etag='"a"')[:-70]
    options = {"timeouts": Timeouts(5, 5, slowest=10), "clock": slow_clock(0, 8.1)}
    with (
        scripted(first) as script,
        client_of(script, retry=Retry(1), **options) as client,
        pytest.raises(ServiceError, match="too slow"),  # 30 bytes may take 5 + 3 seconds
    ):
        get(client)
    options["clock"] = slow_clock(0, 8.1)
    with scripted(first, rest) as script, client_of(script, **options) as client:
        assert get(client) == BODY
        assert script.asked[1][1]["range"] == "bytes=30-"


def test_a_slow_answer_that_is_fast_enough_is_read_to_its_end():
    options = {"timeouts": Timeouts(5, 5, slowest=10), "clock": slow_clock(0, 14.9)}
    with scripted(answer(200, BODY)) as script, client_of(script, **options) as client:
        assert get(client) == BODY
