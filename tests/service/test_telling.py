"""What operators are told of rounds: in logs, as gauges, in the files of a rounds directory."""

import json
import re
from contextlib import ExitStack, closing
from math import inf
from threading import Event

import numpy as np
import pytest

import keyhole as kh
from keyhole.aggregation.base import Rounding
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.device.sums import SumPolicy, SumSend
from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import StorageError
from keyhole.logs import writing_logs
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.inbox import Waiting
from keyhole.service.lobby import WaitingRoom
from keyhole.service.metrics import Metrics, MetricsBoard
from keyhole.service.publishing import Publisher
from keyhole.service.status import PROGRESS, RoundFiles, read_progress
from keyhole.service.telling import ServiceTelling, TrainerTelling
from keyhole.wire.assignment import CheckIn, device_name
from keyhole.wire.sockets import Clock
from tests.service.living_devices import living
from tests.service.pir.pair import pair
from tests.service.small_service import LAYOUT as SMALL
from tests.service.small_service import random_state, small_service
from tests.service.sums.aggregators import aggregators
from tests.service.sums.private_run import served

ROW = kh.KeySpace("row", 60_000)
FIRST = 51_000  # keys from here on: numbers that nothing else in a log is
MODEL = {"w": np.zeros((ROW.num_keys, 2), np.float32)}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(ROW, {"w": 0}))
CLIENTS, VALUE = 4, 0.3173828125


def keys_of(client):
    return [FIRST + 211 * client + 7 * place for place in range(3)]


def make_clients():
    def train(submodel, data, rng):
        return {"w": np.full_like(submodel["w"], VALUE)}

    return Clients(CLIENTS, int, lambda client, context: ROW.keys(keys_of(client)), train)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def test_the_log_of_a_private_round_holds_no_key_no_update_and_no_device(tmp_path, capsys):
    """Two servers of private retrieval, two aggregators, a trainer and four devices: all that they
    log at the most talkative level."""
    plan = RunParts(
        cohorts=Cohorts(CLIENTS, CLIENTS),
        keys_per_client={"row": 3},
        seed=3,
        aggregate=TwoServers(Rounding(), min_clients=2),
    )
    state, stop = ServerState.dense(LAYOUT, MODEL, SGD(1.0)), Event()
    rounds = tmp_path / "rounds"
    with (
        writing_logs("json", "debug"),
        pair(rounds) as servers,
        aggregators(tmp_path / "sums") as sums,
    ):
        service = servers.service
        telling = TrainerTelling(rounds, tmp_path / "run")
        watcher = ServiceTelling("service", rounds)

        def live(client):
            name = device_name(client)
            one = PopulationClient(client, lambda settings: make_clients(), (3, 0))
            clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.02)))
            with ExitStack() as stack:
                both = [stack.enter_context(sums.device(party, name)) for party in (0, 1)]
                send = SumSend(*both, (sums.public(0), sums.public(1)), SumPolicy())
                fetch = servers.fetch()
                for other in fetch.others:
                    stack.enter_context(closing(other))
                own = {"stop": stop, "clock": clock, "trainer_key": service.trainer.public}
                device = stack.enter_context(servers.device(name, **own))
                keep_taking_part(device, one.participant(fetch, send))

        def look(waiting):
            telling(waiting)
            watcher._looked = -inf
            watcher(lambda: {"checked_in": 0, **dict.fromkeys(COUNTS, 0)})

        with living(live, range(CLIENTS), stop):
            kind = served(service, sums)
            kind.on_arrival = look
            for record in start_run(state, make_clients(), plan, kind=kind).rounds(1):
                telling.closed(record)
        pages = [sums.apps[party].metrics.page().decode() for party in (0, 1)]
        pages += [telling.page().decode()]
    written = capsys.readouterr().err
    events = {(line["part"], line["event"]) for line in lines_of(written)}
    assert events >= {
        ("trainer", "round opened"),
        ("trainer", "round closed"),
        ("service", "round opened"),
        ("aggregator", "round opened"),
        ("aggregator", "sum ready"),
    }
    assert record.staleness == [0] * CLIENTS
    assert not leaks_in(written + "".join(pages))
    for planted in (f'"round": {keys_of(2)[1]}', "device-3", str(VALUE)):
        assert leaks_in(written + planted)


def leaks_in(shown):
    """Whether a text has a key of a client, a number of an update or the name of a device."""
    keys = {str(key) for client in range(CLIENTS) for key in keys_of(client)}
    return keys & set(re.findall(r"\b\d+\b", shown)) or re.search(r"device-\d|0\.317", shown)


