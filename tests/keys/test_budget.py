"""Budgets: as many keys as the memory of a device holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import InputError
from keyhole.keys.budget import DeviceClass, assign_device, keys_within
from tests.helpers import LAYOUTS

CUT = [name for name, layout in LAYOUTS.items() if layout.spaces]


@pytest.mark.parametrize("name", CUT)
@given(data=st.data())
def test_a_budget_is_used_and_never_exceeded(name, data):
    layout = LAYOUTS[name]
    minimum = layout.client_bytes(**{s.name: 1 for s in layout.spaces})
    limit = layout.client_bytes(**{s.name: s.num_keys for s in layout.spaces})
    budget = data.draw(st.integers(minimum, limit + 50))
    counts = keys_within(layout, budget)
    assert layout.client_bytes(**counts) <= budget
    if budget >= limit:
        assert counts == {s.name: s.num_keys for s in layout.spaces}
    elif len(counts) == 1:
        more = {name: m + 1 for name, m in counts.items()}
        assert layout.client_bytes(**more) > budget


def test_a_device_that_holds_nothing_is_named():
    with pytest.raises(InputError, match="got 3 bytes; expected 12 or more"):
        keys_within(LAYOUTS["rows"], 3)


def test_classes_have_their_share():
    classes = [DeviceClass("a", 0.2, 1), DeviceClass("b", 0.8, 1)]
    rng = np.random.default_rng(0)
    drawn = [assign_device(classes, rng).name for _ in range(2000)]
    assert abs(drawn.count("a") - 400) < 80


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(InputError, match="out of range"):
        DeviceClass("a", share, 1)


def test_shares_that_do_not_add_up_are_refused():
    with pytest.raises(InputError, match=r"got 0\.9"):
        assign_device([DeviceClass("a", 0.9, 1)], np.random.default_rng(0))
