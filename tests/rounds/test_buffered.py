"""Asynchronous rounds: synchronous if nobody is late, else they say how old updates were."""

import pytest

from keyhole.errors import InputError
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering, fade
from keyhole.sampling import Cohorts
from tests.rounds import toy


def run(buffering=None, rounds=6, **plan):
    plan = toy.make_plan(buffering=buffering, **plan)
    made = start_run(toy.make_state(), toy.make_clients(), plan)
    records = list(made.rounds(rounds))
    return toy.model_bytes(made.state), records


def slow(rng):
    return rng.exponential()


def test_no_delay_is_synchronous():
    assert run(Buffering(concurrency=5, goal=5)) == run()


def test_staleness_counts_the_steps_since_a_client_started():
    """Two wait for each step, four work without delay: the second pair is one step old."""
    _, records = run(Buffering(concurrency=4, goal=2), rounds=4)
    assert [r.staleness for r in records] == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_delays_make_updates_old_and_the_bound_leaves_the_oldest_out():
    _, free = run(Buffering(10, 2, max_staleness=100, duration=slow), rounds=30)
    _, bounded = run(Buffering(10, 2, max_staleness=2, duration=slow), rounds=30)
    assert max(s for r in free for s in r.staleness) > 2
    assert max(s for r in bounded for s in r.staleness) <= 2
    assert all(len(r.staleness) == 2 for r in free + bounded)
    assert sum(len(r.stale) for r in free) == 0
    for r in bounded:
        assert len(r.clients) == len(r.staleness) + len(r.stale)
    assert any(r.stale for r in bounded)


def test_old_updates_count_less():
    full = run(Buffering(10, 2, weight=lambda s: 1.0, duration=slow))[0]
    assert run(Buffering(10, 2, duration=slow))[0] != full
    assert [fade(s) for s in (0, 3)] == [1.0, 0.5]


def test_clients_that_drop_out_free_their_place():
    cohorts = Cohorts(20, 5, lost_before=0.3, lost_after=0.3)
    _, records = run(Buffering(5, 3, duration=slow), rounds=10, cohorts=cohorts)
    assert all(len(r.staleness) == 3 for r in records)
    assert any(r.lost_before for r in records)
    assert any(r.lost_after for r in records)


def test_a_step_that_nobody_answers_is_recorded_and_skipped():
    _, records = run(Buffering(5, 3), rounds=2, cohorts=Cohorts(20, 5, lost_after=1.0))
    assert all(r.is_skipped and r.step == 0 for r in records)


def test_the_same_seed_gives_the_same_bytes():
    buffering = Buffering(8, 3, duration=slow)
    assert run(buffering) == run(buffering)


@pytest.mark.parametrize("bad", [{"concurrency": 0}, {"goal": 0}, {"max_staleness": -1}])
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(InputError, match="out of range"):
        Buffering(**{"concurrency": 4, "goal": 2, **bad})


def test_poisson_cohorts_have_no_stream_of_clients():
    with pytest.raises(InputError, match="got poisson sampling"):
        run(Buffering(4, 2), cohorts=Cohorts(20, 5, "poisson"))


@pytest.mark.parametrize("duration", [-1.0, float("nan"), float("inf")])
def test_a_duration_that_is_no_length_of_time_is_refused(duration):
    with pytest.raises(InputError, match="duration is out of range"):
        run(Buffering(4, 2, duration=lambda rng: duration))


def test_distinct_keys_count_a_key_once_however_many_deliveries_it_took():
    few = {"feature": 1}
    _, records = run(Buffering(3, 6, duration=slow), rounds=3, keys_per_client=few)
    for record in records:
        first = {toy.oracle.own_features(toy.EXAMPLES[c])[0] for c in record.clients}
        assert record.distinct_keys == len(first)


def test_a_client_is_at_work_once_and_takes_part_in_a_round_once():
    _, records = run(Buffering(18, 4, duration=slow), rounds=20)
    assert all(len(set(r.clients)) == len(r.clients) for r in records)
    assert all(len(r.staleness) == 4 for r in records)


def test_a_round_that_everyone_has_had_their_part_in_ends_without_a_step():
    cohorts = Cohorts(20, 5, lost_after=0.9)
    _, records = run(Buffering(5, 15), rounds=2, cohorts=cohorts)
    assert [(r.closed, r.step, len(r.clients)) for r in records] == [("everyone", 0, 20)] * 2
