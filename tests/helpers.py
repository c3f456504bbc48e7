"""What the laws range over: every aggregate, every kind of cut, and strategies for keys and
cohorts.

A new member is added here once and runs through all the laws that concern it.
"""

import importlib.util
import os
import time
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

import keyhole as kh
from keyhole import tree

DIGEST = 4 * "0123456789abcdef"  # of a manifest, in the identifier of a round
ROOT = Path(__file__).parent.parent
LONG = 300.0  # seconds that only what hangs takes, also where 30 others want the same core

AGGREGATES = {
    "sum": kh.aggregate_sum,
    "mean": kh.aggregate_mean,
    "median": kh.aggregate_median,
    "trimmed mean": partial(kh.aggregate_trimmed_mean, trim=0.2),
    "weighted mean": lambda values: kh.aggregate_weighted_mean(
        values, kh.map_clients(lambda _: 2.0, values)
    ),
}

AVERAGES = sorted(AGGREGATES.keys() - {"sum"})


def grid(names, *axes):
    """All combinations of the values of two or more axes, as a mark. In the fast ones each value
    meets one of every shorter axis; the others are slow.

    Args:
        names: of the parameters, as `parametrize` takes them.
        axes: values of each.
    """
    fewest, cells = min(map(len, axes)), []
    for cell in product(*map(enumerate, axes)):
        is_fast = len({place % fewest for place, _ in cell}) == 1
        values = [value for _, value in cell]
        marks = [] if is_fast else [pytest.mark.slow]
        cells.append(pytest.param(*values, marks=marks, id="-".join(map(_name_of, values))))
    return pytest.mark.parametrize(names, cells)


def with_slow(values, fast):
    """The values as parameters; those that are not in `fast` are slow."""
    return [
        value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values
    ]


def _name_of(value):
    if isinstance(value, str | int):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


def zeros(**shapes):
    return {path: np.zeros(shape, np.float32) for path, shape in shapes.items()}


def _layouts():
    """Small models of every kind of cut that the paper and its tasks need."""
    row, column = kh.KeySpace("row", 7), kh.KeySpace("column", 4)
    neuron, second = kh.KeySpace("neuron", 6), kh.KeySpace("second", 5)
    filters, expert = kh.KeySpace("filter", 4), kh.KeySpace("expert", 3)
    word = kh.KeySpace("word", 8)
    return {
        "rows": kh.Layout.of(zeros(w=(7, 3)), kh.Cut(row, {"w": 0})),
        "rows of a bare array": kh.Layout.of(np.zeros((7, 3), np.float32), kh.Cut(row, {".": 0})),
        "coordinates": kh.Layout.of(zeros(w=(7,)), kh.Cut(row, {"w": 0})),
        "rows with a broadcast bias": kh.Layout.of(
            zeros(kernel=(7, 3), bias=(3,)), kh.Cut(row, {"kernel": 0})
        ),
        "columns": kh.Layout.of(zeros(w=(3, 4)), kh.Cut(column, {"w": 1})),
        "neurons in and out": kh.Layout.of(
            zeros(w1=(5, 6), b1=(6,), w2=(6, 2), b2=(2,)),
            kh.Cut(neuron, {"w1": 1, "b1": 0, "w2": 0}),
        ),
        "filters": kh.Layout.of(
            {"conv": zeros(kernel=(3, 3, 2, 4), bias=(4,)), "dense": zeros(kernel=(2, 2, 4, 5))},
            kh.Cut(filters, {"conv/kernel": 3, "conv/bias": 0, "dense/kernel": 2}),
        ),
        "two key spaces": kh.Layout.of(
            zeros(embed=(8, 3), out=(3, 8), ffn_in=(3, 6), ffn_out=(6, 3), norm=(3,)),
            kh.Cut(word, {"embed": 0, "out": 1}),
            kh.Cut(neuron, {"ffn_in": 1, "ffn_out": 0}),
        ),
        "one parameter cut twice": kh.Layout.of(
            zeros(w1=(4, 6), w2=(6, 5), w3=(5, 2)),
            kh.Cut(neuron, {"w1": 1, "w2": 0}),
            kh.Cut(second, {"w2": 1, "w3": 0}),
        ),
        "cut twice, axes apart": kh.Layout.of(
            zeros(w=(5, 2, 6, 3)), kh.Cut(neuron, {"w": 2}), kh.Cut(second, {"w": 0})
        ),
        "experts with a shared part": kh.Layout.of(
            {"experts": [np.zeros((3, 4, 2), np.float32)], "shared": zeros(w=(2, 2))},
            kh.Cut(expert, {"experts/0": 0}),
        ),
        "nothing cut": kh.Layout.of(zeros(w=(3, 2), b=(2,))),
    }


