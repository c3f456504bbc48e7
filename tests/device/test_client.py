"""The HTTP of a device: what is tried again, what is not, and how long it waits in between."""

import socket
import threading
from contextlib import suppress

import pytest

from keyhole.errors import (
    AccessError,
    AwayError,
    ConflictError,
    DamageError,
    InputError,
    NotFoundError,
    ServiceError,
    TooLateError,
)
from keyhole.wire.http import HttpClient, refusal_of
from keyhole.wire.sockets import Clock, Retry
from tests.service.clients import BODY, client_of, get, rest, send
from tests.service.scripted import HEAD, answer, refusal, scripted


@pytest.mark.parametrize(
    "bad",
    [
        None,
        b"",
        b"HTT",
        b"nonsense\r\n\r\n",
        answer(408),
        answer(429),
        refusal(500, "PlacementError"),
        refusal(507, "StorageError"),
        answer(502),
        answer(503, b"busy"),
        answer(504),
        answer(200, b"whole")[:-1],
        answer(200, b"whole")[:20],
        b"HTTP/1.1 200 X\r\n\r\nno length",
    ],
)
def test_what_may_pass_is_tried_again(bad):
    with scripted(bad, answer(200, b"good")) as script, client_of(script) as client:
        assert get(client) == b"good"
        assert len(client.waits) == 1
    with scripted(bad, answer(201)) as script, client_of(script) as client:
        assert send(client) == 201
        assert [body for _, _, body in script.asked] == [b"update"] * 2


def test_why_something_is_tried_again_is_told_before_the_wait():
    told = []
    retry = Retry(attempts=3, seed=1, tell=told.append)
    with scripted(None, answer(503), answer(502)) as script, client_of(script, retry=retry) as each:
        with pytest.raises(ServiceError, match="status 502, the last of 3"):
            get(each)
        assert told == ["a connection that was closed", "status 503"]
        assert len(each.waits) == 2


@pytest.mark.parametrize(
    ("status", "kind", "error"),
    [
        (401, "AccessError", AccessError),
        (404, "NotFoundError", NotFoundError),
        (409, "ConflictError", ConflictError),
        (410, "TooLateError", TooLateError),
        (400, "KeySpaceError", InputError),
        (501, "PlacementError", ServiceError),
        (400, "SystemExit", ServiceError),
        (400, "annotations", ServiceError),
    ],
)
def test_a_refusal_is_raised_by_its_kind_and_not_tried_again(status, kind, error):
    with scripted(refusal(status, kind)) as script, client_of(script) as client:
        with pytest.raises(error, match="refused"):
            get(client)
        assert len(script.asked) == 1
        assert client.waits == []


@pytest.mark.parametrize(
    "body", [b"<html>", b'{"error": 3}', b"\xff\xfe", b"", b"[" * 5000, b'{"x": ' * 5000]
)
def test_a_body_that_is_no_error_of_ours_is_told_as_foreign(body):
    assert isinstance(refusal_of(404, body), ServiceError)
    assert "status 404" in str(refusal_of(404, body))


def test_the_words_of_an_error_cannot_flood_or_steer_a_terminal():
    body = refusal(404, "NotFoundError", "\x1b[2Jred" * 1000).partition(b"\r\n\r\n")[2]
    told = str(refusal_of(404, body))
    assert len(told) < 600
    assert told.isprintable()


@pytest.mark.parametrize("status", [204, 301, 302])
def test_other_answers_make_no_sense(status):
    with (
        scripted(answer(status, location="http://example.org")) as script,
        client_of(script) as client,
        pytest.raises(ServiceError, match=f"status {status}"),
    ):
        get(client)


def test_giving_up_says_what_how_often_and_why():
    with scripted(*[answer(503)] * 4) as script, client_of(script) as client:
        with pytest.raises(ServiceError, match=r"GET /x: got status 503, the last of 4 failures"):
            get(client)
        assert len(script.asked) == 4


