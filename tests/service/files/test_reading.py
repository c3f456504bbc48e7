"""Rounds read from a directory: what is there is served, what is damaged never is."""

import fcntl
import os
import threading

import numpy as np
import pytest

from keyhole.delivery.sources import sources_of
from keyhole.errors import NotFoundError, StorageError, TooLateError
from keyhole.service.directory import locked_manifest
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory, verify_round
from tests.helpers import DIGEST
from tests.service.small_rounds import LAYOUT, flip, names_of, published, small_state, step
from tests.service.sockets import wait_for

SMALL = {"segment_bytes": 100, "durable": False}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def is_free(round_directory):
    """Whether a publisher could take the round away."""
    with locked_manifest(round_directory, fcntl.LOCK_EX) as lock:
        return lock is not None


def test_there_is_no_round_before_the_first(tmp_path):
    assert RoundsDirectory(tmp_path).current() is None
    assert RoundsDirectory(tmp_path / "missing").current() is None


def test_a_round_is_as_it_was_published(tmp_path):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        found = publisher.publish_state(state, number=5, settings={"m": 3}, cohort=["ann", "ben"])
    rounds = RoundsDirectory(tmp_path)
    current = rounds.current()
    assert (current.round, current.number, current.phase) == (found.id, 5, "open")
    assert current.cohort == {"ann": 0, "ben": 1}
    with rounds.hold(found.id) as opened:
        assert (opened.id, opened.manifest, opened.encoded) == (
            found.id,
            found.manifest,
            found.encoded,
        )
        fetched = opened.tables[1].gather(np.array([7, 0, 7]))
        np.testing.assert_array_equal(
            fetched.records.view(np.float32), state.rows(1, np.array([7, 0, 7]))
        )


def test_the_current_round_is_looked_at_every_twentieth_of_a_second(tmp_path, clock):
    rounds = RoundsDirectory(tmp_path, clock=clock)
    assert rounds.current() is None
    published(tmp_path)
    clock.now += 0.04
    assert rounds.current() is None
    clock.now += 0.02
    assert rounds.current().number == 0


@pytest.mark.parametrize("jump", [0.06, 10**7, -(10**7)])
def test_a_clock_that_jumps_is_no_trouble(tmp_path, clock, jump):
    rounds = RoundsDirectory(tmp_path, clock=clock)
    directories = []
    for number in range(4):
        directories.append(published(tmp_path, number=number, **SMALL))
        clock.now += jump
        current = rounds.current()
        assert current.number == number
        with rounds.hold(current.round), rounds.hold(current.round) as opened:
            verify_round(opened)
    for _ in range(2):
        clock.now += 11
        rounds.current()
    assert not [path for path in directories[:2] if path.exists() and not is_free(path)]


def test_closing_a_round_shows(tmp_path, clock):
    rounds = RoundsDirectory(tmp_path, clock=clock)
    with Publisher(tmp_path) as publisher:
        publisher.publish_state(small_state(), number=0)
        assert rounds.current().phase == "open"
        publisher.close_round()
    clock.now += 1
    assert rounds.current().phase == "closed"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../etc/passwd",
        "0-0123456789ABCDEF",
        "0-0123456789abcde",
        f"-1-{DIGEST}",
        f"0-{DIGEST}/",
        f"0-{DIGEST}\n",
        f"0-{DIGEST}\0",
        f"\N{FULLWIDTH DIGIT ONE}-{DIGEST}",
        "1" * 19 + f"-{DIGEST}",
        f"00-{DIGEST}",
        ".spare",
        ".new-1",
        "a" * 10**5,
    ],
)
def test_what_is_no_identifier_never_becomes_a_path(tmp_path, name):
    published(tmp_path)
    with pytest.raises(NotFoundError, match="no such round"):
        RoundsDirectory(tmp_path).hold(name).__enter__()


