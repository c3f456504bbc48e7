"""The board: which task is next for whom, and which must be done again. No Ray, no clock.

Tasks form a small graph: clients are trained in blocks, or in pieces of blocks that hand a sum from
one to the next, and neighbouring sums are merged where they lie. A result lives on the node of the
worker that made it, so losing a node may undo what was done: the board then asks for it once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Board", "Task", "spread_home"]


@dataclass(frozen=True)
class Task:
    """What a worker does in one go.

    Args:
        needs: the tasks whose results it takes, by their place in the list of tasks.
        clients: how many it trains; none if it adds up.
        home: the node that should do it, so that what is merged lies close together; a worker of
            another node takes it rather than being idle.
        is_piece: whether it is short and one of several in a row: done by whoever is free first,
            and by nobody who has something else to do before it.
        after: of a piece, the one before it, whose result it takes at its end. They work at the
            same time, but this one does not begin before that one has.
    """

    needs: tuple[int, ...] = ()
    clients: int = 0
    home: str = ""
    is_piece: bool = False
    after: int | None = None

    @property
    def takes(self) -> tuple[int, ...]:
        """The tasks whose results it takes, at its beginning or its end."""
        return self.needs if self.after is None else (*self.needs, self.after)


class Board:
    """The tasks of one call, and how far they are.

    Args:
        tasks: each takes results of earlier ones only. Those that are taken are `inner`, the others
            the call's.

    >>> board = Board([Task(clients=3, home="a"), Task(clients=2, home="b"), Task((0, 1))])
    >>> board.take("b"), board.take("b"), board.take("b")
    (1, 0, None)
    >>> board.finish(0)
    >>> board.finish(1)
    >>> board.take("a"), board.is_over
    (2, False)
    >>> board.finish(2)
    >>> board.is_over
    True
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.tasks = tasks
        self._queues: dict[str, deque[int]] = {}
        self._begun = [False] * len(tasks)
        self._done = [False] * len(tasks)
        self._wanted_by: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            for need in task.needs:
                self._wanted_by[need].append(index)
            queue = self._queues.setdefault(task.home, deque())
            if not task.needs:
                queue.append(index)
        self.inner = {other for task in tasks for other in task.takes}
        self._open = set(range(len(tasks))) - self.inner

    @property
    def is_over(self) -> bool:
        """Whether every result of the call has been fetched."""
        return not self._open

    def take(self, node: str, is_idle: bool = True) -> int | None:
        """The next task for a worker of `node`: of its own node first, else from the end of the
        longest queue; None if there is nothing to do now, or nothing for one that is not idle."""
        own = self._queues.get(node, deque())
        others = sorted(self._queues.values(), key=len, reverse=True)
        for queue in (own, *map(reversed, others)):
            for index in queue:
                if self._may_begin(index) and (is_idle or not self.tasks[index].is_piece):
                    self._queues[self.tasks[index].home].remove(index)
                    self._begun[index] = True
                    return index
        return None

    def is_done(self, index: int) -> bool:
        """Whether the result of a task is there."""
        return self._done[index]

    def finish(self, index: int) -> None:
        """The result of a task is there; for one of the call's own, it has been fetched."""
        self._done[index] = True
        self._open.discard(index)
        for wanting in self._wanted_by[index]:
            if self._is_ready(wanting):
                # Sums free memory and are short: they go before more training.
                self._queues[self.tasks[wanting].home].appendleft(wanting)

    def put_back(self, index: int) -> None:
        """A task was not done: its worker is gone."""
        self._begun[index] = self._done[index] = False
        self._queues[self.tasks[index].home].appendleft(index)

    def redo(self, index: int) -> int:
        """A task could not be done, or its result is gone with a node: queues it again, and what it
        took of others.

        Returns:
            How many clients are trained again for it.
        """
        task = self.tasks[index]
        self._begun[index] = self._done[index] = False
        if not task.needs:
            self.put_back(index)
        # Queued last, and so taken first: what this one goes on from.
        return task.clients + sum(self.redo(other) for other in task.takes if self._done[other])

    def _may_begin(self, index: int) -> bool:
        after = self.tasks[index].after
        return after is None or self._begun[after]

    def _is_ready(self, index: int) -> bool:
        return not self._done[index] and all(self._done[need] for need in self.tasks[index].needs)


def spread_home(count: int, nodes: Sequence[str]) -> list[str]:
    """A home for each of `count` pieces in a row, so that each node has neighbours.

    Args:
        count: of pieces.
        nodes: the node of each worker; a node with more workers gets more.

    >>> spread_home(5, ["a", "b", "b"])
    ['a', 'a', 'b', 'b', 'b']
    """
    workers = sorted(nodes)
    return [workers[index * len(workers) // count] for index in range(count)]
