"""Closing a round: whatever was acknowledged counts, and nothing else is acknowledged."""

import threading

import pytest

from keyhole.errors import ConflictError, TooLateError
from keyhole.serving.files.update_spool import UpdateSpool

ROUND = "3-0123456789abcdef"


@pytest.fixture
def spool(tmp_path):
    return UpdateSpool(tmp_path / "updates")


def test_a_closed_round_takes_no_new_update(spool):
    spool.store(ROUND, "ann", b"1")
    assert spool.close(ROUND) == ["ann"]
    with pytest.raises(TooLateError):
        spool.store(ROUND, "bob", b"2")
    assert spool.close(ROUND) == ["ann"]


def test_a_device_whose_answer_was_lost_is_told_again_that_it_counts(spool):
    spool.store(ROUND, "ann", b"1")
    spool.close(ROUND)
    assert spool.store(ROUND, "ann", b"1") == "known"
    with pytest.raises(ConflictError):
        spool.store(ROUND, "ann", b"other")


def test_an_update_that_came_after_the_list_is_too_late_for_good(spool, tmp_path):
    """Its file is there, since it was linked while the round was being closed."""
    spool.close(ROUND)
    (tmp_path / "updates" / ROUND / "bob").write_bytes(b"2")
    with pytest.raises(TooLateError):
        spool.store(ROUND, "bob", b"2")
    assert spool.close(ROUND) == []


def test_a_round_that_nobody_answered_can_be_closed(spool):
    assert spool.close(ROUND) == []
    assert spool.rounds() == [ROUND]


def test_what_is_acknowledged_while_the_round_closes_counts(spool):
    """Twenty devices send at once, and the round closes in the midst of it."""
    acknowledged, ready = [], threading.Barrier(21)

    def send(name):
        ready.wait()
        try:
            spool.store(ROUND, name, b"x" * 1000)
        except TooLateError:
            return
        acknowledged.append(name)

    threads = [threading.Thread(target=send, args=(f"device-{i}",)) for i in range(20)]
    for thread in threads:
        thread.start()
    ready.wait()
    while not spool.devices(ROUND):
        pass
    counted = spool.close(ROUND)
    for thread in threads:
        thread.join()
    assert set(acknowledged) <= set(counted)
    assert spool.close(ROUND) == counted