def test_an_older_round_is_too_late_and_a_later_one_unknown(tmp_path):
    rounds = RoundsDirectory(tmp_path)
    with pytest.raises(NotFoundError):
        rounds.hold(f"0-{DIGEST}").__enter__()
    state, names = small_state(), []
    with Publisher(tmp_path) as publisher:
        for number in range(4):
            names.append(publisher.publish_state(state, number=number).id)
            step(state)
    rounds = RoundsDirectory(tmp_path)
    for name in names[:2]:
        with pytest.raises(TooLateError, match="has been removed"):
            rounds.hold(name).__enter__()
    for name in names[2:]:
        with rounds.hold(name) as opened:
            assert opened.id == name
    with pytest.raises(NotFoundError):
        rounds.hold(f"4-{DIGEST}").__enter__()


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("manifest.json", "flip"),
        ("manifest.json", "cut"),
        ("manifest.json", "empty"),
        ("table-1/seg-3.bin", "cut"),
        ("table-1/seg-3.bin", "empty"),
        ("table-1/seg-3.bin", "gone"),
        ("table-1/tree.bin", "cut"),
        ("table-1/tree.bin", "gone"),
        ("table-0", "gone"),
    ],
)
def test_a_damaged_round_is_not_served(tmp_path, file, damage):
    made = published(tmp_path, **SMALL)
    path = made / file
    if damage == "flip":
        for offset in range(0, path.stat().st_size, 7):
            flip(path, offset)
            rounds = RoundsDirectory(tmp_path)
            for _ in range(2):
                with pytest.raises(StorageError):
                    rounds.hold(made.name).__enter__()
            flip(path, offset)
        return
    if damage == "gone":
        path.rename(tmp_path / "gone")
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size - 1)
    with pytest.raises(StorageError):
        RoundsDirectory(tmp_path).hold(made.name).__enter__()


def test_flipped_records_are_found_when_verified(tmp_path):
    made = published(tmp_path, **SMALL)
    flip(made / "table-1" / "seg-3.bin", 11)
    with (
        RoundsDirectory(tmp_path).hold(made.name) as opened,
        pytest.raises(StorageError, match="1 records of table 'word'"),
    ):
        verify_round(opened, threads=2)


def test_a_damaged_round_is_looked_at_again_after_a_while(tmp_path, clock):
    made = published(tmp_path, **SMALL)
    rounds = RoundsDirectory(tmp_path, clock=clock)
    flip(made / "table-1" / "tree.bin", -1)
    with pytest.raises(StorageError):
        rounds.hold(made.name).__enter__()
    flip(made / "table-1" / "tree.bin", -1)
    with pytest.raises(StorageError):
        rounds.hold(made.name).__enter__()
    clock.now += 11
    with rounds.hold(made.name) as opened:
        verify_round(opened)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"round": "../x", "number": 0}', b"\xff"])
def test_a_damaged_current_file_is_an_error_and_not_no_round(tmp_path, text):
    published(tmp_path)
    (tmp_path / "current.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"current\.json is damaged"):
        RoundsDirectory(tmp_path).current()


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b'["a"'])
def test_a_damaged_cohort_lets_nobody_in(tmp_path, text):
    with Publisher(tmp_path) as publisher:
        found = publisher.publish_state(small_state(), number=0, cohort=["a"])
    (tmp_path / "rounds" / found.id / "cohort.json").write_bytes(text)
    with pytest.raises(StorageError, match=r"cohort\.json is damaged"):
        RoundsDirectory(tmp_path).current()


def test_the_newest_two_stay_open_and_older_ones_linger(tmp_path, clock):
    rounds = RoundsDirectory(tmp_path, linger=10, clock=clock)
    directories = []
    for number in range(3):
        directories.append(published(tmp_path, number=number, **SMALL))
        with rounds.hold(directories[-1].name):
            pass
    clock.now += 9
    rounds.current()
    assert [is_free(path) for path in directories] == [False] * 3
    clock.now += 2
    rounds.current()
    assert [is_free(path) for path in directories] == [True, False, False]
    rounds.close()
    assert [is_free(path) for path in directories] == [True] * 3


