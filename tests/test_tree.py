"""Trees: leaves come in the order of jax.tree, and come back."""

from typing import NamedTuple

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole import tree
from keyhole.errors import ShapeError


class Pair(NamedTuple):
    left: object
    right: object


NAMES = st.text("abcxyz", min_size=1, max_size=3)
TREES = st.recursive(
    st.one_of(st.integers(), st.none()),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=3),
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=8,
)


@given(TREES)
def test_leaves_come_in_the_order_of_jax(value):
    assert list(tree.flatten(value).values()) == jax.tree.leaves(value)


@given(TREES)
def test_a_tree_comes_back_from_its_leaves(value):
    assert tree.unflatten(value, tree.flatten(value)) == value


@given(TREES)
def test_mapping_is_mapping_in_jax(value):
    assert tree.map_leaves(lambda n: n + 1, value) == jax.tree.map(lambda n: n + 1, value)


def test_named_tuples_stay_named_tuples():
    assert tree.map_leaves(str, Pair(1, [2])) == Pair("1", ["2"])


def test_a_bare_leaf_is_named_by_a_dot():
    assert tree.flatten(3) == {".": 3}


def test_an_unknown_path_is_named_with_those_that_exist():
    with pytest.raises(ShapeError, match="got 'w'; expected 'a', 'b'"):
        tree.get({"a": 1, "b": 2}, "w")
