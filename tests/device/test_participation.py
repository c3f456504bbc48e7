"""Taking part in rounds: as told, in time, and until told to stop."""

import threading
from dataclasses import replace

import pytest

from keyhole import tree
from keyhole.device.device import Assignment, Device, RoundNow
from keyhole.device.take_part import (
    Participant,
    fetch_at_home,
    keep_taking_part,
    take_part,
    take_part_in,
)
from keyhole.errors import (
    AccessError,
    AwayError,
    NotAdmittedError,
    RequestError,
    StaleError,
    TooLateError,
)
from keyhole.wire.settings import sum_settings
from keyhole.wire.sockets import Clock, Retry
from tests.helpers import LONG, assert_trees_equal

KEYS = {"word": [3, 1, 3], "neuron": [5]}


def twice(known, fetched):
    return tree.map_leaves(lambda leaf: 2 * leaf, fetched.model)


HABIT = Participant(lambda known: KEYS, twice)


# Two proofs of two and three nodes beside 108 bytes of records; a table in one segment needs none.
@pytest.mark.parametrize(("fetch", "down"), [(Device.fetch, 108 + 32 * 5), (fetch_at_home, 348)])
def test_taking_part_stores_the_update_of_what_was_trained(service, fetch, down):
    state = service.publish()
    with service.device(name=f"phone-{down}") as device:
        taken = take_part(device, replace(HABIT, fetch=fetch))
    assert (taken.number, taken.keys) == (state.published.manifest.number, 4)
    assert taken.bytes_down == down
    assert list(service.stored(state.published.id)) == [f"phone-{down}"]


def as_called(device, participant):
    """As a Flower node takes part: told of the round in another way."""
    return take_part_in(device, device.check_in(), participant)


@pytest.mark.parametrize("take", [take_part, as_called])
def test_a_round_of_shares_is_left_before_keys_are_chosen(service, device, take):
    service.publish(settings=sum_settings(b"params"))
    in_vain = Participant(lambda _: pytest.fail("chose keys"), twice)
    with pytest.raises(RequestError, match=r"two aggregators: .* with --aggregators$"):
        take(device, in_vain)


def test_in_a_round_of_shares_no_update_leaves_the_device_in_the_clear(service, device):
    state = service.publish(settings=sum_settings(b"params"))
    update = twice(None, device.fetch(state.published.id, KEYS))
    device.client.send = lambda *_, **__: pytest.fail("sent an update in the clear")
    with pytest.raises(RequestError, match=r"two aggregators: .* with --aggregators$"):
        device.send(state.published.id, update, KEYS)


def test_a_device_waits_as_told_before_it_fetches(service, device):
    service.publish()
    waits = []
    device.clock = Clock(sleep=waits.append)
    told = device.check_in()
    device.check_in = lambda: Assignment(told.round, told.number, told.token, 7.5)
    take_part(device, HABIT)
    assert waits == [7.5]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_round_that_closed_is_refused_before_bytes_are_wasted(service, device, when):
    service.publish()

    def choose(known):
        if when == "after":
            return KEYS
        raise AssertionError("too late to choose")

    def train(known, fetched):
        service.publisher.close_round()
        return fetched.model

    told = device.check_in()
    device.check_in = lambda: told
    device.send = lambda *_: pytest.fail("too late to send")
    if when == "before":
        service.publisher.close_round()
    with pytest.raises(TooLateError, match="is over"):
        take_part(device, Participant(choose, train))


def test_an_update_is_sent_though_newer_rounds_are_there_while_its_own_trails(service, device):
    begun = service.publish().published

    def train(known, fetched):
        service.publish(trailing=[begun.id])
        return fetched.model

    assert take_part(device, Participant(lambda _: KEYS, train)).round == begun.id
    assert service.spool.devices(begun.id) == ["phone"]


@pytest.mark.parametrize("error", [AccessError, NotAdmittedError])
def test_a_device_that_may_no_longer_send_has_missed_the_round(service, device, error):
    """Its token has expired, or the service has forgotten that it let the device in."""
    service.publish()

    def send(*_):
        raise error("no longer: got 1; expected 2; check in")

    with pytest.raises(
        TooLateError, match="takes no update of this device any more: got no longer"
    ):
        take_part(device, Participant(HABIT.choose, HABIT.train, send=send))


