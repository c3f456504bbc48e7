"""Sketches: sums decode to plain sums, and to nothing else; what cannot be decoded is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.aggregation.masked.sketch import SketchShape, decode, encode
from keyhole.errors import InputError, KeySpaceError, ShapeError, SketchError

SEED = bytes(range(16))
RINGS = [16, 32]


def shape_of(bits=32, num_keys=1000, width=3, max_distinct=50, seed=SEED, **others):
    """With so many spare cells that two keys in fifty share all of theirs once in 10^7 seeds."""
    others = {"max_clients": 20, "spare": 2000} | others
    return SketchShape(num_keys, width, max_distinct, seed, bits, **others)


def rows_of(shape, count, rng):
    return rng.integers(0, 2**shape.bits, (count, shape.width)).astype(shape.dtype)


def plain_sums(shape, clients):
    """Counts and sums of every key, as one writes them down."""
    counts, rows = {}, {}
    for keys, updates in clients:
        for key, update in zip(keys.tolist(), updates, strict=True):
            counts[key] = counts.get(key, 0) + 1
            rows[key] = rows.get(key, np.zeros(shape.width, shape.dtype)) + update
    keys = sorted(counts)
    return keys, [counts[key] for key in keys], [rows[key].tolist() for key in keys]


def added(shape, clients):
    total = np.zeros(shape.length, shape.dtype)
    for keys, rows in clients:
        total += encode(shape, keys, rows)
    return total


def as_lists(decoded):
    return decoded.keys.tolist(), decoded.counts.tolist(), decoded.rows.tolist()


@st.composite
def cohorts(draw):
    """Any clients with any keys, few of them or many in common, and none at all."""
    bits, num_keys = draw(st.sampled_from(RINGS)), draw(st.sampled_from([1, 2, 40, 1000, 10**9]))
    few = st.integers(0, min(num_keys, 12) - 1)
    key = few | st.integers(0, num_keys - 1)
    sets = draw(st.lists(st.lists(key, max_size=6, unique=True), min_size=1, max_size=8))
    shape = shape_of(bits, num_keys, draw(st.integers(1, 4)), min(num_keys, 48))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    keys = [np.array(some, np.int64) for some in sets]
    return shape, [(some, rows_of(shape, len(some), rng)) for some in keys]


# The law


@given(cohorts())
def test_a_sum_of_sketches_decodes_to_the_plain_sums(cohort):
    shape, clients = cohort
    decoded = decode(shape, added(shape, clients), len(clients))
    assert as_lists(decoded) == plain_sums(shape, clients)


@given(cohorts())
def test_what_was_decoded_encodes_to_the_same_sum(cohort):
    shape, clients = cohort
    total = added(shape, clients)
    decoded = decode(shape, total, len(clients))
    heads, rows = shape.parts(np.zeros(shape.length, shape.dtype))
    cells, own = shape.place(decoded.keys)
    for count, row, some, head in zip(decoded.counts, decoded.rows, cells, own, strict=True):
        heads[some] += shape.dtype(count) * head
        rows[some] += row
    np.testing.assert_array_equal(total, np.concatenate([heads.ravel(), rows.ravel()]))


@pytest.mark.parametrize("bits", RINGS)
def test_the_sum_tells_no_more_than_count_and_sum_of_each_key(bits):
    # Two cohorts with other clients, other key sets and other rows, but equal counts and sums.
    shape, rng = shape_of(bits, width=2), np.random.default_rng(0)
    a, b, c = (rows_of(shape, 1, rng) for _ in range(3))
    one = [([1, 2], np.concatenate([a, b])), ([1, 3], np.concatenate([b, c]))]
    other = [([1, 2, 3], np.concatenate([c, b, c])), ([1], a + b - c)]
    totals = [added(shape, [(np.array(k), r) for k, r in some]) for some in (one, other)]
    np.testing.assert_array_equal(*totals)


@pytest.mark.parametrize("bits", RINGS)
def test_a_key_stands_in_its_cells_with_count_and_row_and_nowhere_else(bits):
    shape = shape_of(bits, num_keys=10**6, width=2)
    key, row = np.array([987_654]), np.array([[7, 2**bits - 1]], shape.dtype)
    heads, rows = shape.parts(encode(shape, key, row))
    cells = shape.place(key)[0][0]
    words = heads[cells, 1 : 1 + shape.key_words].astype(int) << (
        np.arange(shape.key_words) * shape.word_bits
    )
    assert (cells // shape.sub_cells).tolist() == [0, 1, 2, 3]  # distinct: one of each sub-table
    assert words.sum(axis=1).tolist() == [987_654] * 4
    assert (heads[cells, 0] == 1).all()
    assert (rows[cells] == row).all()
    assert len(np.unique(heads[cells, 1 + shape.key_words :], axis=0)) == 1
    assert np.count_nonzero(heads[:, 0]) == np.count_nonzero(rows.any(axis=1)) == 4


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("num_keys", [2, 257, 2**16, 2**24 + 1, 2**40])
@pytest.mark.parametrize("clients", [1, 2, 3, 200, 256])
def test_the_largest_key_of_all_clients_does_not_wrap(bits, num_keys, clients):
    shape = shape_of(bits, num_keys, 1, 2, max_clients=clients)
    keys = np.array([num_keys - 1])
    total = encode(shape, keys, np.ones((1, 1), shape.dtype)) * shape.dtype(clients)
    assert as_lists(decode(shape, total, clients)) == ([num_keys - 1], [clients], [[clients]])


@given(st.sampled_from(RINGS), st.integers(1, 2**15 - 1), st.integers(1, 2**40))
def test_words_of_a_key_are_as_long_as_can_be_and_enough(bits, clients, num_keys):
    shape = shape_of(bits, num_keys, 1, 1, max_clients=clients)
    assert (
        (2**shape.word_bits - 1) * clients < 2**bits <= (2 ** (shape.word_bits + 1) - 1) * clients
    )
    assert 2 ** (shape.word_bits * shape.key_words) >= num_keys


@pytest.mark.parametrize("bits", RINGS)
def test_nobody_with_a_key_is_an_empty_sum(bits):
    shape = shape_of(bits)
    decoded = decode(shape, np.zeros(shape.length, shape.dtype), 1)
    assert decoded.keys.shape == (0,)
    assert decoded.rows.shape == (0, shape.width)


def test_decoding_leaves_the_sum_as_it_was():
    shape, rng = shape_of(), np.random.default_rng(1)
    total = encode(shape, np.arange(40), rows_of(shape, 40, rng))
    before = total.copy()
    decode(shape, total, 1)
    np.testing.assert_array_equal(total, before)


def test_cells_and_checks_are_those_of_version_1():
    # Clients and servers of different builds must agree. Recorded once; a change is a new version.
    cells, heads = SketchShape(10**6, 1, 1000, SEED, 32).place(np.array([0, 1, 999_999]))
    assert (cells.tolist(), heads.tolist()) == RECORDED


RECORDED = (
    [[230, 636, 1052, 1250], [196, 377, 859, 1378], [328, 682, 1015, 1337]],
    [[1, 0, 1282474037], [1, 1, 3501703383], [1, 999999, 2102969653]],
)


# What no client sends: refused, nothing of it returned


def forged(shape, key, count=1, cells=None):
    """A sketch with one key as its maker likes it, with the check that belongs to it."""
    sketch = np.zeros(shape.length, shape.dtype)
    heads, _ = shape.parts(sketch)
    own_cells, own = shape.place(np.array([key]))
    heads[own_cells[0] if cells is None else cells] = shape.dtype(count) * own[0]
    return sketch


def honest(shape, count=30):
    return encode(shape, np.arange(count), rows_of(shape, count, np.random.default_rng(2)))


FORGERIES = {
    "a key that is not below num_keys": lambda shape: forged(shape, shape.num_keys),
    "a much larger key": lambda shape: forged(shape, 2**shape.word_bits - 1),
    "a count above the number of clients": lambda shape: forged(shape, 900, count=3),
}


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("forgery", FORGERIES.values(), ids=FORGERIES)
def test_an_impossible_key_or_count_is_refused(bits, forgery):
    shape = shape_of(bits, num_keys=1000)
    with pytest.raises(SketchError, match="a key or a count that no sum of sketches has"):
        decode(shape, honest(shape) + forgery(shape), 2)


@pytest.mark.parametrize("bits", RINGS)
def test_a_key_taken_away_that_nobody_has_is_refused(bits):
    shape = shape_of(bits)
    with pytest.raises(SketchError, match="got 4 of"):
        decode(shape, honest(shape) - forged(shape, 900), 2)


@pytest.mark.parametrize("bits", RINGS)
def test_a_key_that_comes_twice_is_refused(bits):
    # Twice in one of its cells and once in the others: peeled once, it is alone there again.
    shape = shape_of(bits)
    cells = shape.place(np.array([900]))[0][0]
    total = honest(shape) + forged(shape, 900) + forged(shape, 900, cells=cells[3:])
    with pytest.raises(SketchError, match="a key that comes twice"):
        decode(shape, total, 3)


def test_a_key_whose_counts_go_round_the_ring_is_given_up():
    """Taken out of one cell, it is alone in the next, for ever: 5,536 + 30,000 + 30,000 is the size
    of the ring, and the counts are back where they were."""
    shape = shape_of(16, max_clients=30_000, spare=40)
    cells = shape.place(np.array([900]))[0][0]
    total = sum(
        forged(shape, 900, count, cells=cells[[at]])
        for at, count in enumerate([30_000, 60_000, 24_464, 54_464])
    )
    with pytest.raises(SketchError, match="a key that comes twice"):
        decode(shape, total, 30_000)


@pytest.mark.parametrize("bits", RINGS)
def test_a_key_in_a_cell_that_is_not_its_own_is_not_taken_for_one(bits):
    shape = shape_of(bits)
    elsewhere = np.setdiff1d(np.arange(shape.cells), shape.place(np.arange(901))[0])[:1]
    with pytest.raises(SketchError, match=r"does not peel: got 1 of"):
        decode(shape, honest(shape) + forged(shape, 900, cells=elsewhere), 2)


@pytest.mark.parametrize("bits", RINGS)
@pytest.mark.parametrize("missing", range(4))
def test_a_key_that_lacks_a_cell_is_refused(bits, missing):
    shape = shape_of(bits)
    cells = np.delete(shape.place(np.array([900]))[0][0], missing)
    with pytest.raises(SketchError):
        decode(shape, honest(shape) + forged(shape, 900, cells=cells), 2)


@pytest.mark.parametrize("bits", RINGS)
def test_rows_without_a_key_are_refused(bits):
    shape = shape_of(bits)
    total = honest(shape)
    total[-1] += 1
    with pytest.raises(SketchError, match="rows without a key"):
        decode(shape, total, 1)


@pytest.mark.parametrize("bits", RINGS)
def test_a_sum_of_too_many_keys_is_refused(bits):
    shape = shape_of(bits, num_keys=10_000, max_distinct=50, spare=0)
    clients = [np.arange(first, first + 50) for first in range(0, 1000, 50)]
    total = added(shape, [(keys, np.ones((50, 3), shape.dtype)) for keys in clients])
    with pytest.raises(SketchError, match="does not peel"):
        decode(shape, total, 20)


@given(st.sampled_from(RINGS), st.integers(0, 2**32), st.integers(1, 2**16 - 1))
def test_no_single_changed_element_goes_unnoticed(bits, where, change):
    shape = shape_of(bits, max_distinct=30, spare=200)
    total = honest(shape)
    where %= shape.length
    total[where : where + 1] += shape.dtype(change)
    with pytest.raises(SketchError):
        decode(shape, total, 1)


@pytest.mark.parametrize("bits", RINGS)
def test_noise_is_refused_and_the_error_holds_counts_alone(bits):
    shape = shape_of(bits)
    noise = np.random.default_rng(3).integers(0, 2**bits, shape.length).astype(shape.dtype)
    with pytest.raises(SketchError, match=f"of {shape.cells} cells left") as caught:
        decode(shape, noise, 20)
    assert SEED.hex() not in str(caught.value)


def test_records_show_no_keys_and_no_rows():
    shape = shape_of()
    decoded = decode(shape, honest(shape), 1)
    assert repr(decoded) == "Decoded(30 keys)"
    assert str(SEED) not in repr(shape)


# What cannot be encoded, or is no sketch at all


@pytest.mark.parametrize(
    "keys",
    [[-1], [1000], [5, 5], [[1]], [1.0], list(range(51))],
    ids=["negative", "too large", "twice", "of rank 2", "not whole", "too many"],
)
def test_keys_that_a_sketch_cannot_hold_are_refused(keys):
    shape = shape_of()
    with pytest.raises(KeySpaceError, match="keys"):
        encode(shape, np.array(keys), np.ones((len(keys), 3), np.uint32))


@pytest.mark.parametrize(
    "rows", [np.ones((1, 3), np.uint32), np.ones((2, 2), np.uint32), np.ones((2, 3), np.uint16)]
)
def test_rows_that_do_not_fit_are_refused(rows):
    with pytest.raises(ShapeError, match="rows that do not fit"):
        encode(shape_of(), np.array([1, 2]), rows)


def test_a_sum_of_another_length_or_ring_is_refused():
    shape = shape_of()
    for total in (np.zeros(shape.length - 1, np.uint32), np.zeros(shape.length, np.uint16)):
        with pytest.raises(ShapeError, match="a sum that does not fit"):
            decode(shape, total, 1)


@pytest.mark.parametrize("clients", [0, 21])
def test_other_numbers_of_clients_than_there_is_room_for_are_refused(clients):
    shape = shape_of(max_clients=20)
    with pytest.raises(InputError, match="another number of clients"):
        decode(shape, honest(shape), clients)


@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": bytes(15)},
        {"bits": 64},
        {"hashes": 2},
        {"hashes": 7},
        {"expansion": 0.9},
        {"expansion": float("nan")},
        {"max_distinct": 0},
        {"max_distinct": 1001},
        {"num_keys": 2**40 + 1},
        {"width": 0},
        {"max_clients": 0},
        {"max_clients": 2**31},
        {"spare": -1},
    ],
    ids=str,
)
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(InputError, match="the shape of a sketch is invalid"):
        shape_of(**wrong)
