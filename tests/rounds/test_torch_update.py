"""A `torch.nn.Module` as a client update: NumPy in, NumPy out, the same bytes for the same seed."""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from keyhole.errors import InputError, ShapeError
from keyhole.rounds.torch_update import TorchUpdate

DATA = np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs keyhole[torch]")


def state_of(module):
    return {name: tensor.numpy().copy() for name, tensor in module.state_dict().items()}


def descend(torch):
    """Three steps towards outputs of one."""

    def train(module, data, generator):
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(3):
            sgd.zero_grad()
            ((module(torch.from_numpy(data)) - 1) ** 2).mean().backward()
            sgd.step()

    return train


def make_with_dropout(torch):
    return torch.nn.Sequential(
        torch.nn.Linear(4, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1)
    )


def same(a, b):
    return all(np.array_equal(a[name], b[name]) for name in a)


def test_an_update_is_start_minus_end(torch):
    slices = {"weight": np.full((1, 4), 3, np.float32), "bias": np.zeros(1, np.float32)}
    update = TorchUpdate(
        lambda slices: torch.nn.Linear(4, 1),
        lambda module, data, generator: module.load_state_dict(
            {"weight": torch.ones(1, 4), "bias": torch.full((1,), 5.0)}
        ),
    )(slices, None, np.random.default_rng(0))
    np.testing.assert_array_equal(update["weight"], np.full((1, 4), 2, np.float32))
    np.testing.assert_array_equal(update["bias"], np.array([-5], np.float32))
    np.testing.assert_array_equal(slices["weight"], np.full((1, 4), 3, np.float32))


def test_a_path_is_the_name_of_a_tensor(torch):
    slices = {"0": {"weight": np.ones((1, 4), np.float32), "bias": np.ones(1, np.float32)}}
    update = TorchUpdate(
        lambda slices: torch.nn.Sequential(torch.nn.Linear(4, 1)),
        lambda module, data, generator: None,
    )(slices, None, np.random.default_rng(0))
    assert {name: not leaf.any() for name, leaf in update["0"].items()} == {
        "weight": True,
        "bias": True,
    }


def test_dropout_draws_the_same_for_the_same_client_alone(torch):
    slices = state_of(make_with_dropout(torch))
    train = TorchUpdate(lambda slices: make_with_dropout(torch), descend(torch))
    first = train(slices, DATA, np.random.default_rng(5))
    torch.rand(1)  # what others draw in between
    assert same(first, train(slices, DATA, np.random.default_rng(5)))
    assert not same(first, train(slices, DATA, np.random.default_rng(6)))


def test_the_generator_draws_the_same_for_the_same_client_alone(torch):
    drawn = []
    train = TorchUpdate(
        lambda slices: torch.nn.Linear(4, 1),
        lambda module, data, generator: drawn.append(torch.rand(3, generator=generator).tolist()),
    )
    for client in (5, 5, 6):
        train(state_of(torch.nn.Linear(4, 1)), None, np.random.default_rng(client))
    first, again, other = drawn
    assert first == again != other


def test_clients_in_threads_make_the_updates_of_clients_in_a_row(torch):
    slices = state_of(make_with_dropout(torch))
    train = TorchUpdate(lambda slices: make_with_dropout(torch), descend(torch))

    def work(client):
        return train(slices, DATA, np.random.default_rng(client))

    with ThreadPoolExecutor(4) as pool:
        at_once = list(pool.map(work, range(40)))
    assert all(same(work(client), update) for client, update in enumerate(at_once))


def test_the_generator_of_the_process_is_left_where_it_was(torch):
    slices = state_of(make_with_dropout(torch))
    before = torch.get_rng_state()
    train = TorchUpdate(lambda slices: make_with_dropout(torch), descend(torch))
    train(slices, DATA, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_statistics_of_a_module_are_arrays_of_their_dtype(torch):
    def make(slices=None):
        return torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))

    slices = state_of(make())
    update = TorchUpdate(make, descend(torch))(slices, DATA, np.random.default_rng(0))
    assert {name: (type(a), a.dtype, a.shape) for name, a in update.items()} == {
        name: (np.ndarray, a.dtype, a.shape) for name, a in slices.items()
    }
    assert update["1.num_batches_tracked"] == -3  # one a step, start minus end


def test_a_module_in_bfloat16_makes_an_update_of_the_slices_dtype(torch):
    slices = state_of(torch.nn.Linear(4, 1))
    update = TorchUpdate(
        lambda slices: torch.nn.Linear(4, 1), lambda module, data, generator: module.bfloat16()
    )(slices, None, np.random.default_rng(0))
    assert update["weight"].dtype == np.float32
    # bfloat16 keeps 8 bits of a number: rounding moves it by at most 2**-8 of its size
    assert (np.abs(update["weight"]) <= np.abs(slices["weight"]) * 2**-8).all()


@pytest.mark.parametrize("when", ["made", "trained"])
def test_a_module_of_another_shape_is_refused(torch, when):
    def widen(module, data, generator):
        module.weight = torch.nn.Parameter(torch.zeros(2, 4))

    slices = state_of(torch.nn.Linear(4, 1))
    update = TorchUpdate(
        lambda slices: torch.nn.Linear(4, 2 if when == "made" else 1),
        widen,
    )
    with pytest.raises(ShapeError, match=r"(weight|bias) of shape \(2"):
        update(slices, None, np.random.default_rng(0))


def test_state_that_is_no_tensor_is_refused(torch):
    class Noted(torch.nn.Linear):
        def get_extra_state(self):
            return {"note": 1}

    update = TorchUpdate(lambda slices: Noted(4, 1), lambda module, data, generator: None)
    with pytest.raises(ShapeError, match="_extra_state"):
        update(state_of(torch.nn.Linear(4, 1)), None, np.random.default_rng(0))


def test_without_torch_one_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"keyhole\[torch\]"):
        TorchUpdate(lambda slices: None, lambda module, data, generator: None)
