"""A device survives a service whose clock is wrong: it says so, and asks again at a sane pace."""

import time
from dataclasses import replace

import pytest

from keyhole import tree
from keyhole.device.device import Device
from keyhole.device.take_part import Participant, keep_taking_part
from keyhole.errors import AccessError, ServiceError, UntimelyError
from keyhole.service.access import Access, Keyring
from keyhole.service.sum_services import AggregatorClient
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Clock, Retry
from tests.service.scripted import answer, refusal, scripted
from tests.service.small_service import small_service

DAY, YEAR = 86_400.0, 365 * 86_400.0
KEYS = {"word": [3, 1], "neuron": [5]}
HABIT = Participant(
    lambda known: KEYS,
    lambda known, fetched: tree.map_leaves(lambda leaf: 2 * leaf, fetched.model),
)
RING = Keyring((b"k" * 32,))


class Shifted:
    """The clock of a service: off by `seconds`, until it has been asked `looks` times."""

    def __init__(self, seconds=0.0, looks=0):
        self.seconds, self.left = seconds, looks

    def __call__(self):
        is_off, self.left = self.left > 0, self.left - 1
        return time.time() + (self.seconds if is_off else 0.0)


@pytest.fixture
def clock():
    return Shifted()


@pytest.fixture
def service(tmp_path, clock):
    """Slices are for those with a token of the round."""
    access = Access(RING, reads_need_token=True)
    with small_service(tmp_path, access=access, clock=clock) as made:
        made.keyring = RING
        yield made


def waiting(waits, **options):
    return Clock(sleep=waits.append, **options)


@pytest.mark.parametrize("seconds", [-40 * DAY, -YEAR, 40 * DAY, YEAR])
def test_it_asks_again_until_the_clock_of_the_service_is_right(service, clock, seconds):
    state, waits, told = service.publish(), [], []
    clock.seconds, clock.left = seconds, 12
    with service.device(clock=waiting(waits)) as device:
        assert keep_taking_part(device, HABIT, rounds=1, on_miss=told.append) == 1
    assert list(service.stored(state.published.id)) == ["phone"]
    assert {type(error) for error in told} == {UntimelyError}
    assert waits[:10] == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0]
    assert max(waits) == 600.0


def test_a_round_token_that_was_dated_by_a_wrong_clock_is_asked_for_anew(service, clock):
    """It was right for the check-in, or so it seemed, and set right before the fetch."""
    state, waits, told = service.publish(), [], []
    with service.device(clock=waiting(waits)) as device:
        real = device.check_in

        def check_in():
            clock.seconds, clock.left = DAY, 10
            try:
                return real()
            finally:
                clock.left = 0
                device.check_in = real

        device.check_in = check_in
        assert keep_taking_part(device, HABIT, rounds=1, on_miss=told.append) == 1
    assert list(service.stored(state.published.id)) == ["phone"]
    assert [type(error) for error in told] == [UntimelyError]
    assert waits[0] == 1.0


@pytest.mark.parametrize("seconds", [-40 * DAY, 40 * DAY])
def test_devices_whose_tokens_are_good_there_take_part_by_a_wrong_clock(service, clock, seconds):
    """Round tokens are dated by the clock that checks them: it may be wrong for good."""
    clock.seconds, clock.left = seconds, 10**9
    token = RING.issue("device", "phone", now=time.time() - 50 * DAY, seconds=100 * DAY)
    state, waits = service.publish(), []
    with service.device(token=token, clock=waiting(waits)) as device:
        assert keep_taking_part(device, HABIT, rounds=1) == 1
    assert list(service.stored(state.published.id)) == ["phone"]
    assert waits == []


def test_an_aggregator_whose_clock_is_wrong_does_not_let_devices_train_in_vain(service):
    """The tokens of the round are refused there: the device asks again ever more seldom."""
    state, waits, told, tries = service.publish(), [], [], []

    def send(device, assignment, update, keys):
        tries.append(assignment)
        if len(tries) < 5:
            raise UntimelyError("the token is not yet good: got 1; expected 2 to 3; set the clock")
        return Device.send(device, assignment, update, keys)

    with service.device(clock=waiting(waits)) as device:
        habit = replace(HABIT, send=send)
        assert keep_taking_part(device, habit, rounds=1, on_miss=told.append) == 1
    assert list(service.stored(state.published.id)) == ["phone"]
    assert waits == [1.0, 2.0, 4.0, 8.0]
    assert {type(error) for error in told} == {UntimelyError}


@pytest.mark.parametrize("age", [0.0, -40 * DAY, 40 * DAY])
def test_a_trainer_waits_for_an_aggregator_with_another_clock(age):
    """A token that is untimely by both clocks is the operator's to replace."""
    token = RING.issue("device", "trainer", now=1e9, seconds=DAY)
    with scripted(refusal(401, "UntimelyError")) as script:
        client = HttpClient(f"http://127.0.0.1:{script.port}")
        one = AggregatorClient(client, token, 0, wall=lambda: 1e9 + age)
        with pytest.raises(ServiceError if age == 0.0 else UntimelyError, match="aggregator 0"):
            one.status("0-" + "a" * 64)
        one.close()


@pytest.mark.parametrize("age", [-DAY, YEAR])
def test_a_token_that_is_untimely_by_both_clocks_ends_it(service, age):
    service.publish()
    token = RING.issue("device", "phone", now=time.time() - age, seconds=DAY / 2)
    with (
        service.device(token=token, clock=waiting([])) as device,
        pytest.raises(UntimelyError, match=r"by the clock of the service; expected unix seconds"),
    ):
        keep_taking_part(device, HABIT, rounds=1, on_miss=lambda _: pytest.fail("asks again"))


@pytest.mark.parametrize("token", [None, "kh2", "kh2.x.y", "kh2.e30.y", "kh2.bm8.y", "kh2.MQ.y"])
def test_a_token_that_cannot_be_read_is_no_reason_to_ask_again(token):
    untimely = refusal(401, "UntimelyError")
    with (
        scripted(untimely) as script,
        Device(f"http://127.0.0.1:{script.port}", token=token, clock=waiting([])) as device,
        pytest.raises(AccessError),
    ):
        keep_taking_part(device, HABIT)
    assert len(script.asked) == 1


@pytest.mark.parametrize("after", ["31536000", "999999999", "Thu, 18 Nov 2027 00:00:00 GMT", "-1"])
def test_a_service_that_sends_everyone_away_for_a_year_is_asked_within_a_minute(after):
    """A busy answer, dated 1970, with a Retry-After that its clock made up."""
    waits, told = [], []
    date = "Thu, 01 Jan 1970 00:00:00 GMT"
    busy, there = answer(503, b"", retry_after=after, date=date), answer(200, b'{"wait": 1}')
    retry = Retry(seed=0, tell=told.append)
    with (
        scripted(busy, busy, there) as script,
        Device(f"http://127.0.0.1:{script.port}", retry=retry, clock=waiting(waits)) as device,
    ):
        assert device.check_in().seconds == 1.0
    assert told == ["status 503"] * 2
    assert len(waits) == 2
    assert max(waits) <= 60.0


def test_a_check_in_that_says_to_wait_for_a_year_is_repeated_within_an_hour():
    with (
        scripted(
            answer(200, b'{"wait": 31536000}', date="Fri, 01 Jan 2100 00:00:00 GMT")
        ) as script,
        Device(f"http://127.0.0.1:{script.port}") as device,
    ):
        assert device.check_in().seconds == 3600.0
