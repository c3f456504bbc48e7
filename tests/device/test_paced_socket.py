"""A socket with limits: a slow line may take its time, and nobody holds it for ever."""

import socket
import threading
import time
from contextlib import contextmanager

import pytest

from keyhole.wire.sockets import PacedSocket, Timeouts

BODY = bytes(2_000_000)


@contextmanager
def pair(timeouts, stop=None):
    """A paced socket and its other end; the system holds little of what is between them."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    with one, other:
        yield PacedSocket(one, timeouts, stop), other


def test_an_upload_may_take_longer_than_the_wait_for_its_next_bytes(by_hand):
    def read_slowly(end, got):
        while sum(got) < len(BODY):
            got.append(len(end.recv(1 << 16)))
            by_hand.now += 0.1

    with pair(Timeouts(read=1.0, slowest=1000)) as (paced, end):
        thread = threading.Thread(target=read_slowly, args=(end, got := []))
        thread.start()
        paced.sendall(BODY)
        assert by_hand.now > 1.0  # else nothing is shown
        thread.join()
    assert sum(got) == len(BODY)


def test_an_upload_that_nobody_takes_is_given_up():
    with pair(Timeouts(read=0.05, slowest=1000)) as (paced, _), pytest.raises(TimeoutError):
        paced.sendall(BODY)


def test_an_upload_that_is_taken_too_slowly_is_given_up():
    with pair(Timeouts(read=0.1, slowest=10**9)) as (paced, end):

        def read_on():
            while end.recv(1 << 12):
                time.sleep(0.01)

        thread = threading.Thread(target=read_on)
        thread.start()
        with pytest.raises(TimeoutError):
            paced.sendall(BODY)
        end.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_stop_ends_an_upload():
    stop = threading.Event()
    with pair(Timeouts(), stop) as (paced, _):
        timer = threading.Timer(0.05, stop.set)
        timer.start()
        with pytest.raises(OSError, match="a stop event"):
            paced.sendall(BODY)
        timer.join()


def test_bytes_have_a_limit_each_or_altogether(by_hand):
    with pair(Timeouts(read=0.4)) as (paced, end), paced.makefile("rb") as answers:

        def drip():
            by_hand.now += 0.3
            end.send(b"x")
            return answers.read(1)

        assert [drip() for _ in range(3)] == [b"x"] * 3
        with paced.one_limit():
            assert drip() == b"x"
            with pytest.raises(TimeoutError):
                drip()


def test_a_byte_that_does_not_come_is_given_up(by_hand):
    with pair(Timeouts(read=0.4)) as (paced, _), paced.makefile("rb") as answers:
        by_hand.step = 0.3  # with every look
        with pytest.raises(TimeoutError):
            answers.read(1)


def test_the_socket_stays_open_until_its_answer_is_closed():
    with pair(Timeouts(read=60)) as (paced, end):
        answers = paced.makefile("rb")
        paced.close()
        end.sendall(b"late")
        assert answers.read(4) == b"late"
        answers.close()
        assert end.recv(1) == b""
