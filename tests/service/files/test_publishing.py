"""Publishing: incremental is full, byte for byte; what goes wrong leaves the round before."""

import os
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest

from keyhole.delivery.records import Coding, CodingKind, RecordField, Records
from keyhole.delivery.sources import FunctionSource, sources_of
from keyhole.errors import InputError, StorageError
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Yogi
from keyhole.service import segments as slice_files
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from tests.helpers import DIGEST, ROOT, grid
from tests.service.small_rounds import (
    LAYOUT,
    check_current,
    files_of,
    flip,
    names_of,
    published,
    small_state,
    step,
)

OPTIMIZERS = [SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1), Yogi(0.1)]
SMALL = {"segment_bytes": 100, "durable": False}


def ids_of(directory):
    return sorted(name for name in names_of(directory) if not name.startswith("."))


@grid("kind, optimizer, coding", ("dense", "lazy"), OPTIMIZERS, get_args(CodingKind))
def test_an_incremental_round_equals_a_full_one(tmp_path, kind, optimizer, coding):
    state, rounds = small_state(optimizer, kind), RoundsDirectory(tmp_path / "a")
    coding, is_held = Coding(coding, seed=3), kind == "lazy"
    # A round that is held cannot become spare: its files are linked or copied.
    touched = [(3, 17), (), (0, 39), tuple(range(30)), (8, 9, 10), (5,)]
    with Publisher(tmp_path / "a") as publisher:
        for number, words in enumerate(touched):
            found = publisher.publish_state(state, number=number, coding=coding, **SMALL)
            full = published(tmp_path / f"full-{number}", state, number, coding=coding, **SMALL)
            assert files_of(tmp_path / "a" / "rounds" / found.id) == files_of(full)
            if is_held:
                rounds.hold(found.id).__enter__()
            step(state, words)


@pytest.mark.parametrize("chunk", [20, 60, 10**6])
@pytest.mark.parametrize("is_held", [False, True], ids=["spare", "linked"])
def test_patches_of_any_size_give_the_same_bytes(tmp_path, monkeypatch, chunk, is_held):
    monkeypatch.setattr(slice_files, "CHUNK", chunk)
    state, rounds = small_state(kind="lazy"), RoundsDirectory(tmp_path / "a")
    with Publisher(tmp_path / "a") as publisher:
        for number in range(5):
            found = publisher.publish_state(state, number=number, **SMALL)
            step(state, np.random.default_rng(number).choice(40, 6, replace=False))
            if is_held:
                rounds.hold(found.id).__enter__()
    full = small_state(kind="lazy")
    for number in range(4):
        step(full, np.random.default_rng(number).choice(40, 6, replace=False))
    expected = files_of(published(tmp_path / "b", full, 4, **SMALL))
    assert files_of(tmp_path / "a" / "rounds" / found.id) == expected


def counting_source(values):
    """A source that remembers which keys it was asked for."""
    asked = []

    def select_batch(x, keys):
        asked.extend(keys.tolist())
        return {".": x[keys]}

    records = Records("row", len(values), (RecordField(".", (4,), np.dtype(np.float32)),))
    return FunctionSource(records, values, select_batch), asked


@pytest.mark.parametrize("is_held", [False, True], ids=["spare", "linked"])
def test_only_what_changed_is_computed(tmp_path, is_held):
    values = np.zeros((100, 4), np.float32)
    rounds = RoundsDirectory(tmp_path)
    with Publisher(tmp_path) as publisher:
        for number in range(4):
            source, asked = counting_source(values)
            found = publisher.publish(
                [source],
                layout=None,
                number=number,
                step=number,
                changed=lambda base: [np.array([7, 8, 50])],
                segment_bytes=320,
            )
            if is_held:
                rounds.hold(found.id).__enter__()
            values = values.copy()
            values[[7, 8, 50]] += 1
    assert sorted(asked) == [7, 8, 50]
    assert check_current(tmp_path)[1][0].view(np.float32)[[6, 7, 50]].tolist() == [
        [0.0] * 4,
        [3.0] * 4,
        [3.0] * 4,
    ]


