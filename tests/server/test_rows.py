"""Gather, scatter-add and sum of rows are the obvious loops, bit for bit."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError, KeySpaceError, ShapeError
from keyhole.server import rows as module
from keyhole.server.rows import gather_rows, scatter_add_rows, sum_rows

ADDABLE = ("float32", "float64", "int32", "int64")
WIDTHS = (0, 1, 2, 3, 7, 16, 17, 33, 64, 65, 100, 500)  # around 64-byte lines and 256-byte blocks
LARGE = 3 * module._THREAD_FROM  # bytes: streamed, and worth three threads


def gather_by_hand(table, keys):
    out = np.empty((len(keys), table.shape[1]), table.dtype)
    for i, key in enumerate(keys):
        out[i] = table[key]
    return out


def scatter_add_by_hand(table, keys, rows):
    for key, row in zip(keys, rows, strict=True):
        table[key] += row


def same_bits(left, right):
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tobytes() == right.tobytes()
    )


def random_rows(rng, shape, dtype):
    """Any values, of very different sizes, so that another order of adding would show."""
    if np.dtype(dtype).kind == "f":
        return (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(dtype)
    return rng.integers(-(2**30), 2**30, shape).astype(dtype)


def large_job(dtype="float32", width=500):
    """A table beyond two cache parts and rows that repeat its keys more than twice."""
    rng = np.random.default_rng(0)
    num_keys = 2 * module._PART // (width * np.dtype(dtype).itemsize) + 100
    keys = rng.integers(0, num_keys, 5 * num_keys // 2)
    return random_rows(rng, (num_keys, width), dtype), keys


@st.composite
def jobs(draw, dtypes=ADDABLE):
    """A table, keys into it with repeats, and a row for each."""
    num_keys, width = draw(st.integers(1, 20)), draw(st.sampled_from(WIDTHS))
    keys = draw(st.lists(st.integers(0, num_keys - 1), max_size=40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(dtypes))
    table = random_rows(rng, (num_keys, width), dtype)
    return table, np.array(keys, np.int64), random_rows(rng, (len(keys), width), dtype)


@given(jobs(dtypes=(*ADDABLE, "float16", "int8", "uint16", "bool", "complex128")))
def test_gather_is_the_loop_over_keys_for_every_dtype_and_width(job):
    table, keys, _ = job
    assert same_bits(gather_rows(table, keys), gather_by_hand(table, keys))


@given(jobs())
def test_scatter_add_is_the_loop_over_occurrences_bit_for_bit(job):
    table, keys, rows = job
    expected = table.copy()
    scatter_add_by_hand(expected, keys, rows)
    scatter_add_rows(table, keys, rows)
    assert same_bits(table, expected)


@given(jobs())
def test_sum_is_scatter_add_into_zeros_at_the_distinct_keys(job):
    table, keys, rows = job
    expected = np.zeros_like(table)
    scatter_add_by_hand(expected, keys, rows)
    distinct, sums = sum_rows(keys, rows)
    assert same_bits(distinct, np.unique(keys))
    assert same_bits(sums, expected[distinct])


@given(st.lists(st.integers(0, 2**63 - 1), max_size=60), st.integers(1, 9))
def test_sum_takes_any_key_below_2_to_the_63(few, repeats):
    keys = np.array(few * repeats, np.int64)
    distinct, sums = sum_rows(keys, np.ones((len(keys), 1), np.int64))
    expected, counts = np.unique(keys, return_counts=True)
    assert same_bits(distinct, expected)
    assert same_bits(sums[:, 0], counts)


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 2**32))
def test_small_integers_as_floats_sum_exactly_in_any_order(some, seed):
    keys = np.array(some, np.int64)
    values = np.random.default_rng(seed).integers(-9, 9, (len(keys), 3)).astype(np.float32)
    forth, back = np.zeros((6, 3), np.float32), np.zeros((6, 3), np.float32)
    scatter_add_rows(forth, keys, values)
    scatter_add_rows(back, keys[::-1].copy(), values[::-1].copy())
    assert same_bits(forth, back)


def test_deselect_is_the_transpose_of_select():
    rng = np.random.default_rng(1)
    table, rows = rng.integers(-9, 9, (7, 5)) * 1.0, rng.integers(-9, 9, (20, 5)) * 1.0
    keys, added = rng.integers(0, 7, 20), np.zeros((7, 5))
    scatter_add_rows(added, keys, rows)
    assert np.sum(gather_rows(table, keys) * rows) == np.sum(table * added)


def test_sum_turns_a_lone_negative_zero_into_zero_as_zeros_plus_it_do():
    _, sums = sum_rows(np.array([4]), np.array([[-0.0]]))
    assert not np.signbit(sums[0, 0])


@pytest.mark.parametrize("width", [499, 500])  # 500 floats are a multiple of 16 bytes: streamed
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_gathers_in_cache_parts_do_not_depend_on_threads(width, threads):
    table, keys = large_job(width=width)
    assert same_bits(gather_rows(table, keys, threads=threads), table[keys])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_large_gathers_in_order_do_not_depend_on_threads(threads):
    table = np.arange(64 * 1000, dtype=np.float32).reshape(1000, 64)
    keys = np.random.default_rng(2).integers(0, 1000, LARGE // 256)
    assert same_bits(gather_rows(table, keys, threads=threads), table[keys])


@pytest.mark.parametrize(("dtype", "width"), [("float32", 1), ("float32", 64), ("float64", 500)])
def test_large_sums_do_not_depend_on_threads(dtype, width):
    rng = np.random.default_rng(3)
    rows = random_rows(rng, (LARGE // (width * np.dtype(dtype).itemsize), width), dtype)
    keys = rng.zipf(1.3, len(rows)) % 1000
    tables = [np.zeros((1000, width), dtype) for _ in range(4)]
    for threads in (1, 2, 3):
        scatter_add_rows(tables[threads], keys, rows, threads=threads)
        distinct, sums = sum_rows(keys, rows, threads=threads)
        assert same_bits(sums, tables[1][distinct])
    np.add.at(tables[0], keys, rows)
    assert all(same_bits(table, tables[0]) for table in tables)


def test_two_callers_at_once_get_their_own_rows():
    table, keys = large_job(width=64)
    outs = [np.empty((len(keys), 64), np.float32) for _ in range(2)]
    callers = [
        threading.Thread(target=gather_rows, args=(table, keys, out), kwargs={"threads": 2})
        for out in outs
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(same_bits(out, table[keys]) for out in outs)


@pytest.mark.parametrize("offset", range(0, 64, 4))
def test_any_alignment_of_table_and_output_gives_the_same_rows(offset):
    floats = np.arange(16 + 50 * 100, dtype=np.float32)
    table = floats[offset // 4 :][: 50 * 100].reshape(50, 100)
    memory = np.zeros(module._STREAM_FROM + 1024, np.uint8)
    keys = np.arange(module._STREAM_FROM // 400 + 1) % 50
    out = memory[offset : offset + len(keys) * 400].view(np.float32).reshape(-1, 100)
    gather_rows(table, keys, out)
    assert same_bits(out, table[keys])


def test_gather_writes_into_the_given_output_and_returns_it():
    table, out = np.eye(3), np.empty((2, 3))
    assert gather_rows(table, np.array([2, 0]), out) is out
    assert same_bits(out, np.eye(3)[[2, 0]])


@pytest.mark.parametrize("shape", [(0, 3), (5, 0), (0, 0), (5, 3)])
def test_no_keys_give_no_rows_and_change_nothing(shape):
    table, keys = np.ones(shape), np.empty(0, np.int64)
    assert gather_rows(table, keys).shape == (0, shape[1])
    scatter_add_rows(table, keys, np.ones((0, shape[1])))
    assert same_bits(table, np.ones(shape))
    distinct, sums = sum_rows(keys, np.ones((0, shape[1])))
    assert distinct.shape == (0,)
    assert distinct.dtype == np.int64
    assert sums.shape == (0, shape[1])


def test_rows_of_no_columns_keep_their_count():
    keys = np.array([1, 1, 0])
    assert gather_rows(np.ones((2, 0)), keys).shape == (3, 0)
    distinct, sums = sum_rows(keys, np.ones((3, 0)))
    assert distinct.tolist() == [0, 1]
    assert sums.shape == (2, 0)


def test_a_table_of_a_billion_rows_costs_only_the_rows_touched():
    table = np.zeros((10**9, 1), np.int8)  # pages that nobody touches do not exist
    table[[0, 5, 10**9 - 1], 0] = (1, 2, 3)
    assert gather_rows(table, np.array([10**9 - 1, 5, 0, 7]))[:, 0].tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", ">i8"])
def test_keys_of_other_integer_dtypes_are_taken_as_they_are(dtype):
    assert gather_rows(np.eye(3), np.array([2, 1], dtype))[0, 2] == 1.0


def test_read_only_and_strided_inputs_are_read():
    table, keys, rows = np.eye(3), np.array([2, 0, 0, 0])[::2], np.ones((2, 3))
    for array in (table, keys, rows):
        array.flags.writeable = False
    added = np.zeros((3, 3))
    scatter_add_rows(added, keys, rows)
    assert same_bits(gather_rows(table, keys), np.eye(3)[[2, 0]])
    assert added.sum(axis=1).tolist() == [3.0, 0.0, 3.0]


def test_one_row_of_a_strided_table_is_that_row():
    whole = np.arange(12.0).reshape(4, 3)
    row = whole[::2][:1]  # contiguous, although its stride is that of two rows
    assert same_bits(gather_rows(row, np.array([0, 0])), whole[[0, 0]])
    scatter_add_rows(row, np.array([0, 0]), np.ones((2, 3)))
    assert whole[:, 0].tolist() == [2.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize("bad", [-1, -(2**63), 5, 2**63 - 1])
def test_keys_outside_the_table_are_refused_before_anything_is_written(bad):
    table, keys = np.zeros((5, 2)), np.array([0, bad, 4, bad])
    with pytest.raises(KeySpaceError, match=r"got 2 such keys of 4; expected 0\.\.4"):
        gather_rows(table, keys)
    with pytest.raises(KeySpaceError, match="got 2 such keys of 4"):
        scatter_add_rows(table, keys, np.ones((4, 2)))
    assert not table.any()


def test_the_message_holds_no_key_of_a_client():
    with pytest.raises(KeySpaceError) as caught:
        gather_rows(np.zeros((5, 2)), np.array([987654]))
    assert "987654" not in str(caught.value)


def test_negative_keys_are_refused_by_sum():
    with pytest.raises(KeySpaceError, match="got 1 such keys of 2"):
        sum_rows(np.array([3, -1]), np.ones((2, 1)))


def test_any_key_is_outside_an_empty_table():
    with pytest.raises(KeySpaceError, match="the table has no rows"):
        gather_rows(np.zeros((0, 2)), np.array([0]))


@pytest.mark.parametrize("dtype", ["float64", "bool", "uint64", "complex64", "object"])
def test_keys_that_are_not_int64_are_refused(dtype):
    with pytest.raises(KeySpaceError, match=dtype):
        gather_rows(np.eye(3), np.ones(2, dtype))


@pytest.mark.parametrize("keys", [np.array(1), np.array([[1]]), [1]])
def test_keys_that_are_not_a_vector_are_refused(keys):
    with pytest.raises(KeySpaceError, match="keys are not a vector"):
        gather_rows(np.eye(3), keys)


@pytest.mark.parametrize(
    ("table", "claim"),
    [
        (np.ones(3), "not a matrix"),
        (np.ones((3, 3, 3)), "not a matrix"),
        ([[1.0]], "not a matrix"),
        (np.ones((6, 3))[::2], "not C-contiguous"),
        (np.asfortranarray(np.ones((3, 3))), "not C-contiguous"),
        (np.ones((3, 3), object), "holds no numbers"),
    ],
)
def test_tables_that_are_not_whole_rows_of_numbers_are_refused(table, claim):
    with pytest.raises(ShapeError, match=claim):
        gather_rows(table, np.array([0]))


def test_outputs_that_cannot_take_the_rows_are_refused():
    table, keys = np.eye(3), np.array([0, 1])
    read_only = np.empty((2, 3))
    read_only.flags.writeable = False
    outs = {
        "wrong shape": np.empty((3, 3)),
        "wrong dtype": np.empty((2, 3), np.float32),
        "read-only": read_only,
        "overlaps": table[:2],
    }
    for claim, out in outs.items():
        with pytest.raises(ShapeError, match=claim):
            gather_rows(table, keys, out)


def test_tables_and_rows_that_cannot_be_added_are_refused():
    keys, read_only = np.array([0, 1]), np.zeros((3, 2))
    read_only.flags.writeable = False
    cases = [
        ("read-only", read_only, np.ones((2, 2))),
        ("do not fit", np.zeros((3, 2)), np.ones((3, 2))),
        ("do not fit", np.zeros((3, 2)), np.ones((2, 3))),
        ("wrong dtype", np.zeros((3, 2)), np.ones((2, 2), np.float32)),
        ("cannot be added", np.zeros((3, 2), np.float16), np.ones((2, 2), np.float16)),
        ("not C-contiguous", np.zeros((6, 2))[::2], np.ones((2, 2))),
        ("not C-contiguous", np.zeros((3, 2)), np.ones((2, 4))[:, ::2]),
    ]
    for claim, table, rows in cases:
        with pytest.raises(ShapeError, match=claim):
            scatter_add_rows(table, keys, rows)


def test_rows_inside_their_own_table_are_refused():
    table = np.ones((3, 2))
    with pytest.raises(ShapeError, match="overlaps"):
        scatter_add_rows(table, np.array([0, 1]), table[1:])


def test_sum_demands_one_row_for_each_key():
    with pytest.raises(ShapeError, match="do not fit"):
        sum_rows(np.array([1, 2]), np.ones((3, 1)))


def test_fewer_than_one_thread_is_refused():
    with pytest.raises(InputError, match="too few threads"):
        gather_rows(np.eye(3), np.array([0]), threads=0)
