"""Writes and reads control messages: what a node is told of a round, and what it replies.

A message carries names, numbers, URLs and tokens; slices and updates never pass through Flower. One
message goes to one node, and names every client that the node stands for in the round.

What the record of a round says of nodes and clients that failed has a count, and a reason without a
key. What nodes say of themselves is cut short, and of errors that keyhole did not write only the
kind is told: they may quote data.

A SuperNode that was started with `--node-config "client=7"` is client 7 and nobody else; one
without stands in for anyone who is asked, as a laboratory does that has the data of all. The server
asks each node once, when it first sees it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.errors import CohortError, InputError, MalformedError

TRAIN = "train.keyhole"
"""The type of the message that calls a node to a round."""

ASK = "query.keyhole"
"""The type of the message that asks a node whom it stands for."""

_RECORD, _VERSION = "keyhole", 2
_MAX_LIST = 4096  # entries of a list: clients of one node in one round
_MAX_MESSAGE_TEXT = 4096  # characters of a word, a URL or a token

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class RoundCall:
    """What a node is told of a round.

    Args:
        number: of the round, as its identifier has it.
        seconds: until it closes at the latest.
        service: URL of the slice service.
        tokens: of the round, one for each client; none where the service knows no tokens.
        sum_tokens_0: likewise for the first aggregator, where there is one.
        sum_tokens_1: and for the second.
        delivery: how slices are fetched.
        second: URL of the second slice server, where the delivery needs one.
        aggregators: URLs of the two aggregators, where updates are added up in secret.
    """

    round: str
    number: int
    seconds: float
    service: str
    clients: tuple[int, ...]
    tokens: tuple[str, ...] = ()
    sum_tokens_0: tuple[str, ...] = ()
    sum_tokens_1: tuple[str, ...] = ()
    delivery: str = DEFAULT_SERVED
    second: str = ""
    aggregators: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Without the tokens."""
        return f"Call(round {self.round}, {len(self.clients)} clients)"


