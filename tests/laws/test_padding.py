"""Law: padding a client changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import tree
from keyhole.errors import ShapeError
from keyhole.primitives.padding import key_masks, pad_submodel, unpad_submodel
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, counts_of, model_of


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_whatever_stands_in_the_padding_is_cut_off(name, data):
    layout = LAYOUTS[name]
    keys = data.draw(client_keys(layout))
    sizes = {k.space.name: len(k) + data.draw(st.integers(0, 3)) for k in keys}
    submodel = layout.select(data.draw(model_of(layout)), keys)
    padded = pad_submodel(layout, submodel, keys, **sizes)
    masks = key_masks(layout, keys, **sizes)
    spoiled = tree.unflatten(layout.structure, dict(_spoil(layout, padded, masks)))
    assert_trees_equal(unpad_submodel(layout, spoiled, keys), submodel)


def _spoil(layout, padded, masks):
    """Writes NaN wherever a mask says that there is no slice."""
    for part in layout.parts:
        for field in part.fields:
            leaf = tree.get(padded, field.path).copy()
            for axis, factor in zip(field.axes, part.product.factors, strict=True):
                np.moveaxis(leaf, axis, 0)[~masks[factor.name]] = np.nan
            yield field.path, leaf


@given(data=st.data())
def test_a_step_on_a_padded_client_gives_the_update_of_the_bare_one(data):
    """Logistic scores over padded features: the padding meets zeros only."""
    layout = LAYOUTS["rows with a broadcast bias"]
    keys = data.draw(client_keys(layout))
    y = layout.select(data.draw(model_of(layout)), keys)
    m = counts_of(keys)["row"]
    x = np.arange(2 * m, dtype=np.float32).reshape(2, m)
    padded = pad_submodel(layout, y, keys, row=9)
    update = unpad_submodel(layout, _step(padded, np.pad(x, ((0, 0), (0, 9 - m)))), keys)
    assert_trees_equal(layout.deselect(update, keys), layout.deselect(_step(y, x), keys))


def _step(model, x):
    error = np.clip(x @ model["kernel"] + model["bias"], -1, 1)
    return {"kernel": x.T @ error, "bias": error.sum(axis=0)}


def test_a_size_below_the_number_of_keys_is_refused():
    layout = LAYOUTS["rows"]
    keys = layout.spaces[0].keys([1, 2, 3])
    submodel = {"w": np.zeros((3, 3), np.float32)}
    with pytest.raises(ShapeError, match="got 2, allowed is 3 or more"):
        pad_submodel(layout, submodel, keys, row=2)


def test_masks_mark_the_slots_that_hold_a_slice():
    layout = LAYOUTS["rows"]
    masks = key_masks(layout, layout.spaces[0].keys([6, 6]), row=4)
    assert masks["row"].tolist() == [True, True, False, False]


def test_an_update_that_never_was_padded_is_refused_when_too_short():
    layout = LAYOUTS["rows"]
    with pytest.raises(ShapeError, match="does not fit the cuts"):
        unpad_submodel(layout, {"w": np.zeros((1, 3))}, layout.spaces[0].keys([1, 2]))


def test_padding_needs_no_size_for_a_space_that_is_left_alone():
    layout = LAYOUTS["two key spaces"]
    word, neuron = (space.keys([1]) for space in layout.spaces)
    padded = pad_submodel(
        layout, layout.select(_ones(layout), (word, neuron)), (word, neuron), word=3
    )
    assert padded["embed"].shape == (3, 3)
    assert padded["ffn_in"].shape == (3, 1)


def _ones(layout):
    leaves = {f.path: np.ones(f.shape, f.dtype) for part in layout.parts for f in part.fields}
    return tree.unflatten(layout.structure, leaves)