def test_a_service_of_several_runs_tells_of_each_by_its_name(tmp_path, capsys):
    now = [1000.0]
    watcher = ServiceTelling("service", tmp_path, now=lambda: now[0])
    with writing_logs("json"):
        for name in ("tags", "films"):
            with Publisher(tmp_path / name) as publisher:
                options = {"number": len(name), "cohort": ["dora"], "durable": False}
                publisher.publish_state(random_state(SMALL), **options)
        for _ in range(2):
            watcher(lambda: {"checked_in": 3, **dict.fromkeys(COUNTS, 0)})
            now[0] += 60
    told = [
        (line["run"], line["round"], line["text"]) for line in lines_of(capsys.readouterr().err)
    ]
    assert told == [("films", 5, "films: round 5 is open"), ("tags", 4, "tags: round 4 is open")]


COUNTS = ("stored", "bytes", "private", "relayed", "refusals")


def test_traffic_is_counted_over_all_devices_and_told_once_a_minute(capsys):
    now, counts = [1000.0], {"checked_in": 0, **dict.fromkeys(COUNTS, 0)}
    look = ServiceTelling("relay", now=lambda: now[0])
    with writing_logs("json"):
        for seconds, relayed in [(0, 3), (59, 40), (2, 50), (70, 50), (70, 51)]:
            now[0] += seconds
            counts["relayed"] = relayed
            look(lambda: dict(counts))
    first, last = lines_of(capsys.readouterr().err)
    assert (first["event"], first["requests"], last["requests"]) == ("traffic", 47, 1)
    assert first["text"] == "since the last such line: 47 requests"


def test_refusals_are_told_by_kind(capsys):
    board, now = MetricsBoard(), [1000.0]
    metrics = Metrics(board)
    look = ServiceTelling("service", now=lambda: now[0])
    with writing_logs("json"):
        look(board.by_name)
        for kind in ("NotFoundError", "NotFoundError", "AccessError"):
            metrics.refuse(kind)
        now[0] += 61
        look(board.by_name)
    (line,) = lines_of(capsys.readouterr().err)
    assert line["refused"] == 3
    assert line["text"].startswith("since the last such line: 3 refused (")
    assert {"2 NotFoundError", "1 AccessError"} == set(
        line["text"].partition("(")[2].rstrip(")").split(", ")
    )


def waiting(here, missing, seconds=60.0, number=3):
    names = [f"device-{n}" for n in range(missing)]
    return Waiting(number, here, 10, names, f"{number}-{'0' * 64}", seconds)


def test_a_trainer_says_at_once_what_it_waits_for_and_then_once_a_second(tmp_path, capsys):
    now = [1000.0]
    tell = TrainerTelling(tmp_path, tmp_path / "arm" / "trial-0", now=lambda: now[0])
    with writing_logs("json"):
        for seconds, here in [(0.0, 0), (0.1, 1), (1.5, 2), (59, 2), (61, 2)]:
            now[0] += seconds
            tell(waiting(here, 16 - here))
    first, *rest = lines_of(capsys.readouterr().err)
    assert first["text"] == "round 3 is open: waits for 10 updates of 16 devices, at most 60 s"
    assert [line["text"] for line in rest] == ["round 3: 2 of 10 updates, 14 devices to come"] * 2
    assert (rest[0]["updates"], rest[0]["goal"], rest[0]["missing"]) == (2, 10, 14)


def test_a_trainer_names_a_round_as_the_service_does_and_those_of_before_not_at_all(
    tmp_path, capsys
):
    tell = TrainerTelling(tmp_path, tmp_path / "arm" / "trial-0", kept=3)
    with writing_logs("json"):
        for number in (2, 3):
            tell(Waiting(number, 0, 2, ["ann", "ben"], f"{number + 12}-{'0' * 64}"))
        tell(Waiting(4, 0, 2, ["ann", "ben"], f"4-{'0' * 64}", measures=True))
    first, last = (line["text"] for line in lines_of(capsys.readouterr().err))
    assert first == "round 3 (round 15 of the service) is open: waits for 2 updates of 2 devices"
    assert last == "round 4 measures the model: waits for 2 answers of 2 devices"