@pytest.mark.parametrize("phase", ["open", "closed"])
def test_a_replica_that_lags_behind_makes_no_round_too_late(service, device, phase):
    older = service.publish().published
    newer = service.publish().published
    lagging = RoundNow(older.id, older.manifest.number, phase)
    told = device.check_in()
    device.check_in = lambda: told
    device.current = lambda: lagging
    assert take_part(device, HABIT).round == newer.id


def test_run_takes_part_in_every_round_and_skips_those_it_misses(service):
    service.publish()
    seen, missed, trained = [], [], []

    def train(known, fetched):
        trained.append(known.manifest.number)
        if len(trained) == 2:  # this one takes too long
            service.publisher.close_round()
        return fetched.model

    def sleep(_):  # nothing to do until there is another round
        service.publish()

    with service.device(clock=Clock(sleep=sleep)) as device:
        count = keep_taking_part(
            device,
            Participant(lambda _: KEYS, train),
            rounds=3,
            on_round=lambda taken: seen.append(taken.number),
            on_miss=missed.append,
        )
    assert count == 3
    assert ["is over" in str(error) for error in missed] == [True]
    assert seen == [trained[0], *trained[2:]]


class Lagging:
    """A fetch from servers that do not hold the same round, so often before each that works."""

    def __init__(self, misses):
        self.misses, self.left = misses, misses

    def __call__(self, device, round, keys):
        if self.left:
            self.left -= 1
            raise StaleError(f"servers differ: got {self.left}; expected one round; wait")
        self.left = self.misses
        return device.fetch(round, keys)


def test_servers_that_lag_are_waited_for_and_those_that_always_differ_end_it(service):
    service.publish()
    waits, missed = [], []
    with service.device(clock=Clock(sleep=waits.append)) as device:
        habit = replace(HABIT, fetch=Lagging(7))
        again = {"on_round": lambda _: service.publish(), "on_miss": missed.append}
        assert keep_taking_part(device, habit, rounds=2, **again) == 2
        assert waits == [1, 2, 4, 8, 16, 32, 60] * 2
        assert [error.got for error in missed] == list("6543210" * 2)
        with pytest.raises(StaleError, match="got 91"):  # the eighth of ninety-nine
            keep_taking_part(device, replace(HABIT, fetch=Lagging(99)), on_miss=missed.append)
    assert len(missed) == 14 + 7


def test_a_device_asks_again_until_a_service_that_is_away_comes_back(service):
    service.publish()
    waits, missed, away = [], [], [AwayError("no answer: got none; expected one; try again")] * 9

    def choose(known):
        if away:
            raise away.pop()
        return KEYS

    with service.device(clock=Clock(sleep=waits.append)) as device:
        habit = replace(HABIT, choose=choose)
        assert keep_taking_part(device, habit, rounds=1, on_miss=missed.append) == 1
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert {type(error) for error in missed} == {AwayError}


def test_a_device_without_a_round_tells_how_long_it_waits(service):
    service.publish()
    service.publisher.close_round()
    waits, told = [], []

    def sleep(seconds):
        waits.append(seconds)
        service.publish()

    with service.device(clock=Clock(sleep=sleep)) as device:
        assert keep_taking_part(device, HABIT, rounds=1, on_wait=told.append) == 1
    assert told == waits
    assert len(told) == 1


def test_a_stop_ends_waiting_at_once(service):
    service.publish()
    service.publisher.close_round()
    stop = threading.Event()
    with service.device(stop=stop, clock=None, retry=Retry()) as device:
        thread = threading.Thread(target=keep_taking_part, args=(device, HABIT))
        thread.start()
        stop.set()
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_stop_ends_retrying_when_nobody_answers():
    stop = threading.Event()
    clock = Clock(sleep=lambda _: stop.set())
    with Device("http://127.0.0.1:9", stop=stop, clock=clock, retry=Retry(attempts=99)) as device:
        assert keep_taking_part(device, HABIT) == 0


def test_threads_share_a_device(service):
    state = service.publish()
    found = [None] * 8
    with service.device() as device:

        def fetch(place):
            keys = {"word": [place], "neuron": [place % 6] * place}
            found[place] = device.fetch(state.published.id, keys)

        threads = [threading.Thread(target=fetch, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for each in found:
        assert_trees_equal(each.model, state.select(tuple(each.keys.values())))
