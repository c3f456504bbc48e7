"""Parameters that a server adds updates to as they are, beside those that an optimizer steps."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.server.optimizers import SGD, Adam, Momentum, WithAdded, Yogi
from keyhole.server.row_sums import RowUpdate, no_update
from keyhole.server.state import ServerState
from keyhole.server.store import create_store, recover
from tests.helpers import load_example

WORD = kh.KeySpace("word", 20)
MODEL = {
    "a": np.ones((20, 2), np.float32),
    "c": {"x": np.ones(20, np.float32), "y": np.ones(3, np.float32)},
    "w": np.ones((20, 3), np.float32),
}
LAYOUT = kh.Layout.of(MODEL, kh.Cut(WORD, {"a": 0, "c/x": 0, "w": 0}))
INNER = [SGD(0.3), Momentum(0.1), Adam(0.01), Yogi(0.01, initial=0.5)]


def updates(seed):
    rng = np.random.default_rng(seed)
    keys = np.sort(rng.choice(20, 6, replace=False))
    for part in LAYOUT.parts:
        own = keys if part.product.factors else np.zeros(1, np.int64)
        yield RowUpdate(own, rng.normal(size=(len(own), part.slice_size)).astype(np.float32))


def stepped(optimizer, steps=5, lazy=False):
    make = (
        ServerState.lazy(LAYOUT, optimizer) if lazy else ServerState.dense(LAYOUT, MODEL, optimizer)
    )
    for seed in range(steps):
        make.step(list(updates(seed)))
    return make.model()


@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("inner", INNER, ids=lambda each: type(each).__name__)
def test_added_parameters_are_subtracted_and_the_others_stepped(inner, is_lazy):
    both = stepped(WithAdded(inner, ("c",)), lazy=is_lazy)
    alone, sums = stepped(inner, lazy=is_lazy), stepped(SGD(1.0), lazy=is_lazy)
    for name in ("a", "w"):
        assert both[name].tobytes() == alone[name].tobytes()
    for name in ("x", "y"):
        np.testing.assert_allclose(both["c"][name], sums["c"][name], rtol=1e-6)


def test_added_parameters_are_stored_and_recovered(tmp_path):
    optimizer = WithAdded(Adam(0.01), ("c/x",))
    state = ServerState.dense(LAYOUT, MODEL, optimizer)
    store = create_store(tmp_path, state)
    store.commit(state, tuple(updates(0)))
    store.snapshot(state)
    store.commit(state, tuple(updates(1)))
    store.close()
    found = recover(tmp_path, LAYOUT, optimizer=optimizer)
    found.store.close()
    assert found.state.model()["c"]["x"].tobytes() == state.model()["c"]["x"].tobytes()
    assert found.state.model()["w"].tobytes() == state.model()["w"].tobytes()
    found.state.step([no_update(part) for part in LAYOUT.parts])


def test_a_model_that_adds_to_no_parameter_of_its_own_is_refused():
    example = load_example("scaffold")
    task = kh.Task(type("Mistaken", (example.Scaffold,), {"added": ("cc",)})(), example.make_data())
    made = Experiment(task.defaults, task.data, {"task": task.kind})
    with pytest.raises(InputError, match=r"no parameter 'cc'.*did you mean c"):
        _ = made.algorithm
