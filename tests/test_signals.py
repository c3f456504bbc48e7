"""Signals stop long work between two steps, however close together they come."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from keyhole.signals import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_event(number):
    with stop_on_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(0)


def test_a_second_signal_ends_the_process_as_usual():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_every_signal_may_set_the_event():
    with stop_on_signals(every=True) as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(0)


def test_a_signal_that_meets_its_own_thread_at_the_event_does_not_wait_for_it():
    with stop_on_signals(every=True) as stop, stop._cond:
        assert stop._cond.acquire(blocking=False), "this thread may take the lock again"
        stop._cond.release()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.is_set()


def test_a_signal_wakes_another_thread_that_waits():
    with stop_on_signals() as stop:
        waiting = threading.Thread(target=stop.wait)
        waiting.start()
        os.kill(os.getpid(), signal.SIGTERM)
        waiting.join()
        assert stop.is_set()


def test_work_in_another_thread_leaves_signals_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with stop_on_signals() as stop:
            seen.append((stop.is_set(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, before)]


CHILD = """
from time import sleep
from keyhole.signals import end_with_parent

end_with_parent()
print("is up", flush=True)
sleep(600)
"""
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
time.sleep(600)
"""


def test_a_process_ends_with_its_parent_even_if_that_is_killed():
    start = [sys.executable, "-c", PARENT, CHILD]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "is up\n"
        parent.kill()
        parent.wait()
        assert parent.stdout.read() == "", "ends once the child, which has the same output, is gone"
