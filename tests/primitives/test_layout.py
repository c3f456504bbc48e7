"""Cuts of the paper's own models: their sizes, slices and bytes."""

import numpy as np
import pytest

import keyhole as kh


def shapes(**leaves):
    return {path: np.zeros(shape, np.float32) for path, shape in leaves.items()}


def cnn():
    """The EMNIST CNN; dense1 is stored (7, 7, 64, 512) so that a filter is one index of one
    axis."""
    filters = kh.KeySpace("filter", 64)
    model = {
        "conv1": shapes(kernel=(5, 5, 1, 32), bias=(32,)),
        "conv2": shapes(kernel=(5, 5, 32, 64), bias=(64,)),
        "dense1": shapes(kernel=(7, 7, 64, 512), bias=(512,)),
        "dense2": shapes(kernel=(512, 62), bias=(62,)),
    }
    axes = {"conv2/kernel": 3, "conv2/bias": 0, "dense1/kernel": 2}
    return kh.Layout.of(model, kh.Cut(filters, axes))


def two_layer():
    """The EMNIST 2NN: neuron k is column k of W1, its bias, and row k of W2."""
    neuron = kh.KeySpace("neuron", 200)
    model = {
        "in": shapes(kernel=(784, 200), bias=(200,)),
        "mid": shapes(kernel=(200, 200), bias=(200,)),
        "out": shapes(kernel=(200, 62), bias=(62,)),
    }
    return kh.Layout.of(model, kh.Cut(neuron, {"in/kernel": 1, "in/bias": 0, "mid/kernel": 0}))


# m -> relative model size, as printed in the paper's Tables 2 and 3.
PAPER_CNN = {4: "0.08", 8: "0.14", 16: "0.26", 32: "0.51", 64: "1.00"}
PAPER_2NN = {10: "0.11", 50: "0.30", 100: "0.53", 200: "1.00"}


@pytest.mark.parametrize(("m", "printed"), PAPER_CNN.items())
def test_the_cnn_has_the_relative_sizes_of_table_2(m, printed):
    layout = cnn()
    assert f"{layout.client_size(filter=m) / layout.server_size:.2f}" == printed
    assert layout.client_size(filter=m) == 33_150 + 25_889 * m


@pytest.mark.parametrize(("m", "printed"), PAPER_2NN.items())
def test_the_2nn_has_the_relative_sizes_of_table_3(m, printed):
    layout = two_layer()
    assert f"{layout.client_size(neuron=m) / layout.server_size:.2f}" == printed
    assert layout.client_size(neuron=m) == 12_662 + 985 * m


def test_a_filter_is_selected_with_its_bias_and_the_weights_it_feeds():
    (_, part) = cnn().parts
    assert {f.path: f.slice_shape for f in part.fields} == {
        "conv2/bias": (),
        "conv2/kernel": (5, 5, 32),
        "dense1/kernel": (7, 7, 512),
    }
    assert part.slice_size == 25_889


def test_slices_are_little_endian_records_in_path_order():
    row = kh.KeySpace("row", 2)
    model = {"b": np.array([1, 2], ">i2"), "a": np.array([[0.5, 2.0], [-1.0, 4.0]], np.float32)}
    (part,) = kh.Layout.of(model, kh.Cut(row, {"a": 0, "b": 0})).parts
    expected = np.array([-1.0, 4.0], "<f4").tobytes() + np.array(2, "<i2").tobytes()
    assert part.pack(part.select_fn(model, 1)) == expected
    assert part.record.itemsize == 10


def test_a_part_cut_twice_is_keyed_by_the_product():
    a, b = kh.KeySpace("a", 3), kh.KeySpace("b", 4)
    layout = kh.Layout.of(shapes(w=(4, 3)), kh.Cut(a, {"w": 1}), kh.Cut(b, {"w": 0}))
    (part,) = layout.parts
    w = np.arange(12.0).reshape(4, 3)
    assert part.space.num_keys == 12
    assert part.select_fn({"w": w}, 2 * 4 + 3)["w"] == w[3, 2]
    assert layout.client_size(a=2, b=3) == 6


def test_what_no_cut_touches_is_a_part_with_one_key():
    broadcast, cut = two_layer().parts
    assert (broadcast.space.num_keys, cut.space.num_keys) == (1, 200)
    assert {f.path for f in broadcast.fields} == {"mid/bias", "out/kernel", "out/bias"}


def test_shapes_alone_make_a_layout():
    import jax

    like = jax.eval_shape(lambda: {"w": jax.numpy.zeros((5, 2))})
    assert kh.Layout.of(like, kh.Cut(kh.KeySpace("row", 5), {"w": 0})).server_size == 10


def test_a_layout_keeps_no_array_of_the_model():
    layout = kh.Layout.of({"a": {"w": np.zeros((5, 2))}}, kh.Cut(kh.KeySpace("row", 5), {"a/w": 0}))
    assert layout.structure == {"a": {"w": "a/w"}}


def test_negative_axes_count_from_the_back():
    row = kh.KeySpace("row", 3)
    model = shapes(w=(2, 3))
    last, named = (kh.Layout.of(model, kh.Cut(row, {"w": axis})) for axis in (-1, 1))
    assert last == named
