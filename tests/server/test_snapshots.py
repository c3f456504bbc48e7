"""A snapshot is the state, or an error."""

import os

import numpy as np
import pytest

from keyhole.errors import StorageError
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Yogi
from keyhole.server.snapshots import Snapshot, load_snapshot, save_snapshot
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, grid
from tests.server.test_state import random_updates

OPTIMIZERS = [SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1), Yogi(0.1)]
LAYOUT = LAYOUTS["neurons in and out"]


def trained(kind="lazy", optimizer=None, layout=LAYOUT, steps=3):
    optimizer = optimizer or Adam(0.1)
    paths = [field.path for part in layout.parts for field in part.fields]
    state = ServerState.lazy(layout, optimizer, dict.fromkeys(paths, Normal(0.1)), seed=2)
    if kind == "dense":
        state = ServerState.dense(layout, state.model(), optimizer)
    train(state, steps)
    return state


def train(state, steps):
    for _ in range(steps):
        state.step(random_updates(state.layout, np.random.default_rng(state.steps), share=0.3))


def sampled(size):
    """Every byte of the head, every seventh of the rest, and the last."""
    return [*range(64), *range(64, size, 7), size - 1]


def contents(state):
    """Everything that decides how a state goes on."""
    arrays = [
        (keys.tobytes(), [a[: len(keys)].tobytes() for a in table.slab.named().values()])
        for table in state.tables
        for keys in [table.index.keys if hasattr(table, "index") else np.arange(table.num_keys)]
    ]
    return state.steps, state.optimizer, arrays


@grid("name, optimizer, kind", LAYOUTS, OPTIMIZERS, ["dense", "lazy"])
def test_a_loaded_state_goes_on_with_the_same_bytes(tmp_path, name, kind, optimizer):
    state = trained(kind, optimizer, LAYOUTS[name])
    save_snapshot(tmp_path / "s", Snapshot(state, b"round 3"))
    loaded = load_snapshot(tmp_path / "s", LAYOUTS[name])
    assert loaded.metadata == b"round 3"
    assert contents(loaded.state) == contents(state)
    train(state, 4)
    train(loaded.state, 4)
    assert contents(loaded.state) == contents(state)


def test_a_lazy_snapshot_holds_touched_rows_only(tmp_path):
    state = ServerState.lazy(LAYOUT, SGD(0.1))
    save_snapshot(tmp_path / "empty", Snapshot(state))
    assert (tmp_path / "empty").stat().st_size < 2000


@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_a_snapshot_cut_at_any_byte_is_refused(tmp_path, kind):
    path = tmp_path / "s"
    save_snapshot(path, Snapshot(trained(kind), b"xyz"))
    data = path.read_bytes()
    for size in sampled(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(StorageError, match=r"s (is|has)"):
            load_snapshot(path, LAYOUT)
    path.write_bytes(data + b"\0")
    with pytest.raises(StorageError, match="longer than it says"):
        load_snapshot(path, LAYOUT)


@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_a_flipped_bit_anywhere_is_refused(tmp_path, kind):
    path = tmp_path / "s"
    save_snapshot(path, Snapshot(trained(kind), b"xyz"))
    data = path.read_bytes()
    for at in sampled(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        with pytest.raises(StorageError, match=r"s (is|has|was)"):
            load_snapshot(path, LAYOUT)


def test_foreign_files_are_refused(tmp_path):
    path = tmp_path / "s"
    path.write_bytes(os.urandom(500))
    with pytest.raises(StorageError, match="s is not a snapshot"):
        load_snapshot(path, LAYOUT)
    save_snapshot(path, Snapshot(trained()))
    with pytest.raises(StorageError, match="written for another layout"):
        load_snapshot(path, LAYOUTS["rows"])
    with pytest.raises(StorageError, match="cannot read absent: got No such file"):
        load_snapshot(tmp_path / "absent", LAYOUT)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "s"
    state = trained()
    save_snapshot(path, Snapshot(state, b"old"))
    (tmp_path / "s.tmp").mkdir()  # in the way of the temporary file
    with pytest.raises(StorageError, match="cannot write s: got Is a directory"):
        save_snapshot(path, Snapshot(state, b"new"))
    assert load_snapshot(path, LAYOUT).metadata == b"old"
