"""Control messages: what a node is told of a round, and what it says in return. Both stay small.

A message carries names, numbers, URLs and tokens; slices and updates never pass through Flower. One
message goes to one node, and names every client that the node stands for in the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from flwr.app import ConfigRecord, RecordDict

from keyhole.errors import MalformedError

__all__ = ["ASK", "TRAIN", "Call", "Here", "Report", "read", "write"]

TRAIN = "train.keyhole"
"""The type of the message that calls a node to a round."""

ASK = "query.keyhole"
"""The type of the message that asks a node whom it stands for."""

_RECORD, _VERSION = "keyhole", 1
_MOST_LIST = 4096  # entries of a list: clients of one node in one round
_MOST_TEXT = 4096  # characters of a word, a URL or a token

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Call:
    """What a node is told of a round.

    Args:
        round: its identifier.
        number: t.
        seconds: until it closes at the latest.
        service: URL of the slice service.
        clients: whom the node stands for in this round.
        tokens: of the round, one for each client; none where the service knows no tokens.
        delivery: how slices are fetched: "clear" or "pir".
        second: URL of the second slice server, where the delivery needs one.
        aggregators: URLs of the two aggregators, where updates are added up in secret.
    """

    round: str
    number: int
    seconds: float
    service: str
    clients: tuple[int, ...]
    tokens: tuple[str, ...] = ()
    delivery: str = "clear"
    second: str = ""
    aggregators: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Without the tokens."""
        return f"Call(round {self.round}, {len(self.clients)} clients)"


@dataclass(frozen=True)
class Report:
    """What a node says after a round: one entry a client, in the order of the call.

    Args:
        clients: that it stood for.
        outcomes: "sent", "late" or "failed" each.
        reasons: why a client failed, in one sentence without a key; empty where it did not.
        bytes_down: slices that it received.
        bytes_up: queries and the update.
        seconds: from the message to the update.
    """

    clients: tuple[int, ...]
    outcomes: tuple[str, ...]
    reasons: tuple[str, ...]
    bytes_down: tuple[int, ...]
    bytes_up: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {len(getattr(self, field.name)) for field in fields(self)}
        if len(counts) != 1:
            raise _malformed(f"lists of {sorted(counts)} entries")


@dataclass(frozen=True)
class Here:
    """Whom a node stands for: client number `client`, or with -1 whoever is asked."""

    client: int = -1


def write(content: Call | Report | Here) -> RecordDict:
    """The content of a Flower message."""
    told = {f.name: getattr(content, f.name) for f in fields(content)}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in told.items()}
    return RecordDict({_RECORD: ConfigRecord({"version": _VERSION, **plain})})


def read(content: RecordDict, kind: type[_Kind]) -> _Kind:
    """What a Flower message says.

    Args:
        content: of the message.
        kind: `Call`, `Report` or `Here`.

    Raises:
        MalformedError: it says something else, or too much.
    """
    record = content.config_records.get(_RECORD)
    if record is None or record.get("version") != _VERSION:
        raise _malformed("no such record" if record is None else "another version")
    hints = get_type_hints(kind)
    if set(record) != {*hints, "version"}:
        raise _malformed(f"{len(record)} fields")
    return kind(**{name: _value(record, name, hint) for name, hint in hints.items()})


def _value(record: Mapping[str, Any], name: str, hint: Any) -> Any:
    """One field, once it is known to be what the dataclass says."""
    value = record[name]
    if get_origin(hint) is tuple:
        (kind, _) = get_args(hint)
        is_list = isinstance(value, list) and len(value) <= _MOST_LIST
        if not is_list or not all(_is(each, kind) for each in value):
            raise _malformed(f"{name} of another form")
        return tuple(value)
    if not _is(value, hint):
        raise _malformed(f"{name} of another form")
    return value


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return not isinstance(value, str) or len(value) <= _MOST_TEXT


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        "a Flower message cannot be used",
        got=got,
        allowed=f"messages of keyhole, version {_VERSION}",
        fix="run one version of keyhole on the server and on all nodes",
    )
