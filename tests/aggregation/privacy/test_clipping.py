"""Clipping: no update that comes out is longer than C, whatever went in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import keyhole as kh
from keyhole.aggregation.base import ClientResult, rows_of
from keyhole.aggregation.privacy.mechanism import clip_update, norm_before_rounding
from keyhole.errors import InputError, NotFiniteError, ShapeError
from keyhole.server.inputs import clip, norm


def floats(dtype):
    width = np.dtype(dtype).itemsize * 8
    return hnp.arrays(
        dtype,
        hnp.array_shapes(min_dims=1, max_dims=2, max_side=6),
        elements=st.floats(width=width, allow_nan=False, allow_infinity=False),
    )


def length(tree):
    """The slow twin: one long vector of Python's numbers."""
    flat = np.concatenate([np.ravel(leaf).astype(np.longdouble) for leaf in tree.values()])
    return np.sqrt(np.sum(flat**2))


@settings(max_examples=40)
@given(
    st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
        lambda dtype: st.fixed_dictionaries({"bias": floats(dtype), "rows": floats(dtype)})
    ),
    st.floats(min_value=1e-300, max_value=1e300),
)
def test_no_clipped_update_is_longer_than_the_bound(update, limit):
    clipped = clip(update, limit)
    assert norm(clipped) <= limit
    assert all(clipped[name].dtype == update[name].dtype for name in update)


@settings(max_examples=40)
@given(
    st.fixed_dictionaries({"bias": floats(np.float32), "rows": floats(np.float32)}),
    st.fixed_dictionaries({"bias": floats(np.float32)}),
)
def test_one_client_moves_a_sum_by_no_more_than_the_bound(update, other):
    """Add-or-remove: C. Replace-one: 2 C."""
    a, b = clip(update, 1.0), clip(other, 1.0)
    whole = np.zeros(200)
    for tree, sign in ((a, 1), (b, -1)):
        flat = np.concatenate([np.ravel(leaf) for leaf in tree.values()])
        whole[: len(flat)] += sign * flat
    assert np.linalg.norm(whole) <= 2 * (1 + 1e-12)


@settings(max_examples=40)
@given(st.fixed_dictionaries({"bias": floats(np.float32), "rows": floats(np.float32)}))
def test_the_norm_is_that_of_one_long_vector(update):
    assert norm(update) == pytest.approx(float(length(update)), rel=1e-12)


def test_broadcast_and_selected_parts_are_clipped_together():
    update = {"bias": np.array([3.0]), "rows": np.array([[0.0, 4.0]])}
    clipped = clip(update, 2.5)
    np.testing.assert_allclose(clipped["bias"], [1.5], rtol=1e-5)
    np.testing.assert_allclose(clipped["rows"], [[0.0, 2.0]], rtol=1e-5)


@pytest.mark.parametrize("limit", [5.0, 7.0, np.inf])
def test_an_update_that_is_short_enough_stays_bit_for_bit(limit):
    update = {"a": np.array([3.0, 0.1], np.float32), "b": [np.array([4.0]), None]}
    clipped = clip(update, limit + 0.01)
    assert clipped["a"] is update["a"]
    assert clipped["b"][0] is update["b"][0]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("first", [True, False])
def test_an_update_that_is_not_finite_is_refused_without_a_word_about_its_numbers(bad, first):
    leaves = [np.array([1.25]), np.array([bad, 7.125])]
    with pytest.raises(NotFiniteError) as caught:
        clip(leaves if first else leaves[::-1], 1.0)
    assert "7.125" not in str(caught.value)
    assert "1.25" not in str(caught.value)


@pytest.mark.parametrize("limit", [0.0, -1.0, np.nan])
def test_a_bound_that_nothing_passes_is_refused(limit):
    with pytest.raises(InputError, match="clipping norm"):
        clip(np.ones(3), limit)


def test_integers_are_refused_since_they_were_encoded_before():
    with pytest.raises(ShapeError, match="real numbers"):
        clip(np.ones(3, np.uint32), 1.0)


def test_rows_of_one_key_are_added_before_they_are_clipped():
    """Clipped apart they would add up to twice the bound."""
    space, model = kh.KeySpace("word", 9), {"w": np.zeros((9, 2), np.float32)}
    layout = kh.Layout.of(model, kh.Cut(space, {"w": 0}))
    rows = np.array([[1, 0], [0, 2], [1, 0]], np.float32)
    one = ClientResult(0, "sent", {"word": space.keys([5, 1, 5])}, {"w": rows})
    ((keys, merged),) = rows_of(layout, clip_update(layout, one, 1.0))
    assert keys.tolist() == [1, 5]
    assert norm(merged) <= 1.0 < 1.001 * norm(merged)


def test_rounding_up_every_number_stays_within_the_bound():
    """The worst that stochastic rounding does, in a ring of 16 bits."""
    step, entries, limit = 1 / 512, 900, 1.0
    before = norm_before_rounding(limit, step, entries)
    update = clip(np.ones(entries), before)
    rounded = np.ceil(update / step) * step
    assert norm(clip(np.ones(entries), limit)) < norm(np.ceil(clip(np.ones(entries), limit) / step))
    assert before < norm(rounded) <= limit


def test_a_ring_too_coarse_for_the_bound_is_refused():
    with pytest.raises(InputError, match="32 bits"):
        norm_before_rounding(1.0, 1 / 512, 500_000)
