"""Optimizers by parameter: the bytes of a table for each group; patterns and schedules."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.server.groups import ByParameter, Schedule, Scheduled
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, WithAdded, Yogi
from keyhole.server.row_sums import RowUpdate
from keyhole.server.snapshots import Snapshot, load_snapshot, save_snapshot
from keyhole.server.state import ServerState

ITEM = kh.KeySpace("item", 30)
SHAPES = {"bias": (30,), "left": (30, 4), "right": (30, 2, 2), "whole": (5,)}
CUT = {"bias": 0, "left": 0, "right": 0}
WARM = Scheduled(Adam(0.3), Schedule(3, "cosine", 40))
EACH = {"bias": Yogi(0.2), "left": WARM, "right": Adagrad(0.1), "whole": Momentum(0.1)}
MIXED = ByParameter((("b*", Yogi(0.2)), ("left", WARM), ("whole", Momentum(0.1))), Adagrad(0.1))


def layout_of(*names):
    like = {name: np.broadcast_to(np.float32(0), SHAPES[name]) for name in names}
    return kh.Layout.of(like, kh.Cut(ITEM, {n: a for n, a in CUT.items() if n in names}))


def updates_of(rng):
    """A step on some items: an update for each parameter."""
    keys = np.flatnonzero(rng.random(30) < 0.3)
    shapes = {n: (len(keys), *s[1:]) if n in CUT else s for n, s in SHAPES.items()}
    return keys, {n: rng.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def step(state, keys, leaves):
    rows = []
    for part in state.layout.parts:
        at = keys if part.product.factors else np.zeros(1, np.int64)
        flat = [leaves[f.path].reshape(len(at), -1) for f in part.fields]
        rows.append(RowUpdate(at, np.ascontiguousarray(np.concatenate(flat, axis=1))))
    state.step(rows)


@pytest.mark.parametrize("kind", ["dense", "lazy"])
def test_each_parameter_is_stepped_as_if_it_had_a_table_of_its_own(kind, tmp_path):
    def make(names, optimizer):
        layout = layout_of(*names)
        if kind == "lazy":
            return ServerState.lazy(layout, optimizer, dict.fromkeys(names, Normal(0.0001)))
        ones = {name: np.ones(SHAPES[name], np.float32) for name in names}
        return ServerState.dense(layout, ones, optimizer)

    rng, both = np.random.default_rng(0), make(SHAPES, MIXED)
    start = both.model()
    alone = {name: make([name], optimizer) for name, optimizer in EACH.items()}
    before = {name: state.model()[name] for name, state in alone.items()}
    for t in range(12):
        keys, leaves = updates_of(rng)
        step(both, keys, leaves)
        for state in alone.values():
            step(state, keys, leaves)
        if t == 6:
            save_snapshot(tmp_path / "snapshot", Snapshot(both, b""))
            both = load_snapshot(tmp_path / "snapshot", both.layout, optimizer=MIXED).state
    found = both.model()
    for name, state in alone.items():
        if kind == "lazy":  # rows start from other random numbers
            moved = found[name] - start[name], state.model()[name] - before[name]
            np.testing.assert_allclose(*moved, atol=2e-3)
        else:
            assert np.array_equal(found[name], state.model()[name])


def test_what_is_added_is_not_stepped_by_a_group():
    """Beside groups, a control variate takes its updates as they are."""
    layout = layout_of("bias", "left")
    state = ServerState.dense(
        layout,
        {name: np.zeros(SHAPES[name], np.float32) for name in ("bias", "left")},
        WithAdded(ByParameter((("left", Adam(0.1)),), SGD(0.5)), ("bias",)),
    )
    keys, leaves = updates_of(np.random.default_rng(1))
    step(state, keys, leaves)
    assert np.array_equal(state.model()["bias"][keys], -leaves["bias"])
    assert np.allclose(np.abs(state.model()["left"][keys]), 0.1, rtol=1e-3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Schedule(decay="cosine"), "no such schedule: .*expected a warmup .*over=STEPS"),
        (lambda: Schedule(over=3), "no such schedule"),
        (lambda: Schedule(decay="exp"), "no such schedule: got warmup=0, decay=exp"),
        (lambda: Scheduled(Momentum(0.1), Schedule(3)), "without schedules: got Momentum"),
        (
            lambda: ByParameter((("lefd", SGD(1.0)),), SGD(1.0)).check(["left", "bias"]),
            "no parameter is left .*got 'lefd'.*did you mean left",
        ),
        (
            lambda: ByParameter((("*", SGD(1.0)), ("left", SGD(1.0))), SGD(1.0)).check(["left"]),
            "no parameter is left .*got 'left'",
        ),
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(InputError, match=said):
        make()
