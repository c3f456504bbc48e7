"""A call: tasks handed to the workers of a crew until every result is here, whoever dies meanwhile.

A task whose worker is lost is done again, by whoever is free. Three workers lost over one task, and
the task is to blame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from keyhole.engines.ray.board import Board, Task
from keyhole.engines.ray.crew import Crew, Member
from keyhole.engines.ray.worker import LostError
from keyhole.errors import WorkerError
from keyhole.training.workers import MOST_ATTEMPTS

__all__ = ["Call", "Do", "Submit"]

Do: TypeAlias = Callable[..., tuple[Any, Any]]
"""`do(work, *arguments)` calls a worker; returns references to what went wrong and the result."""

Submit: TypeAlias = Callable[[int, Do, list[Any]], tuple[Any, Any]]
"""`(task, do, references to what it takes of others)` hands a task to a worker, as `do` does."""

_DEPTH = 2  # tasks that a worker holds: one at work and the next, whose data travel meanwhile
_TICK = 1.0  # seconds between two looks at who is silent


class Call:
    """The tasks of one call.

    Args:
        ray: the library, connected.
        crew: who does them.
        tasks: what there is to do.
        submit: hands a task to a worker.
        fetch: `(task, result)`, called here with each result that no other task takes.
        did: what clients did in them, for what is told of losses.
    """

    def __init__(
        self,
        ray: Any,
        crew: Crew,
        tasks: Sequence[Task],
        submit: Submit,
        fetch: Callable[[int, Any], None],
        did: str = "trained",
    ) -> None:
        self._ray = ray
        self._crew = crew
        self._tasks = tasks
        self._submit = submit
        self._fetch = fetch
        self._did = did
        self._board = Board(tasks)
        self._attempts = [0] * len(tasks)
        self._results: dict[int, Any] = {}
        self._pending: dict[Any, _Given] = {}

    def run(self) -> None:
        """Does all tasks.

        Raises:
            WorkerError: three workers in a row died of one task.
            Exception: whatever the first client that failed has raised.
        """
        try:
            while not self._board.is_over:
                self._assign()
                self._listen()
        except BaseException:
            self._give_up()
            raise

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
        wrong, result = self._submit(index, do, taken)
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
            self._fetch(index, value)
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
        self._note(who, self._tasks[blamed].clients)
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
        if attempts >= MOST_ATTEMPTS:
            raise WorkerError(
                "workers die of one block of clients",
                got=f"{self._tasks[index].clients} clients, {attempts} times, last: {what}",
                allowed="updates or an exception",
                fix="run without Ray to see why; memory may have run out",
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