@pytest.mark.parametrize("is_quiet", [False, True])
def test_that_devices_are_to_measure_is_told_at_once_and_then_each_minute(
    tmp_path, capsys, is_quiet
):
    now = [1000.0]
    tell = TrainerTelling(tmp_path, tmp_path / "trial-0", is_quiet, now=lambda: now[0])
    with writing_logs("json"):
        for seconds, here in [(0.0, 1), (0.1, 1), (61.0, 1)]:
            now[0] += seconds
            tell(Waiting(0, here, 1, [], is_drawn=False))
            left = 100.0 - seconds
            tell(Waiting(0, here, 3, [], seconds=left, is_drawn=False, measures=True))
    told = [line for line in lines_of(capsys.readouterr().err) if line["event"] == "evaluation"]
    text = "round 0: 1 of 3 devices wait to measure the model; goes on without the others in 100 s"
    assert told[0]["text"] == text
    assert (told[0]["waiting"], told[0]["goal"], told[0]["seconds"]) == (1, 3, 100.0)
    assert len(told) == 1 if is_quiet else len(told) > 1


def test_status_says_what_the_next_round_waits_for_and_that_a_trainer_has_ended(tmp_path):
    room = WaitingRoom(tmp_path, clock=lambda: 1000.0)
    room.open()
    room.note("ann", CheckIn(), 5.0)
    now = [1000.0]
    tell = TrainerTelling(tmp_path, tmp_path / "trial-0", now=lambda: now[0])
    told = []
    with small_service(tmp_path) as service:
        published = service.publish(cohort=["dora", "emil"]).published
        tell(Waiting(0, 1, 2, ["dora", "emil"], published.id, measures=True))
        told.append(RoundFiles(tmp_path).status(1000.0).told)
        service.publisher.close_round()
        for measures in (True, False):
            now[0] += 2.0
            tell(Waiting(1, 1, 3, [], is_drawn=False, measures=measures))
            told.append(RoundFiles(tmp_path).status(1000.0).told)
        tell.end()
        status = RoundFiles(tmp_path).status(1000.0)
    done = "round 0 has measured the model with 1 of 2 answers"
    assert told == [
        "round 0 measures the model: 1 of 2 answers, 1 device to come, 1 device waiting",
        f"{done}; 1 of 3 devices wait to measure the model",
        f"{done}; 1 of 3 devices wait to be drawn",
    ]
    assert status.has_ended
    assert status.told == done


def test_a_round_that_closes_empty_is_a_warning_and_is_counted(tmp_path, capsys):
    tell = TrainerTelling(tmp_path, tmp_path / "arm" / "trial-0")
    lost = {"closed": "time", "lost_before": [4, 7], "incidents": ["a worker was lost"]}
    with writing_logs("json"):
        tell.closed(RoundRecord(round=3, step=1, clients=[4, 7], **lost))
        tell(waiting(0, 2, number=4))
    incident, empty, _ = lines_of(capsys.readouterr().err)
    assert (incident["event"], incident["level"]) == ("incident", "warning")
    assert (empty["event"], empty["level"]) == ("round empty", "warning")
    assert empty["text"] == (
        "round 3 closed empty (time): 0 of 2 updates count, 2 did not come; the model stays"
    )
    page = tell.page().decode()
    assert "keyhole_rounds_empty_total 1.0" in page
    assert 'keyhole_rounds_closed_total{why="time"} 1.0' in page
    assert (read_progress(tmp_path).empty, read_progress(tmp_path).last_empty) == (1, 3)


def test_gauges_of_trainer_and_service_tell_the_same_of_a_round(tmp_path):
    with small_service(tmp_path) as service:
        published = service.publish(cohort=["device-0", "device-1", "device-2"]).published
        service.spool.store(published.id, "device-1", b"12345")
        tell = TrainerTelling(tmp_path, tmp_path / "trial-0", now=lambda: 1000.0)
        tell(Waiting(published.manifest.number, 1, 2, ["device-0"], published.id, 30.0))
        page = tell.page().decode()
        status = RoundFiles(tmp_path).status(1012.0)
        service.publisher.close_round()
        closed = RoundFiles(tmp_path).status(1013.0)
    values = dict(re.findall(r"^keyhole_round_(\w+) (\S+)$", page, re.M))
    numbers = {name: float(value) for name, value in values.items()}
    assert (numbers["cohort"], numbers["goal"], numbers["updates"]) == (3, 2, 1)
    assert (numbers["bytes"], numbers["open"], numbers["seconds_open"]) == (5, 1, 0)
    assert (status.cohort, status.goal, status.updates, status.bytes) == (3, 2, 1, 5)
    assert (status.seconds_open, status.seconds_left, status.trainer_away) == (12, 18, 12)
    assert status.told == "round 0: 1 of 2 updates, 2 devices to come"
    assert (closed.phase, closed.seconds_left) == ("closed", None)
    assert closed.told == "round 0 is closed with 1 of 2 updates"
    assert RoundFiles(tmp_path).missing() == ["device-0", "device-2"]