def test_another_state_is_not_taken_for_the_one_before(tmp_path):
    with Publisher(tmp_path) as publisher:
        for number in range(4):
            publisher.publish_state(small_state(), number=number, **SMALL)
        other = small_state()
        step(other)
        step(other, [5])
        publisher.publish_state(other, number=9, **SMALL)
    expected = other.rows(1, np.arange(40))
    np.testing.assert_array_equal(check_current(tmp_path)[1][1].view(np.float32), expected)


@pytest.mark.parametrize(
    "change",
    [{"coding": Coding("half")}, {"segment_bytes": 60}, {"segment_bytes": 10**6}],
)
def test_a_base_that_was_written_otherwise_is_not_used(tmp_path, change):
    state = small_state(kind="lazy")
    with Publisher(tmp_path / "a") as publisher:
        for number in range(4):
            publisher.publish_state(state, number=number, **SMALL)
            step(state)
        found = publisher.publish_state(state, number=4, **{**SMALL, **change})
    full = published(tmp_path / "b", state, 4, **{**SMALL, **change})
    assert files_of(tmp_path / "a" / "rounds" / found.id) == files_of(full)


def test_a_flipped_record_of_the_spare_round_does_not_become_true(tmp_path):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        for number in range(3):
            publisher.publish_state(state, number=number, **SMALL)
            step(state, [3])
        flip(tmp_path / "rounds" / ".spare" / "table-1" / "seg-7.bin")  # key 35, never touched
        publisher.publish_state(state, number=3, **SMALL)
        with pytest.raises(StorageError, match="1 records of table 'word' cannot be served"):
            check_current(tmp_path)
        publisher.publish_state(state, number=3, **SMALL)  # what the message says
        assert check_current(tmp_path)[0] == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["tree.bin", "seg-7.bin"])
def test_a_spare_round_with_damaged_files_is_written_in_full(tmp_path, name, damage):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        for number in range(3):
            publisher.publish_state(state, number=number, **SMALL)
            step(state, [3])
        path = tmp_path / "rounds" / ".spare" / "table-1" / name
        if damage == "flip":
            flip(path.with_name("tree.bin"), 32 * 2 + 5)  # the leaf beside the one that changes
        elif damage == "cut":
            os.truncate(path, 3)
        else:
            path.unlink()
        publisher.publish_state(state, number=3, **SMALL)
    expected = state.rows(1, np.arange(40))
    np.testing.assert_array_equal(check_current(tmp_path)[1][1].view(np.float32), expected)


def test_a_held_round_keeps_its_bytes_whatever_is_published(tmp_path):
    state, rounds = small_state(), RoundsDirectory(tmp_path)
    held = {}
    with Publisher(tmp_path) as publisher:
        for number in range(9):
            found = publisher.publish_state(state, number=number, **SMALL)
            if number % 3 == 0:
                opened = rounds.hold(found.id).__enter__()
                held[number] = opened, [bytes(opened.tables[1].segment(i)) for i in range(8)]
            step(state, [number, 39 - number])
    for opened, before in held.values():
        assert [bytes(opened.tables[1].segment(i)) for i in range(8)] == before


def test_two_rounds_are_kept_and_one_is_spare(tmp_path):
    state = small_state()
    with Publisher(tmp_path) as publisher:
        for number in range(6):
            publisher.publish_state(state, number=number)
            step(state)
    assert [int(name.split("-")[0]) for name in ids_of(tmp_path)] == [4, 5]
    assert names_of(tmp_path)[0] == ".spare"
    assert len(names_of(tmp_path)) == 3


