"""Records: the bytes of slices, plain and coded, equal to the transformed select functions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.delivery.clear import Broadcast, OnDemand, Pregenerated
from keyhole.delivery.records import Coding, RecordField, Records, records_of
from keyhole.delivery.sources import FunctionSource, sources_of
from keyhole.errors import InputError, NotFiniteError, ShapeError
from keyhole.primitives.coding import HalfPrecision, Quantized, decode
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from tests.helpers import LAYOUTS, asked, assert_trees_equal, client_keys, grid, model_of

TRANSFORMS = {
    "plain": lambda psi, seed: psi,
    "half": lambda psi, seed: HalfPrecision(psi),
    "uint8": lambda psi, seed: Quantized(psi, bits=8, seed=seed),
    "uint4": lambda psi, seed: Quantized(psi, bits=4, seed=seed),
}
KIND = pytest.mark.parametrize("kind", TRANSFORMS)


@grid("kind, name", TRANSFORMS, LAYOUTS)
@given(data=st.data())
def test_a_record_stands_for_what_the_select_function_returns(kind, name, data):
    layout = LAYOUTS[name]
    x = data.draw(model_of(layout))
    seed = data.draw(st.integers(0, 2**32))
    for part in layout.parts:
        records = Records.of_part(part, Coding(kind, seed))
        psi = TRANSFORMS[kind](part.select_fn, seed)
        keys = np.array(data.draw(st.lists(st.integers(0, part.space.num_keys - 1), max_size=4)))
        keys = keys.astype(np.int64)
        rows = ServerState.dense(layout, x, SGD(1.0)).rows(layout.parts.index(part), keys)
        coded = records.encode_rows(rows, keys)
        assert coded.shape == (len(keys), records.record_bytes)
        slices = records.decode(coded)
        for place, key in enumerate(keys):
            found = {path: array[place] for path, array in slices.items()}
            assert_trees_equal(found, decode(psi(x, int(key))))
            if kind == "plain":
                assert coded[place].tobytes() == part.pack(part.select_fn(x, int(key)))


@grid("kind, way", TRANSFORMS, [Broadcast, OnDemand, Pregenerated])
@given(data=st.data())
def test_every_way_delivers_the_same_coded_slices(way, kind, data):
    layout = LAYOUTS["neurons in and out"]
    state = ServerState.dense(layout, data.draw(model_of(layout)), SGD(1.0))
    z = data.draw(client_keys(layout))
    received = way(Coding(kind, 5)).deliver(state, asked(layout, [z])).submodels[0]
    chosen = layout.keys_by_space(z)
    for source, part in zip(sources_of(state, Coding(kind, 5)), layout.parts, strict=True):
        rows = source.records.decode_rows(source.read(part.keys_of(chosen).array))
        expected = part.from_rows(rows, [len(chosen[f.name]) for f in part.product.factors])
        assert_trees_equal({path: received[path] for path in expected}, expected)


def test_what_everyone_receives_stays_plain():
    layout = LAYOUTS["rows with a broadcast bias"]
    kinds = {r.name: r.coding.kind for r in records_of(layout, Coding("uint4"))}
    assert kinds == {"everyone": "plain", "row": "uint4"}


def test_coded_slices_cost_their_bytes():
    layout = LAYOUTS["rows with a broadcast bias"]  # 7 rows of 3, a bias of 3
    state = ServerState.dense(
        layout, {"kernel": np.ones((7, 3), "f4"), "bias": np.ones(3, "f4")}, SGD(1.0)
    )
    keys = asked(layout, [layout.spaces[0].keys([1, 2])])
    cost = OnDemand(Coding("uint8")).deliver(state, keys).cost
    assert dict(cost.bytes_down) == {0: 2 * (3 + 8) + 3 * 4}
    cost = Broadcast(Coding("uint4")).deliver(state, keys).cost
    assert dict(cost.bytes_down) == {0: 7 * (2 + 8) + 3 * 4}


@KIND
def test_slices_of_whole_numbers_and_doubles_come_back_in_their_dtype(kind):
    fields = (RecordField("a", (2,), np.dtype("i8")), RecordField("b", (), np.dtype("f8")))
    records = Records("row", 4, fields, Coding(kind))
    slices = {"a": np.array([[0, 15], [3, 3]]), "b": np.array([0.5, 1.5])}
    source = FunctionSource(records, slices, lambda x, z: {p: a[z] for p, a in x.items()})
    assert_trees_equal(records.decode(source.read(np.array([0, 1]))), slices)


def test_numbers_beyond_the_format_are_refused():
    records = Records("row", 4, (RecordField("a", (1,), np.dtype("f4")),), Coding("half"))
    with pytest.raises(NotFiniteError):
        records.encode({"a": np.array([[1e6]], "f4")}, np.array([0]))


def test_bytes_of_another_length_are_no_records():
    records = Records("row", 4, (RecordField("a", (1,), np.dtype("f4")),))
    with pytest.raises(ShapeError, match="not records of 'row'"):
        records.decode(np.zeros((2, 5), np.uint8))


def test_an_unknown_coding_is_refused():
    with pytest.raises(InputError, match="no such coding"):
        Coding("zip")
