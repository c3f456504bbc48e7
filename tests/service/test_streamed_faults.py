"""Asynchronous rounds whose trainer stops at a bad moment: nothing that was sent is lost."""

import threading

import pytest

from keyhole.delivery.clear import Pregenerated
from keyhole.errors import InputError
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.service.inbox import SpoolInbox
from keyhole.service.served import Served
from keyhole.wire.assignment import device_name
from tests.rounds import toy
from tests.service.in_turn import InTurn
from tests.service.living_devices import devices
from tests.service.small_service import small_service


def at_once(rng):
    return 0.0


def plan_of(buffering):
    return toy.make_plan(delivery=Pregenerated(), buffering=buffering)


class Trainer:
    """Goes on with a run, each time as a new process would."""

    def __init__(self, service, folder, buffering):
        self.service, self.folder, self.plan = service, folder, plan_of(buffering)

    def rounds(self, until, *summons, **options):
        begin = resume_run if self.folder.exists() else start_run
        options = {"poll": 0.002, **options}
        kind = Served(
            self.service.publisher,
            SpoolInbox(self.service.spool),
            *summons,
            named=True,
            **options,
        )
        run = begin(toy.make_state(), toy.make_clients(), self.plan, self.folder, kind)
        try:
            yield from run.rounds(until)
        finally:
            run.close()

    def stop_in(self, t, *summons):
        """Begins round t and stops, once its devices have been told."""
        stop = threading.Event()
        stop.set()
        with pytest.raises(KeyboardInterrupt):
            list(self.rounds(t + 1, *summons, stop=stop))


class Silent(InTurn):
    """Devices fetch, and then say nothing until they are asked to `send`."""

    def news(self, now):
        return ()

    def send(self, client):
        """The update of the round that the client was first called to."""
        _, do = min((each[1], each[2]) for each in self._at_work if each[3] == client)
        do()


@pytest.fixture
def service(tmp_path):
    with small_service(tmp_path / "rounds") as service:
        yield service


@pytest.mark.parametrize("buffering", [None, Buffering(1, 2)], ids=["synchronous", "asynchronous"])
def test_a_run_that_is_killed_after_rounds_without_a_step_goes_on(service, tmp_path, buffering):
    """Rounds that came to nothing are not stored, but they were published."""
    trainer = Trainer(service, tmp_path / "run", buffering)
    with devices(service):
        assert [r.closed for r in trainer.rounds(1)] == ["goal"]
    made = trainer.rounds(9, seconds=0.02)
    assert all(next(made).is_skipped for _ in range(2))
    made.close()  # killed: the last two are nowhere but in the published rounds
    with devices(service):
        records = list(trainer.rounds(4))
    assert [(r.round, r.closed) for r in records] == [(1, "goal"), (2, "goal"), (3, "goal")]


def test_updates_stay_until_the_step_that_counts_them_is_stored(service, tmp_path):
    """Three end at once, two make a step. The third is counted in a round that is broken off."""
    trainer = Trainer(service, tmp_path / "run", Buffering(3, 2, duration=at_once))
    (first,) = trainer.rounds(1, InTurn(service, trainer.plan))
    (third,) = {int(name[7:]) for name in service.spool.devices(service.spool.rounds()[0])} - set(
        first.clients
    )
    for _ in range(2):
        trainer.stop_in(1, Silent(service, trainer.plan))
        assert service.spool.has(service.spool.rounds()[0], device_name(third))
    (second,) = trainer.rounds(2, InTurn(service, trainer.plan))
    assert second.clients[0] == third
    assert second.staleness[0] == 1


def test_who_was_let_into_a_round_stays_so_when_the_trainer_goes_on(service, tmp_path):
    trainer = Trainer(service, tmp_path / "run", Buffering(2, 1))
    trainer.stop_in(0, Silent(service, trainer.plan))
    cohort = service.publisher.cohort_of(0)
    service.publisher.invite([*cohort, "device-of-a-moment-ago"])
    trainer.stop_in(0, Silent(service, trainer.plan))
    assert set(service.publisher.cohort_of(0)) == {*cohort, "device-of-a-moment-ago"}


def test_devices_of_the_round_under_way_count_though_older_updates_made_a_step(service, tmp_path):
    """Two of four make the first step. The others send while the trainer is away, and so does one
    of the two that began since."""
    trainer = Trainer(service, tmp_path / "run", Buffering(4, 2))
    summons = Silent(service, trainer.plan)
    made = trainer.rounds(1, summons)
    summons.news = lambda now: [summons.send(c) for c in summons.called[:2]] and ()
    (first,) = made
    del summons.news
    trainer.stop_in(1, summons)
    old, new = summons.called[2:4], [c for c in summons.called[4:] if c not in summons.called[:4]]
    for client in [*old, new[0]]:
        summons.send(client)
    records = list(trainer.rounds(2, Silent(service, trainer.plan)))
    assert records[0].clients == old
    assert first.clients == summons.called[:2]
    summons.send(new[1])  # its round trails
    made = trainer.rounds(3, Silent(service, trainer.plan))
    assert next(made).clients == new


def test_devices_are_given_their_time_from_when_they_were_told(service):
    """Publishing takes ten times as long as a device is waited for."""
    now = [0.0]
    publish = service.publisher.publish_state

    def slowly(*args, **options):
        now[0] += 100.0
        return publish(*args, **options)

    service.publisher.publish_state = slowly
    plan = plan_of(Buffering(4, 2, duration=at_once))
    options = {"seconds": 10.0, "clock": lambda: now[0], "poll": 0.0}
    inbox = SpoolInbox(service.spool)
    kind = Served(service.publisher, inbox, InTurn(service, plan), named=True, **options)
    run = start_run(toy.make_state(), toy.make_clients(), plan, kind=kind)
    assert [record.lost_before for record in run.rounds(4)] == [[]] * 4


def test_a_run_goes_on_with_the_kind_of_clients_that_are_at_work(service, tmp_path):
    plan = plan_of(Buffering(4, 2))
    trainer = Trainer(service, tmp_path / "devices", Buffering(4, 2))
    list(trainer.rounds(1, InTurn(service, plan)))
    made = toy.make_state(), toy.make_clients(), plan
    with pytest.raises(InputError, match=r"another draws: got Draws\(kind=simulated\)"):
        resume_run(*made, tmp_path / "devices")
    run = start_run(*made, tmp_path / "alone")
    list(run.rounds(1))
    run.close()
    trainer.folder = tmp_path / "alone"
    with pytest.raises(InputError, match=r"another draws: got Draws\(kind=named\)"):
        list(trainer.rounds(2, InTurn(service, plan)))
