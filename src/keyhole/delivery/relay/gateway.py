"""Opens sealed requests, has them answered and seals the answers; packs many into one body.

The gateway sees which slices are asked for and that a relay asks; it sees neither whose request it
is nor which requests belong together, if it does not work together with the relay and the relay
mixes enough clients. A key that one client alone can want, and the times of requests, still tell.
How long a copied request is refused: see `ReplayWindow`.

    requests   "KHB1"  length of each (u32)  requests, one behind the other, all of that length
    answers    "KHB2"  their number (u32)    length of each (u32)  answers in the order of requests

Numbers are little-endian. The carrier of a batch can tell how many requests it holds and how long
the answers are, and nothing else. An answer of length 0 stands for a request that the gateway could
not open (RFC 9458, section 5.2, has no form for many requests at once).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from keyhole.crypto.hpke import PrivateKey
from keyhole.crypto.once import ReplayWindow
from keyhole.crypto.prg import Prg
from keyhole.delivery.exchange import mix
from keyhole.delivery.relay.binary_http import (
    BinaryRequest,
    BinaryResponse,
    decode_request,
    encode_response,
)
from keyhole.delivery.relay.ohttp import (
    Exchange,
    GatewayKey,
    KeyConfig,
    open_request,
    seal_response,
)
from keyhole.errors import (
    InputError,
    KeyholeError,
    MalformedError,
    ReplayError,
    TooLargeError,
)

PROBLEM_STATUS = 400
PROBLEM_TYPE = "application/problem+json"
PROBLEM = (
    b'{"type":"https://iana.org/assignments/http-problem-types#ohttp-key",'
    b'"title":"the request cannot be opened"}'
)
"""The answer, not sealed, to every request that does not open, whatever the reason (sections 5.2
and 5.3 of RFC 9458)."""

ERROR_BYTES = 512
"""To which refusals are padded where it is not known what was asked for."""


@dataclass(frozen=True)
class Reply:
    """An answer and the public length to which it is padded.

    Args:
        length: bytes, a function of public numbers and never of the key. A response that does not
            fit loses all but its status.
    """

    response: BinaryResponse
    length: int = ERROR_BYTES


Handler: TypeAlias = Callable[[BinaryRequest], Reply]


@dataclass(frozen=True, repr=False)
class Asked:
    """A request that has been opened; None in its place if it cannot be answered."""

    exchange: Exchange
    request: BinaryRequest | None
    error: KeyholeError | None = None


class Gateway:
    """Answers sealed requests. Threads do not share one.

    Args:
        keys: the one that clients are to use first; older ones still open.
        handler: answers what was asked. A KeyholeError it raises is answered, sealed. None for
            anyone who calls `open` and `seal`, and answers in between.
        window: of requests that were answered before; one of the usual size if None.
    """

    def __init__(
        self,
        keys: Sequence[GatewayKey],
        handler: Handler | None = None,
        window: ReplayWindow | None = None,
    ) -> None:
        self._keys: dict[int, PrivateKey] = {key.key_id: key.private for key in keys}
        if not keys or len(self._keys) < len(keys):
            raise InputError(
                f"keys of a gateway are missing, or have the same number: got {len(keys)} keys; "
                "expected one or more with different numbers; pass GatewayKey.fresh()"
            )
        self.configs: tuple[KeyConfig, ...] = tuple(key.config for key in keys)
        self._handler, self._prg = handler, Prg.fresh()
        self._window = ReplayWindow() if window is None else window

    def answer(self, sealed: bytes) -> bytes:
        """Returns the sealed answer."""
        asked = self.open(sealed)
        if asked.request is None or self._handler is None:
            return self.seal(asked, refusal(asked.error))
        try:
            reply = self._handler(asked.request)
        except KeyholeError as error:
            reply = refusal(error)
        return self.seal(asked, reply)

    def answer_many(self, sealed: Sequence[bytes]) -> list[bytes]:
        """Returns the answer of each; nothing stands for a request that does not open."""
        answers = []
        for one in sealed:
            try:
                answers.append(self.answer(one))
            except MalformedError:
                answers.append(b"")
        return answers

    def open(self, sealed: bytes) -> Asked:
        """Opens a request; what is wrong inside is for the client alone to know."""
        plain, exchange = open_request(self._keys, sealed)
        try:
            self._window.admit(exchange.enc)
            request = decode_request(plain)
            if any(name == b"expect" for name, _ in request.fields):  # section 5.1
                raise MalformedError(
                    "a request that waits for an interim answer: got an expect field; expected "
                    "none; send all of it at once"
                )
            return Asked(exchange, request)
        except (MalformedError, ReplayError) as error:
            return Asked(exchange, None, error)

    def seal(self, asked: Asked, reply: Reply) -> bytes:
        """Seals the answer to a request that was opened."""
        try:
            plain = encode_response(reply.response, reply.length)
        except InputError:
            plain = encode_response(BinaryResponse(reply.response.status), reply.length)
        return seal_response(asked.exchange, plain, self._prg)


def refusal(error: KeyholeError | None, length: int = ERROR_BYTES) -> Reply:
    """Returns the answer to a request that is refused: the four facts, as every route gives them,
    padded to the length of an answer if it is known what that would have been."""
    error = error or KeyholeError("refused: got a request; expected others; ask again")
    fields = ((b"content-type", b"application/json"),)
    return Reply(BinaryResponse(error.http_status, fields, error.to_json()), length)


Forward: TypeAlias = Callable[[Sequence[bytes]], Sequence[bytes]]
"""Takes sealed requests to the gateway; returns an answer to each, in their order."""


def relay(
    batches: Sequence[Sequence[bytes]], forward: Forward, prg: Prg | None = None
) -> list[list[bytes]]:
    """Forwards what clients sent, mixed, to a gateway in this process; returns to each client its
    answers in its order. `prg`, of the order, is given by tests only."""
    mixed = mix(batches, prg or Prg.fresh())
    return mixed.hand_back(forward(mixed.requests))


REQUESTS_TYPE = "application/vnd.keyhole.ohttp-requests"
ANSWERS_TYPE = "application/vnd.keyhole.ohttp-answers"

_REQUESTS, _ANSWERS = b"KHB1", b"KHB2"
_HEAD = struct.Struct("<4sI")
HEAD_BYTES = _HEAD.size
LENGTH_BYTES = 4
"""What stands before each answer."""


def encode_requests(requests: Sequence[bytes]) -> bytes:
    """Returns a batch of requests, one or more, of one length."""
    lengths = {len(request) for request in requests}
    if len(lengths) != 1:
        raise _malformed(f"requests of {len(lengths)} lengths")
    return _HEAD.pack(_REQUESTS, *lengths) + b"".join(requests)


def decode_requests(body: bytes, limit: int) -> list[bytes]:
    """Returns the requests of a batch."""
    magic, length = _HEAD.unpack_from(body) if len(body) >= HEAD_BYTES else (b"", 0)
    count, rest = divmod(len(body) - HEAD_BYTES, length) if length else (0, 0)
    if magic != _REQUESTS or count < 1 or rest:
        raise _malformed(f"{len(body)} bytes")
    if count > limit:
        raise TooLargeError(
            f"too many requests in one batch: got {count} requests; expected {limit}; send fewer "
            "at a time"
        )
    return [body[at : at + length] for at in range(HEAD_BYTES, len(body), length)]


def encode_answers(answers: Sequence[bytes]) -> bytes:
    """Returns the answers to a batch, in the order of its requests."""
    lengths = np.array([len(answer) for answer in answers], "<u4").tobytes()
    return b"".join([_HEAD.pack(_ANSWERS, len(answers)), lengths, *answers])


def decode_answers(body: bytes, count: int) -> list[bytes]:
    """Returns the answers to a batch of `count` requests."""
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
        f"this is not a batch of sealed messages: got {got}; expected a batch as docs/wire.md "
        "describes it; check that all sides are of one version"
    )
