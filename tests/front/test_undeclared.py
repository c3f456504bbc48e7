"""A column that names keys and is not declared is found, and a softmax is not taken for one."""

import jax.numpy as jnp
import numpy as np
import pytest

import keyhole as kh
from keyhole.errors import InputError

ITEM = kh.KeySpace("item", 40)


def score(params, batch):
    found = params["w"][batch["item"]] + params["b"]
    if "seen" in batch:
        found = found + params["w"][batch["seen"]]
    if "age" in batch:  # reads rows that its numbers do not name
        found = found + params["w"][(7 * batch["age"] + 1) % 40]
    return found


def squares(params, batch, mask):
    return jnp.where(mask, (score(params, batch) - batch["label"]) ** 2, 0).sum()


def over_all(params, batch, mask):
    """A softmax over all keys, in which the class is no key that is looked up."""
    logits = params["w"][None, :] + params["w"][batch["item"]][:, None]
    chosen = jnp.take_along_axis(logits, batch["class"][:, None], 1)[:, 0]
    return jnp.where(mask, jnp.log(jnp.exp(logits).sum(1)) - chosen, 0).sum()


def make_task(loss=squares, inputs=("item",), **columns):
    model = kh.jax.Model(
        init=lambda seed: {"w": np.full(40, 0.1, np.float32), "b": np.zeros(1, np.float32)},
        loss=loss,
        predict=score,
        cuts=(kh.Cut(ITEM, {"w": 0}),),
    )
    rng = np.random.default_rng(0)
    people = {
        f"u{n}": {
            "item": rng.integers(40, size=12),
            "label": rng.random(12, np.float32),
            **{name: rng.integers(high, size=12) for name, high in columns.items()},
        }
        for n in range(6)
    }
    data = kh.data.from_dict(people, inputs=dict.fromkeys(inputs, "item"), target="label")
    return kh.Task(model, data.hold_out(0.3))


def train(task):
    return kh.train(task, rounds=1, cohort=2, m=40, progress=False)


@pytest.mark.parametrize("high", [40, 4], ids=["any", "those of small numbers"])
def test_a_second_column_of_keys_is_found(high):
    with pytest.raises(InputError, match=r"column 'seen' names keys of 'item' and is not .*'w'"):
        train(make_task(seen=high))


def test_declared_columns_other_numbers_and_classes_of_a_softmax_are_none():
    assert train(make_task(inputs=("item", "seen"), seen=40)).rounds == 1
    assert train(make_task(age=40)).rounds == 1
    assert train(make_task(loss=over_all, **{"class": 40})).rounds == 1
