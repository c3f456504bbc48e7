"""The stream of clients: cohort after cohort, but for those who cannot start."""

import pytest

from keyhole.errors import InputError
from keyhole.rounds.machine import Buffering
from keyhole.sampling import ClientStream, Cohorts, sample_cohort
from tests.rounds import toy


def stream(drawn=0, buffering=None, **cohorts):
    made = Cohorts(**{"population": 20, "size": 5, **cohorts})
    plan = toy.make_plan(cohorts=made, buffering=buffering)
    return ClientStream(plan.cohorts, plan.draw_cohort, drawn)


def cohort(t):
    return list(sample_cohort(Cohorts(20, 5), 3, 0, t))


def test_clients_come_cohort_after_cohort_however_many_are_taken_at_once():
    one, two = stream(), stream()
    assert one.take(5, set()) == cohort(0)
    assert one.take(5, set()) == cohort(1)
    assert [*two.take(3, set()), *two.take(2, set())] == cohort(0)
    assert two.drawn == 5


def test_it_goes_on_from_where_it_was():
    one = stream()
    one.take(7, set())
    assert stream(drawn=one.drawn).take(4, set()) == one.take(4, set())


def test_who_is_busy_is_passed_over_and_has_lost_the_turn():
    first, second, *_ = cohort(0)
    one = stream()
    assert one.take(1, {first}) == [second]
    assert first not in one.take(3, set())


def test_nobody_comes_twice_at_once():
    taken = stream(size=2).take(20, set())
    assert sorted(taken) == list(range(20))


def test_fewer_come_when_no_more_are_left():
    one = stream()
    assert sorted(one.take(20, set(range(15)))) == list(range(15, 20))
    drawn = one.drawn
    assert one.take(1, set(range(20))) == []
    assert one.drawn == drawn


@pytest.mark.parametrize("sampling", ["poisson", "cyclic"])
def test_other_samplings_are_refused(sampling):
    with pytest.raises(InputError, match=f"got {sampling} sampling"):
        stream(sampling=sampling, buffering=Buffering(2, 2))


@pytest.mark.parametrize("numbers", [(21, 1), (1, 21)])
def test_more_clients_than_there_are_cannot_be_at_work_or_waited_for(numbers):
    with pytest.raises(InputError, match=r"got 21 at work, or waited for.*expected 1\.\.20"):
        stream(buffering=Buffering(*numbers))