def test_a_service_that_keeps_up_leaves_a_spare_round(tmp_path, clock):
    """It opens some rounds only, as one of many processes does."""
    rounds = RoundsDirectory(tmp_path, linger=10, clock=clock)
    first = published(tmp_path, number=0, **SMALL)
    with rounds.hold(first.name):
        pass
    for number in range(1, 6):
        published(tmp_path, number=number, **SMALL)
        clock.now += 11
        rounds.current()
    assert not first.exists()
    assert len(names_of(tmp_path)) == 3


def test_a_repaired_round_reaches_a_service_that_runs(tmp_path, clock):
    state, rounds = small_state(), RoundsDirectory(tmp_path, clock=clock)
    made = published(tmp_path, state, **SMALL)
    flip(made / "table-1" / "seg-3.bin", 11)
    with rounds.hold(made.name) as damaged:
        lock = next(iter(rounds._entries.values())).lock
        published(tmp_path, state, **SMALL)
        with rounds.hold(made.name) as still:
            assert still is damaged
        clock.now += 0.06
        with rounds.hold(made.name) as repaired:
            verify_round(repaired)
        with pytest.raises(StorageError, match="1 records"):
            verify_round(damaged)  # whoever holds the old one finishes with that
        assert lock._exit_callbacks
    assert not lock._exit_callbacks
    with rounds.hold(made.name) as opened:
        assert opened is repaired


def test_a_round_that_could_not_be_opened_is_served_once_repaired(tmp_path, clock):
    state, rounds = small_state(), RoundsDirectory(tmp_path, clock=clock)
    made = published(tmp_path, state, **SMALL)
    flip(made / "table-1" / "tree.bin", -1)
    with pytest.raises(StorageError):
        rounds.hold(made.name).__enter__()
    published(tmp_path, state, **SMALL)
    clock.now += 0.06
    with rounds.hold(made.name) as opened:
        verify_round(opened)


def test_a_held_round_stays_open_however_long(tmp_path, clock):
    rounds = RoundsDirectory(tmp_path, linger=1, clock=clock)
    directories = [published(tmp_path, number=0, **SMALL)]
    with rounds.hold(directories[0].name):
        for number in range(1, 4):
            directories.append(published(tmp_path, number=number, **SMALL))
            with rounds.hold(directories[-1].name):
                pass
            clock.now += 100
        rounds.current()
        assert not is_free(directories[0])
    clock.now += 2
    rounds.current()
    assert is_free(directories[0])


def test_every_answer_is_one_round_while_others_are_published(tmp_path):
    """Readers in threads: the word of every record is the number of its round."""
    state = small_state()
    for table in state.tables:
        table.slab.values[:] = 0
    published(tmp_path, state, **SMALL)
    rounds = RoundsDirectory(tmp_path, linger=0.01)
    stop, seen, wrong = threading.Event(), set(), []

    def read(seed):
        rng = np.random.default_rng(seed)
        while not stop.wait(0.001):  # else the publisher hardly gets a turn
            current = rounds.current()
            try:
                with rounds.hold(current.round) as opened:
                    words = opened.tables[1].gather(rng.integers(0, 40, 20)).records
                    found = set(words.view(np.float32).reshape(-1).tolist())
                    seen.add(current.number)
                    if found != {float(current.number)}:
                        wrong.append((current.number, found))
            except TooLateError:
                pass  # two rounds later

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    try:
        with Publisher(tmp_path) as publisher:
            for number in range(1, 30):
                state.tables[1].slab.values[:] = number
                sources = sources_of(state)
                publisher.publish(sources, layout=LAYOUT, number=number, step=0, **SMALL)
                if number % 7 == 0:  # so that some are read for certain
                    wait_for(lambda number=number: number in seen)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not wrong
    assert seen >= {7, 14, 21, 28}
