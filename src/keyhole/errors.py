"""Every error keyhole raises, in one tree.

KeyholeError
 +-- InputError          the caller passed something unusable
 |    +-- KeySpaceError      keys: range, dtype, rank, or the wrong key space
 |    +-- CutError           a cut that names what is not there, or what is taken
 |    +-- ShapeError         arrays whose shape, dtype or tree does not fit
 |    +-- NotFiniteError     NaN or infinity in a value that will be added up
 |    +-- NoExamplesError    a client that has nothing to train on
 |    +-- NotLinearError     a select function that has no transpose
 +-- CohortError         nobody is left, or two values come from different cohorts
 |    +-- ThresholdError     too few clients are left for a secure sum to be opened
 +-- PlacementError      code at the server reads a value that lives on the clients
 +-- StorageError        a file of the server's state is damaged or foreign, or the disk refuses it
 +-- WorkerError         a client's work kills every worker that tries it
 +-- RequestError        the slice service refuses a request
 |    +-- AccessError        no token, or one that is expired, foreign or for another round
 |    |    +-- UntimelyError     one that is expired or not yet good, by the clock of the service
 |    +-- NotAdmittedError   a token that is good, for something else than was asked
 |    +-- NotFoundError      no such route, round, table, segment or slice
 |    +-- MethodError        a route that does not know this method
 |    +-- TooLateError       a round that is closed or removed
 |    +-- ConflictError      a second, different update of one device in one round
 |    +-- TooLargeError      a body, or a number of keys, beyond the limits
 |    +-- MediaTypeError     a body of another content type
 |    +-- RangeError         a range that begins behind the end
 |    +-- SlowError          a body that takes too long to arrive
 |    +-- TooManyError       one device asks too often
 |    +-- BusyError          the service has too much under way
 |    +-- ProtocolError      a message of a private protocol cannot be used
 |         +-- MalformedError    its length, its form or its check is wrong
 |         +-- StaleError        it belongs to another round, or to slices that have changed
 |         +-- ReplayError       it has been used before
 |         +-- ViolationError    a party asks for what the protocol forbids
 |         +-- MismatchError     two parties do not speak of the same clients or messages
 |         +-- SketchError       a sum of sketches that does not decode
 +-- ServiceError        a device cannot reach its service, or gets no sense out of it
 |    +-- AwayError          one that has answered before gives no answer, time and again
 +-- DamageError         bytes that arrived are not the bytes that were sent
 |    +-- IntegrityError     slices that are not those of the round: a server lies or is damaged
 +-- AttestationError    an enclave that does not show what the policy asks for
 +-- CostlyError         a private way that sends more than the whole model
 +-- BudgetError         a round that would spend more privacy than there is

A message states four facts: what is wrong, the value, what is allowed, what to do. Messages that
may be seen at the server never carry a key or an update of one client: they carry counts.
"""

from __future__ import annotations

import json
import re
from typing import ClassVar

__all__ = [
    "AccessError",
    "AttestationError",
    "AwayError",
    "BudgetError",
    "BusyError",
    "CohortError",
    "ConflictError",
    "CostlyError",
    "CutError",
    "DamageError",
    "InputError",
    "IntegrityError",
    "KeySpaceError",
    "KeyholeError",
    "MalformedError",
    "MediaTypeError",
    "MethodError",
    "MismatchError",
    "NoExamplesError",
    "NotAdmittedError",
    "NotFiniteError",
    "NotFoundError",
    "NotLinearError",
    "PlacementError",
    "ProtocolError",
    "RangeError",
    "ReplayError",
    "RequestError",
    "ServiceError",
    "ShapeError",
    "SketchError",
    "SlowError",
    "StaleError",
    "StorageError",
    "ThresholdError",
    "TooLargeError",
    "TooLateError",
    "TooManyError",
    "UntimelyError",
    "ViolationError",
    "WorkerError",
]


_FACTS = re.compile(r"(.*?): got (.*?); expected (.*?); (.*)", re.DOTALL)


def worded(wrong: str, got: str, allowed: str, fix: str) -> str:
    """Returns the message of an error with these facts; of what is wrong alone, that."""
    told = got or allowed or fix
    return f"{wrong}: got {got}; expected {allowed}; {fix}" if told else wrong


