"""Decides which task is next for whom and which must be done again, and hands tasks out.

Tasks form a small graph: clients are trained in blocks, or in pieces of blocks that hand a sum from
one to the next, and neighbouring sums are merged where they lie. A result lives on the node of the
worker that made it, so losing a node may undo what was done: the board then asks for it again.

Cuts decide who works, never what comes out: sums are made of the same blocks in the same pairs.

A call hands tasks to workers until every result is here. A task whose worker is lost is done again
by a free one. Three workers lost over one task, and the task is to blame.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from keyhole.engines.ray.crew import Crew, LostError, Member
from keyhole.errors import WorkerError
from keyhole.rounds.workers import MAX_ATTEMPTS
from keyhole.server.row_sums import BLOCK

Kind: TypeAlias = Literal["choose", "train", "train_and_add", "merge"]
"""Keys of some clients; updates of some jobs; the sum of a few blocks of jobs, or of one up to a
piece of it; sums of neighbours."""


@dataclass(frozen=True)
class WorkTask:
    """What a worker does in one go.

    Args:
        jobs: places of its jobs, or of the clients that choose; none for a merge.
        needs: the tasks whose results it takes, by their place in the list of tasks.
        home: the node that should do it, so that what is merged lies close together; a worker of
            another node takes it rather than being idle.
        is_piece: whether it is short and one of several in a row: done by anyone who is free first,
            and by nobody who has something else to do before it.
        after: of a piece, the one before it, whose result it takes at its end. They work at the
            same time, but this one does not begin before that one has.
    """

    kind: Kind
    jobs: range = range(0)
    needs: tuple[int, ...] = ()
    home: str = ""
    is_piece: bool = False
    after: int | None = None

    @property
    def takes(self) -> tuple[int, ...]:
        """The tasks whose results it takes, at its beginning or its end."""
        return self.needs if self.after is None else (*self.needs, self.after)


class TaskBoard:
    """The tasks of one call, and how far they are.

    Args:
        tasks: each takes results of earlier ones only. Those that are taken are `inner`, the others
            the call's.

    >>> first, second = WorkTask("train", range(3), home="a"), WorkTask("train", range(3, 5))
    >>> board = TaskBoard([first, second, WorkTask("merge", needs=(0, 1))])
    >>> board.take("a"), board.take("a"), board.take("a")
    (0, 1, None)
    >>> board.finish(0)
    >>> board.finish(1)
    >>> board.take("a"), board.is_over
    (2, False)
    >>> board.finish(2)
    >>> board.is_over
    True
    """

    def __init__(self, tasks: Sequence[WorkTask]) -> None:
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
        """Returns the next task for a worker of `node`: of its own node first, else from the end of
        the longest queue; None if there is nothing to do now, or nothing for one that is not
        idle."""
        own = self._queues.get(node, deque())
        others = sorted(self._queues.values(), key=len, reverse=True)
        for queue in (own, *map(reversed, others)):
            for index in queue:
                task = self.tasks[index]
                may_begin = task.after is None or self._begun[task.after]
                if may_begin and (is_idle or not task.is_piece):
                    self._queues[task.home].remove(index)
                    self._begun[index] = True
                    return index
        return None

    def is_done(self, index: int) -> bool:
        """Returns whether the result of a task is there."""
        return self._done[index]

    def finish(self, index: int) -> None:
        """The result of a task is there; for one of the call's own, it has been fetched."""
        self._done[index] = True
        self._open.discard(index)
        for wanting in self._wanted_by[index]:
            task = self.tasks[wanting]
            if not self._done[wanting] and all(self._done[need] for need in task.needs):
                # Sums free memory and are short: they go before more training.
                self._queues[task.home].appendleft(wanting)

    def put_back(self, index: int) -> None:
        """A task was not done: its worker is gone."""
        self._begun[index] = self._done[index] = False
        self._queues[self.tasks[index].home].appendleft(index)

    def redo(self, index: int) -> int:
        """Queues a task again that could not be done, or whose result is gone with a node, and what
        it took of others; returns how many clients are trained again for it."""
        task = self.tasks[index]
        self._begun[index] = self._done[index] = False
        if not task.needs:
            self.put_back(index)
        # Queued last, and so taken first: what this one goes on from.
        return len(task.jobs) + sum(self.redo(other) for other in task.takes if self._done[other])


