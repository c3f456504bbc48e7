"""Devices that check in at a real service and vanish, by the thousand, beside a few that live."""

import http.client
import socket
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from keyhole.device.device import Device
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.service.access import Keyring, new_key
from keyhole.service.inbox import SpoolInbox
from keyhole.service.lobby import Lobby, WaitingRoom
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from tests.helpers import LONG
from tests.rounds import toy
from tests.service.living_devices import living
from tests.service.service_process import service

LIVING = [f"ward-{number}" for number in range(12)]
VANISHING = 3_000
GOAL, DEADLINE, ENOUGH = 4, 2.0, 3  # updates, seconds, rounds in a row that reach their goal


def nobody(*_):
    raise AssertionError("the trainer has no client")


def check_in_and_vanish(port, token, reads_answer):
    """One check-in over a connection of its own; every other one leaves before the answer."""
    if reads_answer:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG)
        connection.request("POST", "/v1/checkin", headers={"authorization": f"Bearer {token}"})
        answer = connection.getresponse()
        assert (answer.status, b"wait" in answer.read()) == (200, True)
        connection.close()
        return
    with socket.create_connection(("127.0.0.1", port), timeout=LONG) as connection:
        head = f"POST /v1/checkin HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\n"
        connection.sendall(f"{head}content-length: 0\r\n\r\n".encode())


def live(url, token, number, stop, taken):
    """A device that takes part until it is told to stop; its own examples are the trainer's not."""
    own = replace(
        Clients(UNCOUNTED, nobody, toy.choose, toy.train, toy.localize),
        data=lambda _: toy.EXAMPLES[number],
    )
    one = PopulationClient(number, lambda settings: own)
    with Device(url, token=token, stop=stop) as device:
        keep_taking_part(
            device, one.participant(), on_round=lambda what: taken.update([what.round])
        )


@pytest.mark.slow
def test_rounds_go_on_with_those_who_live_and_lose_none_of_their_updates(tmp_path):
    directory, key, taken = tmp_path / "rounds", tmp_path / "token.key", Counter()
    directory.mkdir()
    key.touch(0o600)
    key.write_text(new_key())
    ring, room, stop = Keyring.load(key), WaitingRoom(directory), threading.Event()

    def token(name):
        return ring.issue("device", name, now=time.time(), seconds=3600)

    with (
        service(directory, "--token-key", key, "--again", 1) as running,
        Publisher(directory) as publisher,
    ):
        inbox = SpoolInbox(UpdateSpool(directory / "updates"))
        kind = Served(publisher, inbox, seconds=DEADLINE, lobby=Lobby(room))
        trainers = Clients(UNCOUNTED, nobody, toy.choose, toy.train, toy.localize)
        plan = toy.make_plan(cohorts=Cohorts(UNCOUNTED, GOAL, sampling="check-in"))
        run = start_run(toy.make_state(), trainers, plan, tmp_path / "run", kind)
        for number in range(VANISHING):
            check_in_and_vanish(running.port, token(f"gone-{number}"), number % 2 == 0)
        records = list(run.rounds(1))  # drawn from those who have gone

        def one(number):
            live(running.url, token(LIVING[number]), number, stop, taken)

        with living(one, range(len(LIVING)), stop):
            for record in run.rounds(40):
                records.append(record)
                if [each.closed for each in records[-ENOUGH:]] == ["goal"] * ENOUGH:
                    break
            stop.set()
        run.close()
        assert set(room.waiting()) <= set(LIVING)
    assert [len(each.staleness) for each in records[-ENOUGH:]] == [GOAL] * ENOUGH
    assert (records[0].closed, records[0].staleness) == ("time", [])
    assert sum(len(each.staleness) for each in records) == sum(taken.values())
