"""Nodes: which of them stands for which client of the population.

A SuperNode that was started with `--node-config "client=7"` is client 7 and nobody else; one
without stands in for whoever is asked, as a laboratory does that has the data of all. The server
asks each node once, when it first sees it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid

from keyhole.engines.flower.messages import ASK, Here, read, write
from keyhole.errors import CohortError, InputError, MalformedError

__all__ = ["Nodes", "assign"]

_LOG = logging.getLogger("flwr.keyhole")


def assign(
    asked: Sequence[int],
    stands_for: Mapping[int, int | None],
    silent: Collection[int] = (),
    at_work: Mapping[int, int] | None = None,
) -> dict[int, list[int]]:
    """Shares out the clients of a round among nodes.

    Args:
        asked: clients of the round.
        stands_for: node -> the one client that it is, or None for whoever is asked.
        silent: nodes that did not answer of late; they are asked only where no other is there.
        at_work: node -> clients it is at work for; those with fewer come first.

    Returns:
        Node -> its clients, for nodes that have any. A client that no node stands for is in none.

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
        grid: of the run.
        least: how many a round needs.
        seconds: how long to wait for so many.
        poll: seconds between two looks.
        clock: monotonic seconds.
        sleep: waits.

    Raises:
        InputError: a number is out of range.
    """

    grid: Grid
    least: int = 1
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
        if self.least < 1 or not self.seconds > 0:
            raise InputError(
                "no round could wait for such nodes",
                got=f"{self.least} nodes within {self.seconds} seconds",
                allowed="1 node or more, and seconds above 0",
                fix="choose other numbers",
            )

    def for_round(self, asked: Sequence[int]) -> dict[int, list[int]]:
        """Returns node -> its clients, once there are nodes enough; waits for them so long.

        Raises:
            CohortError: too few nodes came, or none of them stands for a client of the round.
        """

        def is_enough(here: Mapping[int, int | None]) -> bool:
            return len(here) >= self.least and bool(assign(asked, here, self.silent))

        return assign(asked, self._wait(asked, is_enough), self.silent)

    def for_some(self, asked: Sequence[int], at_work: Mapping[int, int]) -> dict[int, list[int]]:
        """As `for_round`, but nothing where no node stands for any of these: others will be asked
        for instead.

        Args:
            asked: clients of the round.
            at_work: node -> clients it is at work for. If it is for none, there is a pause before
                others are tried.

        Raises:
            CohortError: too few nodes came; or none that stands for anybody who was asked for,
                for so long, while nobody was at work.
        """
        here = self._wait(asked, lambda here: len(here) >= self.least)
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
        self._failed = {}  # whoever could not answer then may be able to now
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
        if new:
            self._ask(sorted(new))
        return {node: client for node, client in self._known.items() if node in online}

    def _ask(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            message = Message(write(Here()), node, ASK, ttl=self.seconds)
            self._asked.update(dict.fromkeys(self.grid.push_messages([message]), node))

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
        if len(here) >= self.least:
            return CohortError(
                "no node stands for a client of this round",
                got=f"{len(here)} nodes, each for a client that was not asked",
                allowed=f"one or more for the {len(asked)} clients of the round",
                fix="start nodes for more clients, or nodes without client= in --node-config",
            )
        return CohortError(
            f"too few nodes after {self.seconds:g} seconds",
            got=f"{len(here)} nodes that can take part, {waiting} that have not answered yet, "
            f"{len(self._failed)} that failed",
            allowed=f"{self.least} or more",
            fix="start more SuperNodes, ask for fewer with least-nodes, or wait longer with "
            "node-seconds; the log of a node tells why it failed",
        )
