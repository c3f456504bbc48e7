"""Laws of select: Eq. 4 and its limit cases."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree
from tests.helpers import (
    LAYOUTS,
    assert_trees_equal,
    client_keys,
    counts_of,
    key_lists,
    model_of,
    read,
    whole_numbers,
)

ROW = kh.KeySpace("row", 7)
COHORTS = st.lists(key_lists(ROW), max_size=4).map(kh.at_clients)


def pick_row(x, k):
    return x[k]


@given(whole_numbers((7, 3)), COHORTS)
def test_each_client_receives_its_rows_in_its_order_with_repeats(x, keys):
    received = read(kh.select(kh.at_server(x), keys, pick_row))
    for client, z in read(keys).items():
        np.testing.assert_array_equal(received[client], [x[k] for k in z] or [])


@given(whole_numbers((7, 3)), key_lists(ROW), st.randoms())
def test_permuting_keys_permutes_slices(x, z, random):
    order = random.sample(range(len(z)), len(z))
    permuted = ROW.keys(z.array[order])
    (slices,) = read(kh.select(kh.at_server(x), kh.at_clients([z]), pick_row)).values()
    (shuffled,) = read(kh.select(kh.at_server(x), kh.at_clients([permuted]), pick_row)).values()
    np.testing.assert_array_equal(shuffled, [slices[i] for i in order] or [])


@given(whole_numbers((7, 3)), COHORTS)
def test_a_constant_select_function_is_a_broadcast(x, keys):
    one_each = kh.map_clients(lambda _: ROW.keys([0]), keys)
    selected = kh.select(kh.at_server(x), one_each, lambda x, _: x)
    everyone = read(kh.broadcast(kh.at_server(x), to=keys))
    assert_trees_equal(
        {str(c): slices[0] for c, slices in read(selected).items()},
        {str(c): value for c, value in everyone.items()},
    )


@given(whole_numbers((7, 3)), COHORTS)
def test_select_is_generalized_select_with_a_list_of_slices(x, keys):
    by_keys = read(kh.select(kh.at_server(x), keys, pick_row))
    by_value = read(kh.generalized_select(kh.at_server(x), keys, lambda x, z: [x[k] for k in z]))
    assert by_keys.keys() == by_value.keys()
    for client in by_keys:
        np.testing.assert_array_equal(by_keys[client], by_value[client])


def test_generalized_select_takes_values_that_are_not_keys():
    scaled = kh.generalized_select(
        kh.at_server(np.arange(3.0)), kh.at_clients([2.0, -1.0]), lambda x, z: x * z
    )
    assert_trees_equal(read(scaled)[1], -np.arange(3.0))


@given(whole_numbers((7,)), COHORTS, st.sets(st.integers(0, 3)))
def test_clients_that_drop_before_select_receive_nothing(x, keys, gone):
    gone &= set(keys.cohort)
    received = kh.select(kh.at_server(x), keys.drop(gone), pick_row)
    assert set(received.lost) == gone


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_a_layout_selects_what_indexing_each_axis_selects(name, data):
    layout = LAYOUTS[name]
    x, keys = data.draw(model_of(layout)), data.draw(client_keys(layout))
    leaves, chosen = tree.flatten(x), {k.space.name: k.array for k in keys}
    expected = {}
    for part in layout.parts:
        for field in part.fields:
            value = leaves[field.path]
            for axis, factor in zip(field.axes, part.product.factors, strict=True):
                value = np.take(value, chosen[factor.name], axis=axis)
            expected[field.path] = value
    assert_trees_equal(tree.flatten(layout.select(x, keys)), expected)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_selecting_all_keys_returns_the_server_model(name, data):
    layout = LAYOUTS[name]
    x = data.draw(model_of(layout))
    assert_trees_equal(layout.select(x, [s.all_keys() for s in layout.spaces]), x)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_client_size_counts_the_numbers_of_the_submodel(name, data):
    layout = LAYOUTS[name]
    keys = data.draw(client_keys(layout))
    submodel = layout.select(data.draw(model_of(layout)), keys)
    leaves = tree.flatten(submodel).values()
    assert layout.client_size(**counts_of(keys)) == sum(leaf.size for leaf in leaves)
    assert layout.client_bytes(**counts_of(keys)) == sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("name", LAYOUTS)
@given(data=st.data())
def test_packed_slices_come_back(name, data):
    layout = LAYOUTS[name]
    x = data.draw(model_of(layout))
    for part in layout.parts:
        key = data.draw(st.integers(0, part.space.num_keys - 1))
        piece = part.select_fn(x, key)
        packed = part.pack(piece)
        assert len(packed) == part.record.itemsize
        assert_trees_equal(part.unpack(packed), piece)


def test_keys_stay_read_only_on_their_way_to_another_process():
    again = pickle.loads(pickle.dumps(keys := ROW.keys([3, 1])))
    assert again == keys
    assert not again.array.flags.writeable
