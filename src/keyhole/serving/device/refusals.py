"""Refusals: the errors of a service, rebuilt on a device from what came over the wire.

What a service says is not trusted: its words are bounded, stripped of control characters, and
never shown where the shape of an error is missing.
"""

from __future__ import annotations

import msgspec

from keyhole import errors
from keyhole.errors import InputError, KeyholeError, ProtocolError, ServiceError
from keyhole.private.pir.messages import REFUSAL

__all__ = ["MOST_ERROR_BYTES", "refusal_of"]

MOST_ERROR_BYTES = 1 << 16
"""Of the body of an error; longer ones are not read to their end."""

_MOST_WORDS = 400  # characters of one fact


class _Facts(msgspec.Struct, frozen=True):
    status: int
    kind: str
    wrong: str
    got: str
    allowed: str
    fix: str


class _Shape(msgspec.Struct, frozen=True):
    error: _Facts


def refusal_of(status: int, body: bytes | memoryview) -> KeyholeError:
    """Returns the error that an answer stands for.

    Args:
        status: of the answer.
        body: of the answer.

    >>> body = b'{"error": {"status": 410, "kind": "TooLateError", "wrong": "the round is closed",'
    >>> body += b' "got": "round 3", "allowed": "an open round", "fix": "check in again"}}'
    >>> refusal_of(410, body)
    TooLateError('the round is closed: got round 3, allowed is an open round; check in again')
    """
    if status == ProtocolError.http_status and body == REFUSAL:
        return _refused_message()
    try:
        facts = msgspec.json.decode(body, type=_Shape).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _foreign(status)
    kind = getattr(errors, facts.kind, None) if facts.kind in errors.__all__ else None
    # Only refusals are taken over as they are: that the service has failed is no error of ours.
    if kind is None or not issubclass(kind, InputError):
        kind = ServiceError
    got, allowed, fix = (_words(text) for text in (facts.got, facts.allowed, facts.fix))
    refusal: KeyholeError = kind(_words(facts.wrong), got=got, allowed=allowed, fix=fix)
    return refusal


def _words(text: str) -> str:
    """A fact that cannot flood or steer a terminal."""
    kept = "".join(c if c.isprintable() else " " for c in text[:_MOST_WORDS])
    return kept + "..." * (len(text) > _MOST_WORDS)


def _refused_message() -> ProtocolError:
    return ProtocolError(
        "the service refuses a private message",
        got="one that is damaged, stale, used before or for another server; it does not say",
        allowed="messages as docs/wire.md describes them",
        fix="ask anew; if it happens every time, check that all servers have the same round",
    )


def _foreign(status: int) -> ServiceError:
    return ServiceError(
        "the answer does not come from a slice service",
        got=f"status {status} without the shape of an error",
        allowed="answers as docs/wire.md describes them",
        fix="check the URL and what stands between the device and the service",
    )
