"""The enclave program as the separate process that it is, and what its host gets to see.

Isolation is neither provided nor tested here: this shows the protocol.
"""

import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.delivery.enclave.client import EnclaveProcess, ask, fresh_nonce
from keyhole.delivery.enclave.messages import Channel, Kind
from keyhole.delivery.enclave.verifier import simulation_policy
from keyhole.errors import InputError, ProtocolError, ServiceError
from tests.delivery.enclave.tables import private_table, table
from tests.helpers import LONG

RECORDS = table(num_keys=301)
MAX_KEYS = 12


class Watched:
    """A running program with a table, and all bytes that pass between it and its host."""

    def __init__(self, **settings):
        self.seen = []
        self.process = EnclaveProcess("simulated", watch=self.seen.append, **settings)
        self.policy = simulation_policy()
        self.params = self.process.load(private_table(RECORDS, MAX_KEYS))
        self.loading = self.take()

    def take(self):
        """What was seen since the last time."""
        seen = b"".join(self.seen)
        self.seen.clear()
        return seen

    def ask(self, keys):
        nonce = fresh_nonce()
        evidence = self.process.evidence(nonce)
        keys = np.array(keys, np.int64)
        return ask(evidence, nonce, self.policy, self.params, keys, now=int(time.time()))

    def select(self, keys):
        asked = self.ask(keys)
        return asked.decode([self.process.answer(*asked.messages())]).records


@pytest.fixture(scope="module")
def running():
    watched = Watched()
    with watched.process:
        yield watched
    assert is_gone(watched.process.pid)  # closing leaves nothing behind
    with pytest.raises(ServiceError, match="exit code 0"):
        watched.process.rows_read()


@pytest.fixture
def mortal():
    """A program for one test, which may end it."""
    watched = Watched(answer_within=30.0)
    with watched.process:
        yield watched


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False  # a zombie could still be sent a signal


@settings(max_examples=15)
@given(
    st.sets(st.integers(0, len(RECORDS) - 1), max_size=MAX_KEYS).flatmap(
        lambda keys: st.lists(st.sampled_from(sorted(keys)), max_size=30) if keys else st.just([])
    )
)
def test_any_multiset_of_keys_gives_its_records(running, keys):
    np.testing.assert_array_equal(running.select(keys), RECORDS[keys])


def test_the_host_sees_neither_keys_nor_slices(running):
    keys = list(range(257, 257 + MAX_KEYS))
    running.take()
    np.testing.assert_array_equal(running.select(keys), RECORDS[keys])
    transcript = running.take()
    for form in ("<i8", "<i4", "<i2", ">i8", ">i4", ">i2"):
        # Four keys in a row: what is shorter can turn up in ciphertext by chance.
        assert not any(
            np.array(keys[i : i + 4], form).tobytes() in transcript for i in range(MAX_KEYS - 3)
        )
    assert b"<slice" not in transcript
    assert b"of the table>" not in transcript
    # The same eyes do see the slices when the host itself loads them.
    assert b"<slice 00257 of the table>" in running.loading


def test_lengths_and_work_do_not_depend_on_the_keys(running):
    shapes = set()
    for keys in ([], [0], [300] * 40, range(12), [7, 300, 7], range(289, 301)):
        before = running.process.rows_read()
        asked = running.ask(list(keys))
        running.take()
        reply = running.process.answer(message := asked.messages()[0])
        pieces = tuple(len(piece) for piece in running.seen)
        shapes.add((len(message), len(reply), pieces, running.process.rows_read() - before))
    (shape,) = shapes
    assert shape[3] == MAX_KEYS * len(RECORDS)


def test_a_replayed_request_is_refused(running):
    asked = running.ask([1])
    message = asked.messages()[0]
    asked.decode([running.process.answer(message)])
    read = running.process.rows_read()
    with pytest.raises(ProtocolError):
        running.process.answer(message)
    assert running.process.rows_read() == read


def test_every_refusal_is_the_same_frame(running):
    message = running.ask([1]).messages()[0]
    used = running.ask([1]).messages()[0]
    running.process.answer(used)
    answers = set()
    for bad in (b"", message[:-1], message + b"\0", message[:-1] + b"x", bytes(len(message)), used):
        running.take()
        with pytest.raises(ProtocolError) as refused:
            running.process.answer(bad)
        answers.add((running.take()[8 + len(bad) :], str(refused.value)))
    with pytest.raises(ProtocolError):
        running.process.evidence(b"short")
    assert {answer for answer, _ in answers} == {struct.pack("<II", Kind.REFUSED, 0)}
    assert len(answers) == 1
    running.process.answer(message)


def test_a_table_can_be_replaced(running):
    old = running.ask([1]).messages()[0]
    running.params = running.process.load(private_table(RECORDS[::-1], MAX_KEYS, "round-8"))
    with pytest.raises(ProtocolError):
        running.process.answer(old)
    np.testing.assert_array_equal(running.select([0, 5]), RECORDS[[300, 295]])
    running.params = running.process.load(private_table(RECORDS, MAX_KEYS))


def test_a_program_killed_amid_a_request_is_an_error(mortal):
    asked, pid = mortal.ask([1, 2]), mortal.process.pid
    os.kill(pid, signal.SIGSTOP)  # so that the request is under way for certain
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(ServiceError, match="the enclave program has ended: got exit code -9"):
        mortal.process.answer(asked.messages()[0])
    killer.join()
    assert is_gone(pid)
    with pytest.raises(ServiceError, match="has ended"):
        mortal.process.evidence(fresh_nonce())
    mortal.process.close()


def test_a_program_that_hangs_is_ended():
    with EnclaveProcess("simulated", answer_within=0.3) as process:
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(ServiceError, match=r"hangs: got no answer within 0\.3 s"):
            process.answer(bytes(100))
        assert is_gone(process.pid)


def start_program():
    """The program by hand, with its errors caught, and the host's end of its socket."""
    near, far = socket.socketpair()
    with far:
        program = subprocess.Popen(
            [sys.executable, "-m", "keyhole.delivery.enclave.program", "--attester", "simulated"],
            stdin=far.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    channel = Channel(near)
    assert channel.receive(LONG) == (Kind.READY, b"")
    return program, channel


def end_of(program, channel):
    out, err = program.communicate(timeout=LONG)
    channel.close()
    return program.returncode, out, err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_program_cleanly(number):
    program, channel = start_program()
    program.send_signal(number)
    assert end_of(program, channel) == (130, b"", b"")


def test_the_program_ends_with_its_host():
    program, channel = start_program()
    channel.close()
    assert end_of(program, channel) == (0, b"", b"")


def test_an_attester_is_named():
    with pytest.raises(InputError, match="an unknown attester"):
        EnclaveProcess("tdx")
