"""Describes what trainer, aggregators and devices say besides shares: JSON, read strictly."""

from __future__ import annotations

from base64 import b64encode
from typing import Literal, TypeAlias, TypeVar

import msgspec

from keyhole.errors import KeyholeError, MalformedError

SumPhase: TypeAlias = Literal["open", "stopped", "closing", "ready", "failed"]
"""Of a sum at one aggregator: takes shares; takes no more; compares and adds up; its share can be
fetched; nothing will ever be given out."""


class SumOpening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer opens a sum.

    Attributes:
        party: which aggregator the trainer takes this one for.
        terms: of the sum, encoded; base64 in JSON.
        cohort: names of all devices that are asked, in an order that both aggregators are told.
    """

    party: int
    terms: bytes
    cohort: list[str]


class Closing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer says whose updates count, and the aggregators add them up."""

    taken: list[str]


class Failure(msgspec.Struct, frozen=True):
    """Why nothing was given out: an error without its class."""

    kind: str
    wrong: str
    got: str
    allowed: str
    fix: str

    @staticmethod
    def of(error: KeyholeError) -> Failure:
        """The facts of an error."""
        return Failure(type(error).__name__, error.wrong, error.got, error.allowed, error.fix)

    def __str__(self) -> str:
        return f"{self.wrong}: got {self.got}; expected {self.allowed}; {self.fix}"


class SumStatus(msgspec.Struct, frozen=True):
    """How a sum stands at one aggregator.

    Attributes:
        phase: of the sum.
        devices: whose share is here; once it is ready, whose updates are in the sum.
        waiting: what a closing sum waits for; empty while it waits for nothing.
        failure: why nothing is given out.
    """

    phase: SumPhase
    devices: list[str]
    waiting: str = ""
    failure: Failure | None = None


class Summaries(msgspec.Struct, frozen=True):
    """The sums of one trainer that an aggregator remembers."""

    rounds: list[str]


T = TypeVar("T")


def read_message(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Returns a message; raises MalformedError where it is none of its kind."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedError(
            f"a message about a sum that makes no sense: got {len(data)} bytes; expected messages "
            "as docs/wire.md describes them; check that both sides are of one version"
        ) from error


def peer_name(party: int) -> str:
    """What an aggregator is called by the other one."""
    return f"aggregator-{party}"


SUM_SETTING = "sum_terms"


def sum_settings(params: bytes) -> dict[str, object]:
    """What the settings of a manifest say about the sum of its round."""
    return {SUM_SETTING: b64encode(params).decode("ascii")}
