"""Law: padding a client changes nothing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import tree
from keyhole.primitives.coding import count_slots, resize_submodel, slot_masks
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, counts_of, model_of


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_whatever_stands_in_the_padding_is_cut_off(name, data):
    layout = LAYOUTS[name]
    keys = data.draw(client_keys(layout))
    counts = counts_of(keys)
    sizes = {name: m + data.draw(st.integers(0, 3)) for name, m in counts.items()}
    submodel = layout.select(data.draw(model_of(layout)), keys)
    padded = resize_submodel(layout, submodel, sizes)
    assert count_slots(layout, padded) == sizes
    masks = slot_masks(counts, sizes)
    spoiled = tree.unflatten(layout.structure, dict(_spoil(layout, padded, masks)))
    assert_trees_equal(resize_submodel(layout, spoiled, counts), submodel)


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
    """Scores over padded features: the padding meets zeros only."""
    layout = LAYOUTS["rows with a broadcast bias"]
    keys = data.draw(client_keys(layout))
    y = layout.select(data.draw(model_of(layout)), keys)
    m = counts_of(keys)["row"]
    x = np.arange(2 * m, dtype=np.float32).reshape(2, m)
    padded = resize_submodel(layout, y, {"row": 9})
    update = _step(padded, np.pad(x, ((0, 0), (0, 9 - m))))
    assert_trees_equal(
        layout.deselect(resize_submodel(layout, update, {"row": m}), keys),
        layout.deselect(_step(y, x), keys),
    )


def _step(model, x):
    error = np.clip(x @ model["kernel"] + model["bias"], -1, 1)
    return {"kernel": x.T @ error, "bias": error.sum(axis=0)}


def test_masks_mark_the_slots_that_hold_a_slice():
    assert slot_masks({"row": 2}, {"row": 4})["row"].tolist() == [True, True, False, False]


def test_a_submodel_of_the_right_size_is_not_copied():
    submodel = {"w": np.zeros((2, 3), np.float32)}
    assert resize_submodel(LAYOUTS["rows"], submodel, {"row": 2})["w"] is submodel["w"]
