"""Sharded tables: the bytes of one process for any number of shards, at the cost of the rows."""

from copy import copy

import numpy as np
import pytest

import keyhole as kh
from keyhole.engines.ray.shards import ShardedTable, Shards
from keyhole.errors import InputError, KeySpaceError, WorkerError
from keyhole.rounds.loop import resume_run, start_run
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD, Adam
from keyhole.server.row_sums import RowUpdate
from keyhole.server.snapshots import Snapshot, load_snapshot, save_snapshot
from keyhole.server.state import ServerState
from tests.rounds import toy

WORD = kh.KeySpace("word", 1000)
MODEL = {
    "table": np.random.default_rng(1).normal(size=(1000, 3)).astype(np.float32),
    "bias": np.arange(2, dtype=np.float32),
}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(WORD, {"table": 0}))


@pytest.fixture(scope="module")
def three(own_ray):
    with Shards(3) as shards:
        yield shards


def dense(optimizer):
    return ServerState.dense(LAYOUT, MODEL, optimizer)


def lazy(optimizer):
    return ServerState.lazy(LAYOUT, optimizer, {"table": Normal(0.5)}, seed=9)


GRID = pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        pytest.param(dense, Adam(0.1), id="dense-adam"),
        pytest.param(lazy, SGD(0.1), id="lazy-sgd"),
        pytest.param(dense, SGD(0.1), id="dense-sgd", marks=pytest.mark.slow),
        pytest.param(lazy, Adam(0.1), id="lazy-adam", marks=pytest.mark.slow),
    ],
)