def test_a_service_that_has_answered_before_is_away_and_not_a_wrong_address():
    for first, kind in ((answer(200), AwayError), (answer(404), ServiceError)):
        script = scripted(first, *[answer(503)] * 8)
        with script as running, client_of(running) as client:
            with suppress(ServiceError):
                get(client)
            with pytest.raises(ServiceError) as raised:
                get(client)
            assert type(raised.value) is kind


def test_nobody_listening_is_told_as_such():
    with scripted() as script:
        pass
    with client_of(script) as client, pytest.raises(ServiceError, match="connection refused"):
        get(client)


def test_waits_grow_and_are_spread():
    retry = Retry(first_wait=1, longest_wait=8)
    assert [retry.wait(n, None, 1.0) for n in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 8, 8]
    assert retry.wait(4, None, 0.0) == 0
    assert retry.wait(4, None, 0.25) == 2


def test_the_same_seed_gives_the_same_waits():
    found = []
    for _ in range(2):
        with scripted(*[answer(503)] * 4) as script, client_of(script) as client:
            with pytest.raises(ServiceError):
                get(client)
            found.append(client.waits)
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize(
    ("header", "minimum", "limit"),
    [("7", 7, 7.5), ("100000", 60, 60), ("-3", 0, 0.5), ("soon", 0, 0.5), ("9" * 400, 0, 0.5)],
)
def test_retry_after_is_obeyed_up_to_the_longest_wait(header, minimum, limit):
    busy = answer(429, retry_after=header)
    with scripted(busy, answer(200, b"good")) as script, client_of(script) as client:
        assert get(client) == b"good"
        assert minimum <= client.waits[0] <= limit


def test_a_date_in_retry_after_is_not_compared_with_the_clock():
    busy = answer(503, retry_after="Wed, 21 Oct 2065 07:28:00 GMT")
    with scripted(busy, answer(200, b"good")) as script, client_of(script) as client:
        assert get(client) == b"good"
        assert client.waits[0] <= 0.5


def test_a_service_that_cuts_every_answer_and_resumes_none_is_given_up():
    whole = answer(200, bytes(200_000))
    with scripted(*[whole[:-100_000]] * 99) as script, client_of(script) as client:
        with pytest.raises(ServiceError, match="cut"):
            client.get("/x", limit=1 << 20)
        assert len(script.asked) == 4


def test_a_cut_body_goes_on_where_it_ended():
    first = answer(200, BODY, etag='"a"')[:-70]
    with scripted(first, rest) as script, client_of(script) as client:
        assert get(client) == BODY
        assert script.asked[1][1]["range"] == "bytes=30-"
        assert script.asked[1][1]["if-range"] == '"a"'


def test_the_bytes_of_an_error_are_no_part_of_a_body():
    first = answer(200, BODY, etag='"a"')[:-70]
    cut = refusal(503, "BusyError")[:-20]
    with scripted(first, cut, rest) as script, client_of(script) as client:
        assert get(client) == BODY
        assert script.asked[2][1]["range"] == "bytes=30-"


def test_a_body_that_changed_is_taken_from_its_start():
    first = answer(200, BODY, etag='"a"')[:-70]
    with scripted(first, answer(200, b"new", etag='"b"')) as script, client_of(script) as client:
        assert get(client) == b"new"


@pytest.mark.parametrize("tag", [{}, {"etag": 'W/"a"'}])
def test_nothing_is_resumed_without_a_tag_that_vouches_for_bytes(tag):
    first = answer(200, BODY, **tag)[:-70]
    with scripted(first, answer(200, BODY)) as script, client_of(script) as client:
        assert get(client) == BODY
        assert "range" not in script.asked[1][1]


