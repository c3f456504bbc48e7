"""Optimizers by parameter in a run: what the record says, and runs that go on to the same bytes."""

import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError
from keyhole.rounds.algorithms import with_groups
from keyhole.rounds.spec import ServerSpec
from keyhole.server.groups import Schedule, Scheduled
from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum

LAYOUT = kh.Layout.of({"items": {"w": np.zeros(4, np.float32)}, "out": np.zeros(2, np.float32)})


def read(text, rest=None, **server):
    told = ServerSpec(**{"lr": 0.5, "parameters": text} | server)
    return with_groups(told, rest or SGD(0.5), LAYOUT)


def test_a_group_has_the_runs_settings_where_it_says_nothing():
    found = read("items/*=adam,b2=0.999 out=lr=0.125", eps=0.25)
    assert found.groups == (("items/*", Adam(0.5, 0.9, 0.999, 0.25)), ("out", SGD(0.125)))
    found = read("out=warmup=3,decay=linear,over=7 *=momentum,beta=0.5", Adagrad(0.5))
    assert found.groups[0][1] == Scheduled(Adagrad(0.5), Schedule(3, "linear", 7))
    assert found.groups[1][1] == Momentum(0.5, 0.5)
    assert read("  ") == SGD(0.5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("items", "a group of parameters cannot be read: got 'items'"),
        ("out=", "a group of parameters cannot be read"),
        ("out=adm", "no such optimizer .*got 'adm'.*did you mean adam"),
        ("out=adam,beta=1", "Adam has no setting .*'out': got 'beta'.*expected lr, b1"),
        ("out=sgd,lr=fast", "setting of the parameters 'out' cannot be read: got 'lr=fast'"),
        ("out=sgd,lr=0", "optimizer setting lr is out of range: got 0.0"),
        ("output=sgd", "no parameter is left .*got 'output'; expected some of items/w, out"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_group(text, said):
    with pytest.raises(InputError, match=said):
        read(text)


def make_task():
    item = kh.KeySpace("item", 12)

    def loss(params, batch, mask):
        score = params["w"][batch["item"]] + params["b"]
        return (mask.astype("float32") * (score - batch["label"]) ** 2).sum()

    model = kh.jax.Model(
        init=lambda seed: {"w": np.zeros(12, np.float32), "b": np.zeros((), np.float32)},
        loss=loss,
        predict=lambda params, batch: params["w"][batch["item"]] + params["b"],
        cuts=(kh.Cut(item, {"w": 0}),),
    )
    rng = np.random.default_rng(0)
    people = {
        f"p{n}": {"item": rng.integers(12, size=6), "label": rng.random(6, np.float32)}
        for n in range(8)
    }
    data = kh.data.from_dict(people, inputs={"item": "item"}, target="label")
    return kh.Task(model, data.hold_out(0.3))


def test_a_run_goes_on_to_the_same_bytes_and_only_with_the_same_groups(tmp_path):
    task, usual = make_task(), {"cohort": 4, "m": 4, "progress": False}
    usual["server_parameters"] = "w=adam,lr=0.05,warmup=3 b=lr=0.1"
    whole = kh.train(task, rounds=6, **usual).model()
    kh.train(task, rounds=3, out=tmp_path / "run", **usual)
    again = kh.train(task, rounds=6, out=tmp_path / "run", **usual)
    assert all(np.array_equal(again.model()[name], whole[name]) for name in whole)
    assert again.spec.describe()["server"]["parameters"] == usual["server_parameters"]
    plain = kh.train(task, rounds=6, **{**usual, "server_parameters": ""}).model()
    assert not np.array_equal(plain["w"], whole["w"])
    with pytest.raises(kh.KeyholeError, match="parameters"):
        kh.train(
            task,
            rounds=7,
            out=tmp_path / "run",
            **{**usual, "server_parameters": "w=adam,lr=0.06,warmup=3 b=lr=0.1"},
        )
