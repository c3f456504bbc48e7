"""Batches: many sealed requests in one body, and their answers in another.

    requests   "KHB1"  length of each (u32)  requests, one behind the other, all of that length
    answers    "KHB2"  their number (u32)    length of each (u32)  answers in the order of requests

Numbers are little-endian. The carrier of a batch can tell how many requests it holds and how long
the answers are, and nothing else. An answer of length 0 stands for a request that the gateway could
not open (RFC 9458, section 5.2, has no form for many requests at once).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from keyhole.errors import MalformedError, TooLargeError

REQUESTS_TYPE = "application/vnd.keyhole.ohttp-requests"
ANSWERS_TYPE = "application/vnd.keyhole.ohttp-answers"

_REQUESTS, _ANSWERS = b"KHB1", b"KHB2"
_HEAD = struct.Struct("<4sI")
HEAD_BYTES = _HEAD.size
LENGTH_BYTES = 4
"""What stands before each answer."""


def encode_requests(requests: Sequence[bytes]) -> bytes:
    """Returns a batch of requests, one or more, of one length.

    Raises:
        MalformedError: their lengths differ, or there are none.
    """
    lengths = {len(request) for request in requests}
    if len(lengths) != 1:
        raise _malformed(f"requests of {len(lengths)} lengths")
    return _HEAD.pack(_REQUESTS, *lengths) + b"".join(requests)


def decode_requests(body: bytes, limit: int) -> list[bytes]:
    """Returns the requests of a batch.

    Args:
        body: as it arrived.
        limit: how many it may hold.

    Raises:
        MalformedError: it is not a batch of whole requests.
        TooLargeError: it holds more than `limit`.
    """
    magic, length = _HEAD.unpack_from(body) if len(body) >= HEAD_BYTES else (b"", 0)
    count, rest = divmod(len(body) - HEAD_BYTES, length) if length else (0, 0)
    if magic != _REQUESTS or count < 1 or rest:
        raise _malformed(f"{len(body)} bytes")
    if count > limit:
        raise TooLargeError(
            "too many requests in one batch",
            got=f"{count} requests",
            allowed=f"{limit}",
            fix="send fewer at a time",
        )
    return [body[at : at + length] for at in range(HEAD_BYTES, len(body), length)]


def encode_answers(answers: Sequence[bytes]) -> bytes:
    """Returns the answers to a batch, in the order of its requests."""
    lengths = np.array([len(answer) for answer in answers], "<u4").tobytes()
    return b"".join([_HEAD.pack(_ANSWERS, len(answers)), lengths, *answers])


def decode_answers(body: bytes, count: int) -> list[bytes]:
    """Returns the answers to a batch of `count` requests.

    Raises:
        MalformedError: these are not as many answers.
    """
    start = HEAD_BYTES + LENGTH_BYTES * count
    if len(body) < start or _HEAD.unpack_from(body) != (_ANSWERS, count):
        raise _malformed(f"{len(body)} bytes")
    lengths = np.frombuffer(body, "<u4", count, HEAD_BYTES).tolist()
    ends = list(accumulate(lengths, initial=start))
    if ends[-1] != len(body):
        raise _malformed(f"{len(body)} bytes")
    return [body[end - length : end] for end, length in zip(ends[1:], lengths, strict=True)]


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        "this is not a batch of sealed messages",
        got=got,
        allowed="a batch as docs/wire.md describes it",
        fix="check that all sides are of one version",
    )
