"""Numbers of a few bits, packed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.crypto.bits import MAX_BITS, pack_bits, packed_bytes, unpack_bits
from keyhole.errors import MalformedError


@given(st.integers(1, MAX_BITS), st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_numbers_come_back_and_stand_one_after_the_other(bits, drawn):
    numbers = np.array(drawn, np.uint64) & np.uint64(2**bits - 1)
    packed = pack_bits(numbers, bits)
    as_one = sum(int(x) << bits * at for at, x in enumerate(numbers))
    assert packed == as_one.to_bytes(packed_bytes(len(drawn), bits), "little")
    np.testing.assert_array_equal(unpack_bits(memoryview(packed), len(drawn), bits), numbers)


@pytest.mark.parametrize("data", [b"", b"\1", b"\1\2\3", b"\1\x10", b"\1\x80"])
def test_another_length_or_bits_to_spare_are_refused(data):
    with pytest.raises(MalformedError, match="packed numbers"):
        unpack_bits(memoryview(data), 3, 4)