class KeyholeError(Exception):
    """Base of all errors of keyhole; carries four facts and how a command or service ends on it.

    Args:
        message: "what is wrong: got the value; expected what is allowed; what to do". The parts
            are read from it as `wrong`, `got`, `allowed` and `fix`. A message of another form, of
            code of your own, is all of it `wrong`, and the other parts are empty.

    >>> print(KeyholeError("cohort is too small: got 0; expected 1 or more; wait"))
    cohort is too small: got 0; expected 1 or more; wait
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        facts = _FACTS.fullmatch(message)
        told = (message, "", "", "") if facts is None else facts.groups()
        self.wrong, self.got, self.allowed, self.fix = told

    def to_json(self) -> bytes:
        """Returns the body of the answer of a service that refuses a request.

        >>> KeyholeError("it is late: got 9; expected 8; wait").to_json()
        b'{"error":{"status":500,"kind":"KeyholeError","wrong":"it is late",...
        """
        facts = {name: getattr(self, name) for name in ("wrong", "got", "allowed", "fix")}
        told = {"status": self.http_status, "kind": type(self).__name__, **facts}
        return json.dumps({"error": told}, separators=(",", ":")).encode("ascii")


class InputError(KeyholeError):
    """Something the caller passed cannot be used."""

    exit_code = 2
    http_status = 400


class KeySpaceError(InputError):
    """Keys that are out of range, of the wrong dtype or rank, or of another key space."""


class CutError(InputError):
    """A cut names a parameter or axis that does not exist, or that another cut has claimed."""


class ShapeError(InputError):
    """Arrays whose shape, dtype or tree structure does not fit together."""


class NotFiniteError(InputError):
    """NaN or infinity in a value that is about to be added up."""


class NoExamplesError(InputError):
    """A client has nothing to train on, as where its keys meet none of its examples."""


class NotLinearError(InputError):
    """A select function that is not linear in the server value, so no deselect can be derived."""


class CohortError(KeyholeError):
    """Nobody is left in a cohort, or two client-placed values belong to different cohorts."""

    exit_code = 3
    http_status = 503


class ThresholdError(CohortError):
    """Too few clients are left for a secure sum to be opened; nothing of it is released."""


class PlacementError(KeyholeError):
    """Code at the server tries to read a value that lives on the clients."""


class StorageError(KeyholeError):
    """A file of the server's state is damaged or foreign, or the disk refuses it."""

    exit_code = 4
    http_status = 507


class WorkerError(KeyholeError):
    """Processes that work for a run are gone for good: a client kills every worker that trains it,
    a cluster does not answer or has no room, or a shard of the server's tables is lost."""


class RequestError(InputError):
    """The slice service refuses a request, for a reason that lies in the request."""


class AccessError(RequestError):
    """A request without a token, or with one that is expired, foreign or for another round."""

    http_status = 401


class UntimelyError(AccessError):
    """A token that is expired or not yet good, by the clock of the service."""


class NotAdmittedError(RequestError):
    """A good token that does not allow what was asked."""

    http_status = 403


class NotFoundError(RequestError):
    """No such route, round, table, segment or slice."""

    http_status = 404


class MethodError(RequestError):
    """A route that does not know this method."""

    http_status = 405


class ConflictError(RequestError):
    """A second update of one device in one round that differs from the first."""

    http_status = 409


class TooLateError(RequestError):
    """A round that is closed or removed: the device takes part in a later one."""

    http_status = 410


class TooLargeError(RequestError):
    """A body, or a number of keys, beyond the limits."""

    http_status = 413


class MediaTypeError(RequestError):
    """A body of another content type."""

    http_status = 415


class RangeError(RequestError):
    """A range of bytes that begins behind the end of what was asked for."""

    http_status = 416


class SlowError(RequestError):
    """A body that takes too long to arrive."""

    http_status = 408


class TooManyError(RequestError):
    """One device asks too often; the answer says when to come back, `retry_after` seconds later."""

    retry_after: float = 1.0

    http_status = 429


class BusyError(RequestError):
    """The service has too much under way; the answer says when to come back."""

    http_status = 503


class ServiceError(KeyholeError):
    """A device cannot reach its service, or gets no sense out of it."""

    exit_code = 5
    http_status = 502


class AwayError(ServiceError):
    """A service that has answered before gives no answer, time and again: it may come back."""


class DamageError(KeyholeError):
    """Bytes that arrived are not the bytes that were sent."""

    exit_code = 4
    http_status = 502


class ProtocolError(RequestError):
    """A message of a private protocol cannot be used. On the wire all of its kinds look alike."""


class MalformedError(ProtocolError):
    """A message whose length, form or check is wrong."""


class StaleError(ProtocolError):
    """A message of another round, or about slices that have changed since."""


class ReplayError(ProtocolError):
    """A message, or what a message is made from, is used a second time."""


class ViolationError(ProtocolError):
    """A party asks for what the protocol forbids; anyone who is asked forgets its secrets."""


class MismatchError(ProtocolError):
    """Two parties do not speak of the same clients or messages; nothing is released."""


class SketchError(ProtocolError):
    """A sum of sketches that does not decode; nothing of it is applied."""


class IntegrityError(DamageError):
    """Slices that are not those of the round: a server lies, or is damaged."""


class AttestationError(KeyholeError):
    """An enclave that does not show what the policy asks for; nothing secret is sent to it."""

    exit_code = 6
    http_status = 502


class CostlyError(InputError):
    """A private way that sends more than the whole model would."""


class BudgetError(InputError):
    """A round that would spend more privacy than there is; it does not start."""