def step(state, seed):
    """A step on random rows, some of which no shard but the first has."""
    rng = np.random.default_rng(seed)
    updates = []
    for part in state.layout.parts:
        limit = min(40, part.space.num_keys)
        keys = np.sort(rng.choice(part.space.num_keys, limit, replace=False)).astype(np.int64)
        if seed % 2:
            keys = keys[: len(keys) // 8 + 1]
        rows = rng.normal(size=(len(keys), part.slice_size)).astype(np.float32)
        updates.append(RowUpdate(keys, rows))
    state.step(updates)


@GRID
def test_a_sharded_state_has_the_bytes_of_one_in_one_process(three, make, optimizer):
    here, there = make(optimizer), three.hold(make(optimizer))
    assert sum(isinstance(table, ShardedTable) for table in there.tables) == 1, "the cut part"
    for seed in range(4):
        step(here, seed)
        step(there, seed)
    keys = WORD.keys([999, 0, 333, 334, 5, 5, 666, 667, 12])  # out of order, repeated, at the edges
    for state in (here, there):
        assert state.steps == 4
    for path in ("table", "bias"):
        assert here.select(keys)[path].tobytes() == there.select(keys)[path].tobytes()
        assert here.model()[path].tobytes() == there.model()[path].tobytes()
    for mine, theirs in zip(here.changed_since(2), there.changed_since(2), strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or mine.tobytes() == theirs.tobytes()
    assert there.nbytes > 0


def test_a_billion_keys_cost_what_is_touched(three):
    huge = kh.KeySpace("word", 10**9)
    like = {"w": np.broadcast_to(np.float32(0), (10**9, 2))}
    layout = kh.Layout.of(like, kh.Cut(huge, {"w": 0}))
    state = three.hold(ServerState.lazy(layout, SGD(0.5)))
    state.step([RowUpdate(np.array([7, 10**9 - 1]), np.ones((2, 2), np.float32))])
    assert state.select(huge.keys([10**9 - 1, 3]))["w"].tolist() == [[-0.5, -0.5], [0, 0]]
    assert state.nbytes < 1 << 20


def test_keys_outside_the_table_are_refused_by_count(three):
    state = three.hold(dense(SGD(0.1)))
    place = next(i for i, t in enumerate(state.tables) if isinstance(t, ShardedTable))
    with pytest.raises(KeySpaceError, match="2 such keys of 3"):
        state.rows(place, np.array([1, 1000, -1]))


@pytest.fixture(scope="module")
def narrow(three):
    """The same, but rows reach and leave them 256 bytes at a time: 21 of the table, or fewer."""
    shards = copy(three)
    shards._max_bytes = 256
    return shards


@GRID
def test_a_snapshot_of_shards_has_the_bytes_of_one_process(narrow, make, optimizer, tmp_path):
    here, there = make(optimizer), make(optimizer)
    for seed in range(2):
        step(here, seed)
        step(there, seed)
    there = narrow.hold(there)  # with rows that were made before
    for seed in range(2, 6):
        step(here, seed)
        step(there, seed)
    for name, state in {"here": here, "there": there}.items():
        save_snapshot(tmp_path / name, Snapshot(state, b"what goes with it"))
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()

    loaded = load_snapshot(tmp_path / "here", LAYOUT, into=narrow.hold(make(optimizer)).tables)
    assert loaded.metadata == b"what goes with it"
    assert [type(table) for table in loaded.state.tables] == [type(table) for table in there.tables]
    for state in (here, loaded.state):
        step(state, 6)
    for name, state in {"here 7": here, "there 7": loaded.state}.items():
        save_snapshot(tmp_path / name, Snapshot(state))
    assert (tmp_path / "here 7").read_bytes() == (tmp_path / "there 7").read_bytes()


@pytest.mark.parametrize("make", [dense, pytest.param(lazy, marks=pytest.mark.slow)])
def test_no_more_than_a_piece_passes_through_this_process(
    narrow, own_ray, make, tmp_path, monkeypatch
):
    state = make(Adam(0.1))
    for seed in range(6):
        step(state, seed)
    path, passed = tmp_path / "snapshot", []
    save_snapshot(path, Snapshot(state))
    into = narrow.hold(make(Adam(0.1))).tables
    monkeypatch.setattr("keyhole.server.snapshots.PIECE", 512)
    put = own_ray.put
    monkeypatch.setattr(own_ray, "put", lambda piece: passed.append(piece) or put(piece))
    loaded = load_snapshot(path, LAYOUT, into=into)
    there = next(table for table in loaded.state.tables if isinstance(table, ShardedTable))
    for array in there.dump()[1].values():
        passed += array.pieces()
    assert max(piece.nbytes for piece in passed) <= 256
    assert sum(piece.nbytes for piece in passed) > 4000


def test_a_damaged_snapshot_is_refused_for_the_one_before_it(narrow, tmp_path):
    made = start_run(narrow.hold(toy.make_state()), toy.make_clients(), toy.make_plan(), tmp_path)
    list(made.rounds(2, snapshot_every=1))
    made.close()
    newest = max((tmp_path / "state").glob("snapshot-*"))
    damaged = bytearray(newest.read_bytes())
    damaged[-70] ^= 1
    newest.write_bytes(damaged)
    state = narrow.hold(toy.make_state())
    again = resume_run(state, toy.make_clients(), toy.make_plan(), tmp_path)
    alone = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
    list(alone.rounds(2))
    assert any("is damaged" in note for note in again.notes)
    assert toy.model_bytes(again.state) == toy.model_bytes(alone.state)
    again.close()


def test_a_run_on_shards_is_stored_and_goes_on(three, tmp_path):
    alone = start_run(toy.make_state(Adam(0.1)), toy.make_clients(), toy.make_plan())
    list(alone.rounds(4))
    state = three.hold(toy.make_state(Adam(0.1)))
    made = start_run(state, toy.make_clients(), toy.make_plan(), tmp_path)
    list(made.rounds(2))
    made.close()
    state = three.hold(toy.make_state(Adam(0.1)))
    again = resume_run(state, toy.make_clients(), toy.make_plan(), tmp_path)
    assert any(isinstance(table, ShardedTable) for table in again.state.tables)
    list(again.rounds(4, snapshot_every=1))
    again.close()
    assert toy.model_bytes(again.state) == toy.model_bytes(alone.state)


@pytest.mark.slow
def test_a_lost_shard_is_an_error_and_the_run_goes_on_from_its_directory(own_ray, tmp_path):
    alone = start_run(toy.make_state(), toy.make_clients(), toy.make_plan())
    list(alone.rounds(3))
    with Shards(2) as shards:
        state = shards.hold(toy.make_state())
        made = start_run(state, toy.make_clients(), toy.make_plan(), tmp_path)
        rounds = made.rounds(3)
        next(rounds)
        own_ray.kill(shards._actors[1])
        with pytest.raises(WorkerError, match="one of 2 shards is gone"):
            list(rounds)
        made.close()
        with Shards(2) as others:
            state = others.hold(toy.make_state())
            again = resume_run(state, toy.make_clients(), toy.make_plan(), tmp_path)
            list(again.rounds(3))
            again.close()
            assert toy.model_bytes(again.state) == toy.model_bytes(alone.state)


def test_no_shards_at_all_are_refused():
    with pytest.raises(InputError, match="1 or more"):
        Shards(0)
