"""Assembly: what is left of a sub-model when slices are missing is a sub-model."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole.delivery.records import PLAIN, assemble, keep_found, records_of
from keyhole.primitives.layout import max_keys_of
from tests.helpers import LAYOUTS, assert_trees_equal, client_keys, model_of


def records_for(layout, model, keys):
    """The records of each part, in the order of its keys."""
    found = []
    for part, records in zip(layout.parts, records_of(layout, PLAIN), strict=True):
        z = part.keys_of(keys).array
        rows = part.to_rows(kh.tree.flatten(model))[z]
        found.append(records.encode_rows(rows, z))
    return found


@given(name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_what_is_left_is_what_the_kept_keys_select(name, data):
    layout = LAYOUTS[name]
    model, keys = data.draw(model_of(layout)), data.draw(client_keys(layout))
    chosen = layout.keys_by_space(keys)
    found = records_for(layout, model, chosen)
    lost = {
        space: data.draw(st.sets(st.sampled_from(z.array.tolist()))) if len(z) else set()
        for space, z in chosen.items()
    }
    is_found, gone = [], {space: set() for space in chosen}
    for part, records in zip(layout.parts, found, strict=True):
        there = np.ones(len(records), bool)
        if part.product.factors:
            first = part.product.factors[0].name
            own = part.product.split(part.keys_of(chosen))[0].array
            there = ~np.isin(own, list(lost[first]))
            gone[first] |= set(own[~there].tolist())
        is_found.append(there)
    records, left = keep_found(layout, found, is_found, chosen)
    for space, z in chosen.items():
        assert left[space].array.tolist() == [k for k in z.array.tolist() if k not in gone[space]]
    submodel = assemble(layout, records_of(layout, PLAIN), records, left)
    assert_trees_equal(submodel, layout.select(model, list(left.values())))


def test_the_most_keys_of_a_part_are_those_of_its_key_spaces_together():
    layout = LAYOUTS["one parameter cut twice"]  # neuron of 6, second of 5, and their product
    assert max_keys_of(layout, {"neuron": 2, "second": 3}) == [2, 3, 6]
    assert max_keys_of(layout, {"neuron": 99, "second": 99}) == [6, 5, 30]