def test_a_round_goes_once_nobody_holds_it(tmp_path):
    state, rounds = small_state(), RoundsDirectory(tmp_path)
    with Publisher(tmp_path) as publisher:
        first = publisher.publish_state(state, number=0).id
        with rounds.hold(first):
            for number in range(1, 5):
                publisher.publish_state(state, number=number)
            assert first in ids_of(tmp_path)
        rounds.close()
        publisher.publish_state(state, number=5)
    assert first not in ids_of(tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"settings": {"m": {1, 2}, "x": object()}}, "settings cannot be told to devices"),
        *(
            ({"settings": {"m": {"deep": [value]}}}, "settings cannot be told to devices")
            for value in (float("nan"), float("inf"), b"bytes", {1, 2})
        ),
        ({"cohort": ["a", "b", "a"]}, "names devices twice: got 1 repeats"),
        ({"threads": 0}, "threads is too small"),
    ],
)
def test_what_cannot_be_published_leaves_no_trace(tmp_path, options, said):
    with Publisher(tmp_path) as publisher:
        with pytest.raises(InputError, match=said):
            publisher.publish_state(small_state(), number=0, **options)
        assert files_of(tmp_path) == {"publisher.lock": b""}
        assert names_of(tmp_path) == []


def test_sources_must_fit_the_layout(tmp_path):
    with Publisher(tmp_path) as publisher:
        for sources in ([], sources_of(small_state())[:1]):
            with pytest.raises(InputError, match="sources do not fit the layout"):
                publisher.publish(sources, layout=LAYOUT, number=0, step=0)


def test_a_second_publisher_is_refused_at_once(tmp_path):
    with Publisher(tmp_path) as publisher:
        with pytest.raises(StorageError, match="has a publisher already"):
            Publisher(tmp_path)
        script = f"from keyhole.service.publishing import Publisher; Publisher({str(tmp_path)!r})"
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert "has a publisher already" in done.stderr
        publisher.publish_state(small_state(), number=0)
    Publisher(tmp_path).close()


def test_closing_a_publisher_twice_closes_nothing_else(tmp_path):
    publisher = Publisher(tmp_path)
    number = publisher._lock
    publisher.close()
    with (tmp_path / "other").open("wb") as other:
        assert other.fileno() == number  # it is given again at once
        publisher.close()
        assert os.fstat(number).st_size == 0  # still open


def test_a_closed_publisher_lets_go_though_a_fork_has_its_descriptor(tmp_path):
    publisher = Publisher(tmp_path)
    inherited = os.dup(publisher._lock)
    publisher.close()
    with Publisher(tmp_path) as other:  # raises where the lock is still held
        assert other._lock != inherited
    os.close(inherited)


def test_what_a_killed_publisher_leaves_is_removed(tmp_path):
    state = small_state()
    published(tmp_path, state)
    rounds = tmp_path / "rounds"
    (rounds / ".new-77" / "table-0").mkdir(parents=True)
    (rounds / f".old-3-{DIGEST}").mkdir()
    (rounds / f"9-{DIGEST}").mkdir()  # complete, but no device was told of it
    (tmp_path / "current.json.tmp").write_bytes(b"{")
    with Publisher(tmp_path) as publisher:
        assert len(names_of(tmp_path)) == 1
        assert not (tmp_path / "current.json.tmp").exists()
        publisher.publish_state(state, number=1)
    assert check_current(tmp_path)[0] == 1


def test_the_progress_of_a_patch_counts_every_record(tmp_path):
    state, seen = small_state(kind="lazy"), []
    with Publisher(tmp_path) as publisher:
        for number in range(4):
            seen.clear()
            publisher.publish_state(
                state, number=number, progress=lambda *said: seen.append(said), **SMALL
            )
            assert seen[-1] == (41, 41)
            assert seen == sorted(seen)
            step(state)


def test_a_source_that_fails_in_a_patch_leaves_the_round_before(tmp_path):
    values = np.zeros((100, 4), np.float32)
    source, _ = counting_source(values)

    def failing(x, keys):
        if len(keys) == 1:
            raise RuntimeError("no such luck")
        return {".": x[keys]}

    def publish(publisher, source, number):
        def changed(base):
            return [np.array([7])]

        publisher.publish([source], layout=None, number=number, step=number, changed=changed)

    with Publisher(tmp_path) as publisher:
        publish(publisher, source, 0)
        with pytest.raises(RuntimeError, match="no such luck"):
            publish(publisher, FunctionSource(source.records, values, failing), 1)
        assert check_current(tmp_path)[0] == 0
        publish(publisher, source, 1)
    assert check_current(tmp_path)[0] == 1
