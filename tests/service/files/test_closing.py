"""Closing a round: whatever was acknowledged counts, and nothing else is acknowledged."""

import threading

import pytest

from keyhole.errors import ConflictError, TooLateError
from keyhole.service import spool as update_spool
from keyhole.service.spool import UpdateSpool
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import encode_update
from tests.helpers import DIGEST
from tests.service.small_service import LAYOUT, small_service
from tests.service.sockets import connect

ROUND = f"3-{DIGEST}"


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


@pytest.mark.parametrize("is_here", [True, False])
def test_an_update_that_meets_a_mark_without_a_list_counts_if_it_is_here(
    spool, tmp_path, monkeypatch, is_here
):
    """The trainer has marked the round as closed, and is about to list what counts."""
    folder, real = tmp_path / "updates" / ROUND, update_spool.sync_directory

    def mark(path):
        real(path)
        if path == folder and (folder / "ann").exists() == is_here:
            (folder / ".closed").touch()

    spool.store(ROUND, "zoe", b"0")
    monkeypatch.setattr(update_spool, "sync_directory", mark)
    if is_here:
        assert spool.store(ROUND, "ann", b"1") == "stored"
        assert spool.close(ROUND) == ["ann", "zoe"]
    else:
        mark(folder)
        with pytest.raises(TooLateError):
            spool.store(ROUND, "ann", b"1")
        assert spool.close(ROUND) == ["zoe"]


def test_an_update_that_came_after_the_list_is_too_late_for_good(spool, tmp_path):
    """Its file is there, since it was linked while the round was being closed."""
    spool.close(ROUND)
    (tmp_path / "updates" / ROUND / "bob").write_bytes(b"2")
    with pytest.raises(TooLateError):
        spool.store(ROUND, "bob", b"2")
    assert spool.close(ROUND) == []


def test_an_update_that_ends_after_its_round_was_removed_is_too_late(spool):
    spool.store(ROUND, "ann", b"1")
    spool.close(ROUND)
    spool.remove(ROUND)
    with pytest.raises(TooLateError):
        spool.store(ROUND, "bob", b"2")
    assert spool.store(ROUND, "ann", b"1") == "known"  # it counted; its answer may have been lost
    assert spool.has(ROUND, "ann")
    assert not spool.has(ROUND, "bob")
    assert (spool.devices(ROUND), spool.rounds(), spool.close(ROUND)) == ([], [], ["ann"])


def test_a_round_that_was_removed_before_it_closed_counted_nothing(spool):
    spool.store(ROUND, "ann", b"1")
    spool.remove(ROUND)
    for device in ("ann", "bob"):
        with pytest.raises(TooLateError):
            spool.store(ROUND, device, b"1")


def test_a_body_that_is_half_sent_when_its_round_goes_is_not_acknowledged(tmp_path):
    with small_service(tmp_path) as service:
        state = service.publish()
        round_id = state.published.id
        keys = {space.name: [0] for space in LAYOUT.spaces}
        with service.device(name="fast") as fast, service.device(name="slow") as slow:
            told = fast.check_in()
            got = fast.fetch(told, keys)
            body = encode_update(state.layout, got.model, got.keys, digest_of(round_id))
            token = slow.check_in().token
            with connect(service.url) as connection:
                head = [
                    f"POST /v1/rounds/{round_id}/updates HTTP/1.1",
                    "host: a",
                    "content-type: application/octet-stream",
                    f"authorization: Bearer {token}",
                    f"content-length: {len(body)}",
                    "expect: 100-continue",
                ]
                connection.sendall("\r\n".join([*head, "", ""]).encode())
                # The service asks for the body once it has found the round open.
                assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
                connection.sendall(body[:10])
                fast.send(told, got.model, keys)
                service.publisher.close_round()
                counted = service.spool.close(round_id)
                service.publish(seed=1)
                service.spool.remove(round_id)
                connection.sendall(body[10:])
                answer = connection.recv(1 << 16)
        assert counted == ["fast"]
        assert answer.startswith(b"HTTP/1.1 410 ")


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
    assert sorted(acknowledged) == counted
    assert spool.close(ROUND) == counted