def spread_home(count: int, nodes: Sequence[str]) -> list[str]:
    """Returns a home for each of `count` pieces in a row, so that each node has neighbours; one
    that is the node of more workers gets more.

    >>> spread_home(5, ["a", "b", "b"])
    ['a', 'a', 'b', 'b', 'b']
    """
    workers = sorted(nodes)
    return [workers[index * len(workers) // count] for index in range(count)]


_ROUNDS = 2  # tasks per worker that make up for unequal clients
_TASKS = 4  # the same where a task has several blocks
_MAX_BLOCKS = 4  # of a task
_MAX_SUMS = 8  # that come from one node as they are: on one machine, the driver merges no slower
_MAX_CHOICES = 8 * BLOCK  # clients that choose in one task
_LAST_PIECE = BLOCK // 4  # clients of a task when there are few left: workers then end together


def tasks_of_choices(count: int, nodes: Sequence[str]) -> list[WorkTask]:
    """Lets `count` clients choose keys, which is short: few tasks. `nodes` has that of each worker,
    here and below."""
    pieces = _cut(range(count), min(_MAX_CHOICES, _share(count, len(nodes), rounds=1)))
    return _spread("choose", pieces, nodes)


def tasks_of_updates(count: int, nodes: Sequence[str]) -> list[WorkTask]:
    """Trains `count` jobs, with an update of each as the result."""
    return _spread("train", _cut(range(count), min(BLOCK, _share(count, len(nodes)))), nodes)


def _spread(kind: Kind, pieces: Sequence[range], nodes: Sequence[str]) -> list[WorkTask]:
    """A task for each piece, neighbours on the same node."""
    pairs = zip(pieces, spread_home(len(pieces), nodes), strict=True)
    return [WorkTask(kind, piece, home=home) for piece, home in pairs]


def tasks_of_sums(count: int, nodes: Sequence[str]) -> list[WorkTask]:
    """Trains `count` jobs, with sums of neighbouring blocks as results, in order.

    With fewer blocks than keep all workers busy, a block is trained by several workers at a time,
    and the sum of its first clients handed from one to the next. With many, that goes for the last
    blocks, one for each worker; the others are trained a few at a time, and runs of them merged on
    their node, so that two sums or so come from each node, however many clients there are.
    """
    blocks = _cut(range(count), BLOCK)
    length = _power_of_two_below(len(blocks) / (_ROUNDS * len(set(nodes))))
    few = min(_MAX_BLOCKS, _power_of_two_below(len(blocks) / (_TASKS * len(nodes))))
    runs = [blocks[at : at + length] for at in range(0, len(blocks), length)]
    is_split = len(blocks) < _ROUNDS * len(nodes)
    rounds = 1 if count <= BLOCK else _ROUNDS  # a piece costs as much as two clients
    small = _share(count, len(nodes), rounds) if is_split else _LAST_PIECE
    last = 0 if is_split else count - BLOCK * len(nodes)
    tasks: list[WorkTask] = []
    for run, home in zip(runs, spread_home(len(runs), nodes), strict=True):
        cuts = _cut_run(run, few, last, small)
        homes = spread_home(len(cuts), nodes) if is_split else [home] * len(cuts)
        ends = [_add_pieces(tasks, *pair) for pair in zip(cuts, homes, strict=True)]
        if len(ends) > (1 if len(set(nodes)) > 1 else _MAX_SUMS):
            tasks.append(WorkTask("merge", needs=tuple(ends), home=home))
    return tasks


def _cut_run(run: Sequence[range], few: int, last: int, small: int) -> list[list[range]]:
    """Blocks a few in one piece, and from `last` on each in several of size `small`."""
    cuts: list[list[range]] = []
    for at in range(0, len(run), few):
        own = run[at : at + few]
        is_whole = own[-1].start < last
        whole = [range(own[0].start, own[-1].stop)]
        cuts += [whole] if is_whole else [_cut(block, small) for block in own]
    return cuts


def _add_pieces(tasks: list[WorkTask], pieces: Sequence[range], home: str) -> int:
    """Appends tasks, one after the other; returns the place of the one that has their sum."""
    is_piece = len(pieces) > 1
    for piece in pieces:
        after = len(tasks) - 1 if piece is not pieces[0] else None
        tasks.append(WorkTask("train_and_add", piece, (), home, is_piece, after))
    return len(tasks) - 1


def _share(count: int, workers: int, rounds: int = _ROUNDS) -> int:
    """Jobs of a piece such that every worker gets this many pieces."""
    return max(1, -(-count // (rounds * workers)))


def _cut(jobs: range, size: int) -> list[range]:
    return [jobs[at : at + size] for at in range(0, len(jobs), size)]


def _power_of_two_below(value: float) -> int:
    return 1 << max(int(value).bit_length() - 1, 0)


Do: TypeAlias = Callable[..., tuple[Any, Any]]
"""`do(work, *arguments)` calls a worker; returns references to what went wrong and the result."""

Submit: TypeAlias = Callable[[WorkTask, Do, list[Any]], tuple[Any, Any]]
"""`(task, do, references to what it takes of others)` hands a task to a worker, as `do` does."""

_DEPTH = 2  # tasks that a worker holds: one at work and the next, whose data travel meanwhile
_TICK = 1.0  # seconds between two looks at who is silent


class Call:
    """The tasks of one call.

    Args:
        submit: hands a task to a worker.
        did: what clients did in them, for what is told of losses.
    """

    def __init__(
        self, crew: Crew, tasks: Sequence[WorkTask], submit: Submit, did: str = "trained"
    ) -> None:
        self._ray = crew.ray
        self._crew = crew
        self._tasks = tasks
        self._submit = submit
        self._did = did
        self._board = TaskBoard(tasks)
        self._attempts = [0] * len(tasks)
        self._results: dict[int, Any] = {}  # references
        self._found: dict[int, Any] = {}
        self._pending: dict[Any, _Given] = {}

    def run(self) -> list[Any]:
        """Does all tasks; returns the results that no other task takes, in order. Raises
        WorkerError where three workers in a row died of one, and whatever the first client that
        failed has raised."""
        try:
            while not self._board.is_over:
                self._assign()
                self._listen()
        except BaseException:
            self._give_up()
            raise
        return [self._found[index] for index in sorted(self._found)]

    def _assign(self) -> None:
        """Gives every worker one task before any gets a second."""
        for depth in range(1, _DEPTH + 1):
            for member in self._crew.ready():
                if len(member.tasks) < depth:
                    index = self._board.take(member.node, is_idle=not member.tasks)
                    if index is not None:
                        self._give(member, index)

    def _give(self, member: Member, index: int) -> None:
        do = member.actor.do.options(num_returns=2).remote
        taken = [self._results[other] for other in self._tasks[index].takes]
        wrong, result = self._submit(self._tasks[index], do, taken)
        self._results[index] = result
        self._pending[wrong] = _Given(index, member, result, taken)
        if not member.tasks:
            member.since = time.monotonic()
        member.tasks.append(index)

    def _listen(self) -> None:
        """Waits for the next news, of a task or of a worker that starts."""
        starting = self._crew.starting
        heard, _ = self._ray.wait([*self._pending, *starting], num_returns=1, timeout=_TICK)
        for reference in heard:
            if reference in self._pending:
                self._hear(reference)
            else:
                self._crew.welcome(reference)
        self._excuse_waiting()
        self._crew.end_silent(time.monotonic())

    def _excuse_waiting(self) -> None:
        """The time of a worker begins when what its task goes on from is there."""
        for member in self._crew.ready():
            after = self._tasks[member.tasks[0]].after if member.tasks else None
            if after is not None and not self._board.is_done(after):
                member.since = time.monotonic()

    def _hear(self, reference: Any) -> None:
        given = self._pending.pop(reference)
        index, member = given.task, given.member
        is_inner = index in self._board.inner
        errors = self._ray.exceptions
        try:
            error = self._ray.get(reference)
            if isinstance(error, LostError):
                self._go_back(given)
                return
            if error is not None:
                member.tasks.remove(index)
                raise error
            value = None if is_inner else self._ray.get(given.result, timeout=self._crew.patience)
        except errors.RayActorError:
            self._lose(member)
            return
        except errors.RayError as failure:
            member.tasks.remove(index)
            self._spoil(index, failure)
            return
        member.tasks.remove(index)
        member.since = time.monotonic()
        if not is_inner:
            self._found[index] = value
            del self._results[index]
        self._board.finish(index)
        for other in self._tasks[index].takes:  # nobody takes them any more
            self._results.pop(other, None)

    def _lose(self, member: Member) -> None:
        """A worker is gone: the task that it worked on is to blame, those behind it are not."""
        self._pending = {
            r: given for r, given in self._pending.items() if given.member is not member
        }
        is_node_lost = self._crew.replace(member)
        blamed = member.tasks[0]
        self._attempts[blamed] += 1
        for index in reversed(member.tasks):
            self._board.put_back(index)
        who = "worker lost with its node" if is_node_lost else "worker lost"
        self._note(who, len(self._tasks[blamed].jobs))
        self._check_attempts(blamed, who)

    def _go_back(self, given: _Given) -> None:
        """A worker that is well found nothing to go on from: who had that is lost, or its node."""
        given.member.tasks.remove(given.task)
        given.member.since = time.monotonic()
        for other in list(self._pending.values()):
            if other.result in given.taken:
                self._lose(other.member)
        self._spoil(given.task, LostError())

    def _spoil(self, index: int, failure: Exception) -> None:
        """A task could not be done, or its result is gone, though its worker lives: what it takes
        lay on a node that is lost."""
        self._attempts[index] += 1
        self._note("results lost", self._board.redo(index))
        self._check_attempts(index, type(failure).__name__)

    def _note(self, what: str, clients: int) -> None:
        again = f"{clients} clients {self._did} again" if clients else "a sum was added up again"
        self._crew.incidents.append(f"{what}: {again}")

    def _check_attempts(self, index: int, what: str) -> None:
        attempts = self._attempts[index]
        if attempts >= MAX_ATTEMPTS:
            raise WorkerError(
                f"workers die of one block of clients: got {len(self._tasks[index].jobs)} clients, "
                f"{attempts} times, last: {what}; expected updates or an exception; run without "
                "Ray to see why; memory may have run out"
            )

    def _give_up(self) -> None:
        """Takes back what has not begun; what has begun ends unheard."""
        for reference, given in self._pending.items():
            given.member.tasks.clear()
            with suppress(self._ray.exceptions.RayError, ValueError, TypeError):
                self._ray.cancel(reference)
        self._pending.clear()


@dataclass(frozen=True)
class _Given:
    """A task at a worker, references to its result and to what it takes of others."""

    task: int
    member: Member
    result: Any
    taken: list[Any]
