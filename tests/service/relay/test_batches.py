"""Batches: bytes that others see, read exactly or not at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.delivery.relay.gateway import (
    decode_answers,
    decode_requests,
    encode_answers,
    encode_requests,
)
from keyhole.errors import MalformedError, TooLargeError


def test_the_bytes_of_a_batch_are_those_of_the_wire_page():
    assert encode_requests([b"abc", b"xyz"]) == b"KHB1\3\0\0\0abcxyz"
    answers = [b"abcd", b"", b"x"]
    encoded = b"KHB2\3\0\0\0\4\0\0\0\0\0\0\0\1\0\0\0abcdx"
    assert encode_answers(answers) == encoded
    assert decode_answers(encoded, 3) == answers


@settings(max_examples=40)
@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=1)))
def test_any_batch_of_requests_comes_back(requests):
    assert decode_requests(encode_requests(requests), len(requests)) == requests


@settings(max_examples=40)
@given(st.lists(st.binary(max_size=9)))
def test_any_answers_come_back(answers):
    assert decode_answers(encode_answers(answers), len(answers)) == answers


def test_requests_of_several_lengths_and_none_make_no_batch():
    for requests in ([b"a", b"bc"], []):
        with pytest.raises(MalformedError):
            encode_requests(requests)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"KHB1",
        b"KHB1\3\0\0\0",
        b"KHB1\3\0\0\0ab",
        b"KHB1\3\0\0\0abcd",
        b"KHB1\0\0\0\0abc",
        b"KHB1\xff\xff\xff\xffabc",
        b"KHB2\3\0\0\0abc",
    ],
)
def test_other_bodies_are_no_requests(body):
    with pytest.raises(MalformedError):
        decode_requests(body, 100)


def test_a_batch_of_too_many_is_refused():
    body = encode_requests([b"a"] * 4)
    assert len(decode_requests(body, 4)) == 4
    with pytest.raises(TooLargeError, match="4 requests"):
        decode_requests(body, 3)


def test_every_cut_and_extension_of_answers_is_refused():
    body = encode_answers([b"ab", b"", b"cde"])
    for length in range(len(body)):
        with pytest.raises(MalformedError):
            decode_answers(body[:length], 3)
    for bad, count in [(body + b"x", 3), (body, 2), (body, 4), (b"KHB1" + body[4:], 3)]:
        with pytest.raises(MalformedError):
            decode_answers(bad, count)