LAYOUTS = _layouts()

SEEDS = st.integers(0, 2**32 - 1)


def key_lists(space, max_size=6):
    """Any keys of one client: unsorted, repeated, none."""
    return st.lists(st.integers(0, space.num_keys - 1), max_size=max_size).map(space.keys)


def client_keys(layout, max_size=5):
    """One client's keys for every key space of a layout."""
    return st.tuples(*(key_lists(space, max_size) for space in layout.spaces))


def whole_numbers(shape, dtype=np.float32):
    """Arrays of small whole numbers: their sums and products are exact in float32."""
    return SEEDS.map(lambda seed: _whole_numbers(np.random.default_rng(seed), shape, dtype))


def model_of(layout, counts=None):
    """A tree of whole numbers: the server's model, or a client's with `counts[space]` keys."""
    counts = counts or {space.name: space.num_keys for space in layout.spaces}

    def build(seed):
        rng = np.random.default_rng(seed)
        leaves = {
            field.path: _whole_numbers(
                rng, field.client_shape([counts[f.name] for f in part.product.factors]), field.dtype
            )
            for part in layout.parts
            for field in part.fields
        }
        return tree.unflatten(layout.structure, leaves)

    return SEEDS.map(build)


def _whole_numbers(rng, shape, dtype):
    return rng.integers(-9, 10, size=shape).astype(dtype)


def counts_of(keys):
    return {k.space.name: len(k) for k in keys}


def asked(layout, cohort):
    """What clients 0, 1, ... ask for, as a delivery takes it: client -> its keys by key space."""
    return {client: layout.keys_by_space(keys) for client, keys in enumerate(cohort)}


def read(client_value):
    """Looks into a client-placed value, as only a test may: client -> value."""
    seen = []
    ids = kh.at_clients({client: client for client in client_value.cohort})
    kh.map_clients(lambda client, value: seen.append((client, value)), ids, client_value)
    return dict(seen)


def assert_trees_equal(found, expected):
    found, expected = tree.flatten(found), tree.flatten(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)
        assert np.asarray(found[path]).dtype == np.asarray(leaf).dtype, path


def assert_trees_close(found, expected, rtol=1e-5, atol=1e-6):
    found, expected = tree.flatten(found), tree.flatten(expected)
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_allclose(found[path], leaf, rtol=rtol, atol=atol, err_msg=path)


def load_example(name):
    """Imports a script of examples/ as a module."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shared_file(name):
    """The path of a file of real data; a test that needs one is skipped where it is not."""
    return _file_beside("KEYHOLE_DATA", "data", name)


def vector_file(name):
    """The path of a file of known answers; a test that needs one is skipped where it is not."""
    return _file_beside("KEYHOLE_VECTORS", "vectors", name)


def eventually(holds, seconds=LONG):
    """Whether something comes to hold."""
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _file_beside(variable, folder, name):
    path = Path(os.environ.get(variable) or ROOT.parent / "shared" / folder) / name
    if not path.is_file():
        pytest.skip(f"{name} is not in the folder {variable}")
    return path
