"""A service restarts under load, a worker at a time or whole, and devices do not notice."""

import os
import signal
import threading
import time
from collections import Counter
from functools import partial

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.device.device import Device
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import AwayError, KeyholeError, NotFoundError, TooLateError
from keyhole.rounds.loop import start_run
from keyhole.sampling import Cohorts
from keyhole.service.access import Keyring, new_key
from keyhole.service.inbox import SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.wire.assignment import device_name
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.kills.fleet import children_of
from tests.service.living_devices import EVERYONE, living
from tests.service.service_process import start
from tests.service.small_service import at_service
from tests.service.sockets import held_port, wait_for

ROUNDS, READERS = 6, (100, 101)


class Rolling:
    """A service of two workers, of which one after the other is restarted, then the whole."""

    def __init__(self, directory, key, port):
        options = "--workers", 2, "--token-key", key, "--again", 0.2
        self._start = lambda: start(directory, *options, port=port)
        self.running, self.restarted, self._round = self._start(), [], -1

    def look(self, waiting):
        """Restarts something in the middle of each round: an update is here, others are not."""
        if self._round < waiting.round and 0 < waiting.here < waiting.goal:
            self._round = waiting.round
            turns = [partial(self._worker, 0), partial(self._worker, 1), self._service]
            turns[len(self.restarted) % 3]()

    def _worker(self, place):
        pid = self.running.process.pid
        before = children_of(pid)
        os.kill(before[place], signal.SIGTERM)
        wait_for(lambda: len(set(children_of(pid)) - set(before)) == 1)
        self.restarted.append(f"worker {place}")

    def _service(self):
        self.running.process.send_signal(signal.SIGTERM)
        assert self.running.process.wait(LONG) == 0
        self.running.process.stderr.close()
        self.running = self._start()
        self.restarted.append("service")

    def close(self):
        self.running.process.kill()
        self.running.process.wait()
        self.running.process.stderr.close()


class Crowd:
    """Devices and readers that are there all the time, each in a thread, and what they meet."""

    def __init__(self, url, ring):
        self.url, self.ring, self.stop = url, ring, threading.Event()
        self.taken, self.misses, self.reads = Counter(), Counter(), Counter()
        self.ended = []  # errors, each of which would have ended a process

    def device(self, name):
        token = self.ring.issue("device", name, now=time.time(), seconds=3600)
        return Device(self.url, token=token, stop=self.stop)

    def live(self, number):
        with self.device(device_name(number)) as made:
            try:
                self.read(made, number) if number in READERS else self.train(made, number)
            except KeyholeError as error:
                if not self.stop.is_set():
                    self.ended.append(error)

    def train(self, made, number):
        one = PopulationClient(number, lambda settings: toy.make_clients(), toy.REHEARSED)
        keep_taking_part(
            made,
            one.participant(),
            on_round=lambda what: self.taken.update([what.number]),
            on_miss=lambda error: self.misses.update([type(error)]),
        )

    def read(self, made, number):
        """Fetches again and again, and so meets every moment of a restart."""
        while not self.stop.is_set():
            try:
                made.fetch(made.current().round, {"feature": list(range(60))})
                self.reads[number] += 1
            except (NotFoundError, TooLateError):
                self.stop.wait(0.05)  # no round yet, or one removed between the two requests
            except AwayError as error:  # on a busy machine a start takes longer than all attempts
                self.misses.update([type(error)])


@pytest.mark.slow
def test_a_service_restarts_under_load_and_no_update_is_lost(tmp_path):
    """The model is, to the byte, that of a run in process: every round had everyone it asked."""
    directory, key = tmp_path / "rounds", tmp_path / "token.key"
    directory.mkdir()
    key.touch(0o600)
    key.write_text(new_key())
    plan = toy.make_plan(cohorts=Cohorts(len(toy.EXAMPLES), 10), delivery=Pregenerated())
    with held_port() as port, Publisher(directory) as publisher:
        crowd = Crowd(f"http://127.0.0.1:{port}", Keyring.load(key))
        rolling = Rolling(directory, key, port)
        kind = Served(publisher, SpoolInbox(UpdateSpool(directory / "updates")), named=True)
        kind.on_arrival, kind.poll = rolling.look, 0.005
        run = start_run(toy.make_state(), toy.make_clients(), plan, tmp_path / "run", kind)
        try:
            with living(crowd.live, [*EVERYONE, *READERS], crowd.stop):
                records = list(run.rounds(ROUNDS))
        finally:
            rolling.close()
        run.close()
    assert not crowd.ended
    expected = start_run(toy.make_state(), toy.make_clients(), plan)
    assert records == at_service(expected.rounds(ROUNDS))
    assert toy.model_bytes(run.state) == toy.model_bytes(expected.state)
    assert crowd.taken == dict.fromkeys(range(ROUNDS), 10)
    assert set(rolling.restarted) == {"worker 0", "worker 1", "service"}
    assert crowd.misses.keys() <= {AwayError}
    assert crowd.reads.keys() == set(READERS)
