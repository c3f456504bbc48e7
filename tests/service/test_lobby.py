"""A population by check-in: cohorts of devices that the trainer has never heard of."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest

from keyhole.device.take_part import PopulationClient, keep_taking_part
from keyhole.errors import InputError, MalformedError
from keyhole.rounds.clients import Clients
from keyhole.rounds.cohorts import Draws
from keyhole.rounds.loop import resume_run, start_run
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.service.inbox import SpoolInbox
from keyhole.service.lobby import CohortLog, Lobby, WaitingRoom, count_waiting
from keyhole.service.served import Served
from keyhole.wire.assignment import CheckIn
from keyhole.wire.sockets import Clock
from tests.rounds import toy
from tests.service.living_devices import living
from tests.service.small_service import small_service

DAY = 86_400.0
NAMES = [f"ward-{letter}" for letter in "abcdefg"]
NOTHING = CheckIn()


class Wall:
    """A clock that is set by hand."""

    def __init__(self, now=1e9):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def wall():
    return Wall()


@pytest.fixture
def room(tmp_path, wall):
    made = WaitingRoom(tmp_path, wall)
    made.open()
    return made


def test_a_device_that_checks_in_again_and_again_waits_once(room):
    for _ in range(50):
        room.note("ann", NOTHING, 1.0)
    assert list(room.waiting()) == ["ann"]


def test_thousands_that_vanish_leave_nothing(tmp_path, room, wall):
    for number in range(300):
        room.note(f"gone-{number}", NOTHING, 5.0)
    wall.now += 60.0
    room.note("ann", NOTHING, 5.0)
    assert list(room.waiting()) == ["ann"]
    assert [path.name for path in (tmp_path / "waiting").iterdir()] == ["ann"]


def test_who_was_noted_by_a_clock_40_days_ahead_does_not_wait_for_40_days(room, wall):
    wall.now += 40 * DAY
    room.note("ann", NOTHING, 5.0)
    wall.now -= 40 * DAY
    assert list(room.waiting()) == []
    room.note("ann", NOTHING, 5.0)
    assert list(room.waiting()) == ["ann"]


def test_those_who_wait_are_dated_by_the_clock_of_their_folder(tmp_path, monkeypatch):
    """Services and trainers on other machines may have clocks that are 40 days off."""
    room, real = WaitingRoom(tmp_path), time.time
    room.open()
    for off, name in ((40 * DAY, "ann"), (-40 * DAY, "ben")):
        monkeypatch.setattr(time, "time", lambda off=off: real() + off)
        room.note(name, NOTHING, 60.0)
        room.note(name, NOTHING, 60.0)
        assert name in set(room.waiting())
    assert sorted(room.waiting()) == ["ann", "ben"]
    monkeypatch.undo()
    assert count_waiting(tmp_path, time.time()) == 2


def test_nobody_is_noted_where_no_trainer_draws(tmp_path):
    WaitingRoom(tmp_path).note("ann", NOTHING, 5.0)
    assert list(tmp_path.iterdir()) == []


def test_a_device_says_powers_of_two_or_nothing():
    assert CheckIn.of(1000, 64) == CheckIn(memory_mb=512, examples=64)
    assert CheckIn.of() == CheckIn.read(b"") == NOTHING
    for body in (b'{"examples": 63}', b'{"name": "ann"}', b"[", b'{"memory_mb": -4}', b"\xff"):
        with pytest.raises(MalformedError, match="powers of two"):
            CheckIn.read(body)


def test_those_who_say_too_little_are_not_drawn(room):
    for name, said in {
        "mute": NOTHING,
        "small": CheckIn(memory_mb=64, examples=64),
        "poor": CheckIn(memory_mb=256, examples=16),
        "fit": CheckIn(memory_mb=256, examples=32),
    }.items():
        room.note(name, said, 5.0)
    lobby = Lobby(room, min_memory_mb=128, min_examples=50)
    found = lobby.cohort(0, check_in(1), Draws("secret", bytes(32)), lambda waiting: None)
    assert found == {0: "fit"}  # 32 stands for 32 to 63


def test_every_device_that_waits_is_as_likely_as_any_other():
    names, count = [f"n{i}" for i in range(10)], Counter()
    for t in range(2000):
        count.update(Draws("secret", bytes(32)).among(names, 3, t))
    # 600 of 2,000 expected, deviation 20.5: one in 10,000 seeds is beyond 4.3 of them
    assert all(abs(count[name] - 600) < 4.3 * 20.5 for name in names)


def test_the_cohorts_of_a_run_are_there_after_a_kill(tmp_path):
    log = CohortLog(tmp_path)
    assert log.of(0) is None
    log.add(0, ["ann", "ben"])
    log.add(1, ["cem", "ann"])
    with (tmp_path / "cohorts.jsonl").open("ab") as file:
        file.write(b'{"round": 2, "devi')  # killed while it wrote
    again = CohortLog(tmp_path)
    assert again.of(1) == {2: "cem", 0: "ann"}
    assert again.of(2) is None
    again.add(2, ["dan"])
    assert CohortLog(tmp_path).of(2) == {3: "dan"}
    assert [again.rests("ann", t, rounds=2) for t in (2, 3, 4)] == [True, True, False]


def test_a_damaged_log_of_cohorts_is_refused(tmp_path):
    (tmp_path / "cohorts.jsonl").write_bytes(b'{"round": 0}\n')
    with pytest.raises(InputError, match=r"cohorts\.jsonl is damaged"):
        CohortLog(tmp_path)


def test_old_cohorts_are_found_in_the_file(tmp_path):
    log = CohortLog(tmp_path)
    for t in range(40):
        log.add(t, [f"n{t}"])
    assert log.of(3) == {3: "n3"}


def check_in(size, **rest):
    return Cohorts(UNCOUNTED, size, sampling="check-in", **rest)


def nobodys(client):
    raise AssertionError("the trainer looked for examples")


def trainers_view():
    """The population as the trainer knows it: it has no example."""
    return Clients(UNCOUNTED, nobodys, toy.choose, toy.train, toy.localize)


def own_view(name):
    """The population as a device knows it."""
    mine = toy.EXAMPLES[NAMES.index(name)]
    return replace(trainers_view(), data=lambda client: mine)


@contextmanager
def wards(service, names=NAMES):
    """Devices with names of their own and their own examples, until the block ends."""
    stop = threading.Event()

    def live(name):
        one = PopulationClient(NAMES.index(name) + 77, lambda settings: own_view(name))
        clock = Clock(sleep=lambda seconds: stop.wait(min(seconds, 0.01)))
        with service.device(name=name, stop=stop, clock=clock) as device:
            keep_taking_part(device, one.participant())

    with living(live, names, stop):
        yield


@pytest.fixture
def service(tmp_path):
    directory = tmp_path / "rounds"
    with small_service(directory, note=WaitingRoom(directory).note) as made:
        yield made


def served(service, **options):
    lobby = Lobby(WaitingRoom(service.directory), stop=options.get("stop") or threading.Event())
    return Served(service.publisher, SpoolInbox(service.spool), poll=0.005, lobby=lobby, **options)


def test_devices_that_nobody_named_train_and_rest_between_rounds(tmp_path, service):
    plan = toy.make_plan(cohorts=check_in(2, rest=1, min_waiting=3))
    with wards(service):
        run = start_run(
            toy.make_state(), trainers_view(), plan, tmp_path / "run", served(service, seconds=30)
        )
        records = list(run.rounds(5))
        run.close()
    assert run.state.steps == 5
    assert [len(record.staleness) for record in records] == [2] * 5
    assert all(any(record.bytes_down) and all(record.client_sizes) for record in records)
    lines = (tmp_path / "run" / "cohorts.jsonl").read_text().splitlines()
    cohorts = [json.loads(line)["devices"] for line in lines]
    assert all(set(one) <= set(NAMES) for one in cohorts)
    assert all(not set(one) & set(other) for one, other in pairwise(cohorts))
    known = list(dict.fromkeys(name for cohort in cohorts for name in cohort))
    assert [record.clients for record in records] == [
        [known.index(name) for name in cohort] for cohort in cohorts
    ]


def test_a_trainer_that_is_stopped_goes_on_with_the_same_cohort(tmp_path, service):
    plan, stop, drawn = toy.make_plan(cohorts=check_in(3)), threading.Event(), []

    def stop_once_drawn(waiting):
        if waiting.is_drawn:
            drawn.extend(waiting.missing)
            stop.set()

    kind = served(service, stop=stop, on_arrival=stop_once_drawn)
    run = start_run(toy.make_state(), trainers_view(), plan, tmp_path / "run", kind)
    for name in NAMES:
        kind.lobby.room.note(name, NOTHING, 3600.0)
    with pytest.raises(KeyboardInterrupt):
        next(run.rounds(1))
    run.close()
    log = (tmp_path / "run" / "cohorts.jsonl").read_text()
    with wards(service, drawn):
        run = resume_run(toy.make_state(), trainers_view(), plan, tmp_path / "run", served(service))
        (record,) = run.rounds(1)
        run.close()
    assert (tmp_path / "run" / "cohorts.jsonl").read_text() == log
    assert (len(record.staleness), record.closed) == (3, "goal")


def test_a_round_whose_devices_have_vanished_closes_at_its_deadline(tmp_path, service):
    plan = toy.make_plan(cohorts=check_in(4))
    kind = served(service, seconds=0.05)
    kind.lobby.room.open()
    for number in range(100):
        kind.lobby.room.note(f"gone-{number}", NOTHING, 3600.0)
    run = start_run(toy.make_state(), trainers_view(), plan, kind=kind)
    (record,) = run.rounds(1)
    assert (record.closed, len(record.lost_before), record.is_skipped) == ("time", 4, True)


@pytest.mark.parametrize("named", [False, True])
def test_a_cohort_is_drawn_from_those_who_wait_or_named_and_not_both(service, named):
    kind = served(service, named=named)
    kind.lobby = kind.lobby if named else None
    with pytest.raises(InputError, match="either from clients that the trainer knows"):
        start_run(toy.make_state(), trainers_view(), toy.make_plan(cohorts=check_in(2)), kind=kind)


def test_a_run_in_process_has_no_device_to_check_in():
    with pytest.raises(InputError, match="no device can check in here"):
        start_run(toy.make_state(), trainers_view(), toy.make_plan(cohorts=check_in(2)))
