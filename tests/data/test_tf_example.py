"""tf.train.Example: what is encoded is decoded, and a broken message is one error."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.readers.tff import decode_example
from keyhole.errors import InputError
from tests.data.files import encode_example, field, varint

PATH = Path("some.sqlite")
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1).map(
    lambda values: np.array(values, np.float32)
)
INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1).map(
    lambda values: np.array(values, np.int64)
)
TEXTS = st.lists(st.binary(max_size=200))
FEATURES = st.dictionaries(st.text(max_size=5), FLOATS | INTEGERS | TEXTS, max_size=4)


@given(FEATURES, st.booleans())
def test_what_is_encoded_is_decoded(features, packed):
    found = decode_example(encode_example(features, packed), PATH)
    assert found.keys() == features.keys()
    for name, values in features.items():
        assert type(found[name]) is type(values)
        np.testing.assert_array_equal(found[name], values)
        if isinstance(values, np.ndarray):
            assert found[name].dtype == values.dtype


@given(FEATURES, st.data())
def test_a_message_that_is_cut_short_is_an_error_or_a_smaller_message(features, data):
    message = encode_example(features)
    cut = data.draw(st.integers(0, len(message) - 1))
    if cut == 0:
        assert decode_example(b"", PATH) == {}
        return
    with pytest.raises(InputError, match=r"some\.sqlite"):
        decode_example(message[:cut], PATH)


@given(st.binary(max_size=60))
def test_any_bytes_are_features_or_one_error(message):
    with suppress(InputError):  # and no other
        assert isinstance(decode_example(message, PATH), dict)


def test_fields_of_a_later_version_are_passed_over():
    more = field(9, b"new") + varint(10 << 3) + varint(5) + varint(11 << 3 | 1) + bytes(8)
    message = more + encode_example({"x": np.array([1, -1])}) + more
    assert decode_example(message, PATH)["x"].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (b"\x0b", "wire type 3"),
        (b"\x0a\x05ab", "a field of 5 bytes where 2 are left"),
        (b"\x80", "cut short"),
        (b"\xff" * 11, "more than 10 bytes"),
        (field(1, field(1, field(2, field(2, field(1, b"abc"))))), "3 bytes of floats"),
        (field(1, field(1, field(1, b"\xff"))), "codec can't decode"),
    ],
)
def test_a_malformed_message_says_what_is_wrong(message, said):
    with pytest.raises(InputError, match=said):
        decode_example(message, PATH)