def test_devices_that_wait_to_be_drawn_are_counted(tmp_path, capsys):
    room = WaitingRoom(tmp_path, clock=lambda: 1000.0)
    room.open()
    for name in ("ann", "ben", "cem"):
        room.note(name, CheckIn(), 5.0)
    now = [1000.0]
    tell = TrainerTelling(tmp_path, tmp_path / "trial-0", now=lambda: now[0])
    with small_service(tmp_path) as service, writing_logs("json"):
        published = service.publish(cohort=["dora", "emil"]).published
        tell(Waiting(0, 3, 4, [], is_drawn=False))
        for _ in range(2):
            tell(Waiting(0, 0, 2, ["dora", "emil"], published.id))
            now[0] += 61
        status = RoundFiles(tmp_path).status(1000.0)
        later = RoundFiles(tmp_path).status(1100.0)
    gathering, _, waits = lines_of(capsys.readouterr().err)
    assert gathering["text"] == "round 0: 3 of 4 devices wait to be drawn"
    assert (gathering["waiting"], gathering["goal"]) == (3, 4)
    assert waits["text"] == "round 0: 0 of 2 updates, 2 devices to come, 0 devices waiting"
    assert status.told == "round 0: 0 of 2 updates, 2 devices to come, 3 devices waiting"
    assert later.waiting == 0  # they have not come again
    assert len(list(tmp_path.glob("waiting/*"))) == 3  # who looks changes nothing


def test_a_round_without_a_trainer_has_no_goal_but_its_cohort(tmp_path):
    with small_service(tmp_path) as service:
        service.publish()
        status = RoundFiles(tmp_path).status(1e12)
    assert (status.cohort, status.goal, status.trainer_away) == (None, None, None)
    assert status.told == "round 0 is open; no update is here"


def test_what_took_long_to_count_is_counted_again_later(tmp_path, monkeypatch):
    with small_service(tmp_path) as service:
        published = service.publish(cohort=["ann", "ben"]).published
        clock, looks = [0.0], []

        def slow(folder):
            looks.append(folder)
            clock[0] += 0.5
            return dict.fromkeys(["ann"][: len(looks) - 1], 7)

        monkeypatch.setattr("keyhole.service.status.time.monotonic", lambda: clock[0])
        monkeypatch.setattr("keyhole.service.status.sizes_in", slow)
        files, counts = RoundFiles(tmp_path), []
        for seconds in (0.0, 9.0, 2.0):
            clock[0] += seconds
            counts.append(files.status(1000.0).updates)
        service.publisher.close_round()
        assert files.status(1000.0).phase == "closed"
    assert (counts, len(looks)) == ([0, 0, 1], 3)
    assert looks[0].name == published.id


def test_a_trainer_goes_on_where_its_progress_cannot_be_written(tmp_path):
    tell = TrainerTelling(tmp_path / "gone", tmp_path / "trial-0")
    tell(waiting(1, 9))
    assert not (tmp_path / "gone").exists()


def test_progress_that_is_no_progress_is_refused(tmp_path):
    (tmp_path / PROGRESS).write_text("{}")
    with pytest.raises(StorageError, match=r"progress\.json cannot be read"):
        read_progress(tmp_path)


def test_a_service_counts_each_device_of_the_newest_round_once(tmp_path):
    with small_service(tmp_path) as service:
        for expected in (2, 1):  # of the round before nobody is counted
            service.publish()
            for name in ["ann", "ben", "ann"][: 2 * expected - 1]:
                with service.device(name=name) as device:
                    device.check_in()
            assert f"keyhole_round_checked_in {expected}.0" in service.app.metrics.page().decode()


def test_a_trainer_says_how_many_devices_wait_to_be_drawn(tmp_path, capsys):
    (tmp_path / "rounds").mkdir()
    telling = TrainerTelling(tmp_path / "rounds", tmp_path / "run")
    with writing_logs("json", "info"):
        for here in (0, 2, 2):
            telling(Waiting(0, here, 3, [], is_drawn=False))
    told = [
        (line["event"], line["waiting"], line["goal"]) for line in lines_of(capsys.readouterr().err)
    ]
    assert told == [("gathering", 0, 3), ("gathering", 2, 3)]