@dataclass(frozen=True)
class NodeReport:
    """What a node says after a round: one entry a client, in the order of the call.

    Args:
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
    """Whom a node stands for: client number `client`, or with -1 anyone who is asked."""

    client: int = -1


def write(content: RoundCall | NodeReport | Here) -> RecordDict:
    """Returns the content of a Flower message."""
    told = {f.name: getattr(content, f.name) for f in fields(content)}
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in told.items()}
    return RecordDict({_RECORD: ConfigRecord({"version": _VERSION, **plain})})


def read(content: RecordDict, kind: type[_Kind]) -> _Kind:
    """Returns what a Flower message says; raises MalformedError where it says something else, or
    too much."""
    record = content.config_records.get(_RECORD)
    if record is None or record.get("version") != _VERSION:
        raise _malformed("no such record" if record is None else "another version")
    hints = get_type_hints(kind)
    if set(record) != {*hints, "version"}:
        raise _malformed(f"{len(record)} fields")
    return kind(**{name: _value(record, name, hint) for name, hint in hints.items()})


def _value(record: Mapping[str, Any], name: str, hint: Any) -> Any:
    """One field, once it is known to be what the dataclass says."""
    value, is_list = record[name], get_origin(hint) is tuple
    values, kind = (value, get_args(hint)[0]) if is_list else ([value], hint)
    is_short = isinstance(values, list) and len(values) <= _MAX_LIST
    if not is_short or not all(_is(each, kind) for each in values):
        raise _malformed(f"{name} of another form")
    return tuple(values) if is_list else value


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, kind):
        return False
    return not isinstance(value, str) or len(value) <= _MAX_MESSAGE_TEXT


def _malformed(got: str) -> MalformedError:
    return MalformedError(
        f"a Flower message cannot be used: got {got}; expected messages of keyhole, version "
        f"{_VERSION}; run one version of keyhole on the server and on all nodes"
    )


FAILED = 1000
"""Our code of a Flower error, whose reason begins with the name of an error of ours; Flower's own
codes are below."""

_MAX_TEXT = 200  # characters of a reason
_MAX = 8  # sentences of a round
_CODES = {code: name for name, code in vars(ErrorCode).items() if isinstance(code, int)}


def failure_of(error: Error) -> str:
    """Returns what a node that replied with an error did: the kind of the error alone."""
    if error.code == FAILED:
        return f"failed: {told_by_a_node((error.reason or '').partition(':')[0])}"
    return f"failed: {_CODES.get(error.code, 'UNKNOWN').lower().replace('_', ' ')}"


def told_by_a_node(text: str) -> str:
    """Returns a reason that a node gave, in one short line."""
    return "".join(c if c.isprintable() else " " for c in text[:_MAX_TEXT])


def sentences(found: Mapping[tuple[str, str], int]) -> list[str]:
    """Returns one sentence for each `(who, what)`, with how many; the most frequent ones of many.

    >>> sentences({("node", "did not answer"): 2, ("client", "failed: too cold"): 1})
    ['2 nodes did not answer', '1 client failed: too cold']
    """
    by_count = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{n} {who}{'s' * (n > 1)} {what}" for (who, what), n in by_count[:_MAX]]
    rest = sum(n for _, n in by_count[_MAX:])
    return [*told, *([f"{rest} more of other kinds"] if rest else [])]


_LOG = logging.getLogger("flwr.keyhole")


def assign(
    asked: Sequence[int],
    stands_for: Mapping[int, int | None],
    silent: Collection[int] = (),
    at_work: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """Shares out the clients of a round among nodes; returns node -> its clients, for nodes that
    have any. A client that no node stands for is in none.

    Args:
        stands_for: node -> the one client that it is, or None for anyone who is asked.
        silent: nodes that did not answer of late; they are asked only where no other is there.
        at_work: node -> clients it is at work for; those with fewer come first.

    >>> assign([7, 3, 5], {10: 7, 11: None, 12: None})
    {10: [7], 11: [3], 12: [5]}
    """
    heard_first = sorted(stands_for, key=lambda node: (node in silent, node))
    own = {stands_for[node]: node for node in reversed(heard_first)}
    free = [node for node in heard_first if stands_for[node] is None]
    free = [node for node in free if node not in silent] or free
    found: dict[int, list[int]] = {}
    load = Counter(at_work)
    for client in asked:
        node = own.get(client)
        if node is None and free:
            node = min(free, key=load.__getitem__)  # the first of those with the fewest
        if node is not None:
            found.setdefault(node, []).append(client)
            load[node] += 1
    return found


@dataclass
class Nodes:
    """The nodes that a SuperLink knows, and what they have said of themselves.

    Args:
        minimum: how many a round needs.
        poll: seconds between two looks.
        clock: monotonic seconds.
    """

    grid: Grid
    minimum: int = 1
    seconds: float = 120.0
    poll: float = 0.5
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    silent: set[int] = field(default_factory=set)
    _known: dict[int, int | None] = field(default_factory=dict, repr=False)
    _asked: dict[str, int] = field(default_factory=dict, repr=False)  # message -> node
    _failed: dict[int, str] = field(default_factory=dict, repr=False)
    _idle_since: float | None = None  # since when no node stands for those who are asked for

    def __post_init__(self) -> None:
        if self.minimum < 1 or not self.seconds > 0:
            raise InputError(
                f"no round could wait for such nodes: got {self.minimum} nodes within "
                f"{self.seconds} seconds; expected 1 node or more, and seconds above 0; choose "
                "other numbers"
            )

    def for_round(self, asked: Sequence[int]) -> dict[int, list[int]]:
        """Returns node -> its clients, once there are nodes enough; raises CohortError where too
        few came in time, or none of them stands for a client of the round."""

        def is_enough(here: Mapping[int, int | None]) -> bool:
            return len(here) >= self.minimum and bool(assign(asked, here, self.silent))

        return assign(asked, self._wait(asked, is_enough), self.silent)

    def for_some(self, asked: Sequence[int], at_work: Mapping[int, int]) -> dict[int, list[int]]:
        """As `for_round`, but nothing where no node stands for any of these: others will be asked
        for instead, after a pause if no node is `at_work` (node -> clients it is at work for).
        Raises CohortError also where none came that stands for anybody who was asked for, for as
        long as nodes are waited for, while nobody was at work."""
        here = self._wait(asked, lambda here: len(here) >= self.minimum)
        found, now = assign(asked, here, self.silent, at_work), self.clock()
        if found or at_work:
            self._idle_since = None
            return found
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now >= self._idle_since + self.seconds:
            raise self._too_few(here, asked)
        self.sleep(self.poll)
        return {}

    def _wait(
        self, asked: Sequence[int], is_enough: Callable[[Mapping[int, int | None]], bool]
    ) -> dict[int, int | None]:
        until = self.clock() + self.seconds
        self._failed = {}  # anyone who could not answer then may be able to now
        while not is_enough(here := self.look()):
            if self.clock() >= until:
                raise self._too_few(here, asked)
            self.sleep(self.poll)
        return here

    def look(self) -> dict[int, int | None]:
        """Nodes that are online and have said whom they stand for; asks those that are new."""
        online = set(self.grid.get_node_ids())
        self._hear()
        new = online - self._known.keys() - set(self._asked.values()) - self._failed.keys()
        for node in sorted(new):
            message = Message(write(Here()), node, ASK, ttl=self.seconds)
            self._asked.update(dict.fromkeys(self.grid.push_messages([message]), node))
        return {node: client for node, client in self._known.items() if node in online}

    def _hear(self) -> None:
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id, None)
            if node is None:
                continue
            if reply.has_error():
                self._failed[node] = reply.error.reason or "no reason given"
                _LOG.warning("a node cannot take part: %s", self._failed[node])
                continue
            try:
                client = read(reply.content, Here).client
            except MalformedError as error:
                self._failed[node] = str(error)
                continue
            self._known[node] = None if client < 0 else client

    def _too_few(self, here: Mapping[int, int | None], asked: Sequence[int]) -> CohortError:
        """Counts alone: which clients are meant is nobody's business."""
        waiting = len(self._asked)
        if len(here) >= self.minimum:
            return CohortError(
                f"no node stands for a client of this round: got {len(here)} nodes, each for a "
                f"client that was not asked; expected one or more for the {len(asked)} clients of "
                "the round; start nodes for more clients, or nodes without client= in --node-config"
            )
        return CohortError(
            f"too few nodes after {self.seconds:g} seconds: got {len(here)} nodes that can take "
            f"part, {waiting} that have not answered yet, {len(self._failed)} that failed; "
            f"expected {self.minimum} or more; start more SuperNodes, ask for fewer with "
            "min-nodes, or wait longer with node-seconds; the log of a node tells why it failed"
        )