@pytest.mark.parametrize("told", ["bytes 31-99/100", "bytes 30-98/99", "items 30-99/100", ""])
def test_a_range_that_was_not_asked_for_is_not_used(told):
    first = answer(200, BODY, etag='"a"')[:-70]
    wrong = answer(206, BODY[30:], content_range=told)
    with (
        scripted(first, wrong) as script,
        client_of(script) as client,
        pytest.raises(ServiceError, match="continues another"),
    ):
        get(client)


def test_a_long_body_may_be_cut_more_often_than_there_are_attempts():
    whole = bytes(1_000_000)

    def piece(head):
        start = int(head.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        told = f"bytes {start}-{len(whole) - 1}/{len(whole)}"
        full = answer(206 if start else 200, whole[start:], etag='"a"', content_range=told)
        end = full.index(b"\r\n\r\n") + 4 + 100_000
        return full[:end]

    with scripted(*[piece] * 10) as script, client_of(script) as client:
        assert bytes(client.get("/x", limit=len(whole)).body) == whole
        assert len(script.asked) == 10


def is_good(body):
    if body != b"good":
        raise DamageError("damaged: got x; expected y; z")


def test_a_damaged_body_is_fetched_anew_and_in_the_end_told():
    with (
        scripted(answer(200, b"bad!"), answer(200, b"good")) as script,
        client_of(script) as client,
    ):
        assert get(client, check=is_good) == b"good"
    with scripted(*[answer(200, b"bad!")] * 4) as script, client_of(script) as client:
        with pytest.raises(DamageError):
            get(client, check=is_good)
        assert len(script.asked) == 4


def test_an_answer_that_is_too_long_is_not_read():
    with (
        scripted(HEAD.format(200, 10**12).encode() + b"\r\n") as script,
        client_of(script) as client,
        pytest.raises(ServiceError, match="longer than it can be"),
    ):
        get(client)


def test_an_answer_beyond_memory_is_an_error_of_the_service():
    endless = HEAD.format(200, 10**17).encode() + b"\r\n"
    with (
        scripted(endless) as script,
        client_of(script) as client,
        pytest.raises(ServiceError, match="does not fit into memory"),
    ):
        client.get("/x", limit=10**18)


def test_connections_are_used_again():
    with scripted(*[answer(200, b"good")] * 3) as script, client_of(script) as client:
        for _ in range(3):
            get(client)
        assert script.connections == 1


def test_a_refusal_leaves_its_connection_to_the_next_request():
    good = answer(200, b"good")
    with (
        scripted(good, refusal(404, "NotFoundError"), good, answer(503), good) as script,
        client_of(script) as client,
    ):
        get(client)
        with pytest.raises(NotFoundError):
            get(client)
        assert get(client) == get(client) == b"good"
        assert script.connections == 1


def test_a_kept_connection_that_the_service_closed_costs_no_attempt():
    with (
        scripted(answer(200, b"good"), None, answer(200, b"good")) as script,
        client_of(script, retry=Retry(attempts=1)) as client,
    ):
        assert get(client) == get(client) == b"good"
        assert client.waits == []


def test_a_refusal_before_the_body_was_read_is_understood():
    """A service that refuses an upload by its head answers and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse():
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(refusal(413, "TooLargeError"))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    thread = threading.Thread(target=refuse)
    thread.start()
    client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", retry=Retry(attempts=1))
    with pytest.raises(InputError, match="refused"):
        send(client, bytes(8_000_000))
    client.close()
    thread.join()
    listener.close()


def test_a_stop_ends_retrying_at_once():
    stop = threading.Event()
    with scripted(answer(503), answer(200)) as script:
        clock = Clock(sleep=lambda _: stop.set())
        with client_of(script, stop=stop, clock=clock) as client:
            with pytest.raises(ServiceError, match="stopped"):
                get(client)
            assert len(script.asked) == 1


@pytest.mark.parametrize("bad", [{"attempts": 0}, {"first_wait": -1}, {"first_wait": 99}])
def test_settings_of_retrying_are_checked(bad):
    with pytest.raises(InputError, match="retrying"):
        Retry(**bad)
