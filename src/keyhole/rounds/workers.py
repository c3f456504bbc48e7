"""Spreads client training over worker processes, with the bytes of a single process.

Workers are spawned, not forked, build the population themselves from a factory, and receive
one job at a time. A worker that dies is replaced, and its job is done again by another.

XLA sums in another order where it splits a product over threads. What runs in parallel here is
clients, and each of their operations is computed by one thread, in every process that trains: then
bytes do not depend on the machine.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from keyhole.arrays import keep_freed_memory
from keyhole.errors import InputError, WorkerError
from keyhole.parts import own_frames
from keyhole.primitives.report import Report
from keyhole.rounds.clients import ClientJob, Clients

MAX_ATTEMPTS = 3  # at one job, before the job and not the machine is blamed
THREADS = "NPROC"  # read by XLA when it starts


def count_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_one_thread() -> None:
    """Takes effect where JAX has not computed anything yet."""
    os.environ[THREADS] = "1"


class Workers:
    """Processes that train clients; an executor for rounds, and a context that ends them.

    Args:
        factory: makes the population, in each worker; importable by name, so that it can be sent.

    A script that uses workers keeps its own work under `if __name__ == "__main__"`, because each
    worker imports it.
    """

    def __init__(self, factory: Callable[[], Clients], count: int) -> None:
        if count < 1:
            raise InputError(
                f"number of workers is out of range: got {count}; expected 1 or more; pass one"
            )
        self._factory = factory
        self._context = multiprocessing.get_context("spawn")
        self._processes: dict[Connection, BaseProcess] = {}
        for _ in range(count):
            self._start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers."""
        return [process.pid for process in self._processes.values() if process.pid is not None]

    def __call__(self, clients: Clients, jobs: Sequence[ClientJob]) -> list[Report]:
        """Runs jobs on whichever worker is free; returns reports in the order of the jobs.

        Args:
            clients: not used: each worker has its own.

        Raises:
            WorkerError: three workers in a row died of one job.
            Exception: whatever the first client that failed has raised.
        """
        results = [Report(None)] * len(jobs)
        busy: dict[Connection, int] = {}
        try:
            self._work(jobs, results, busy)
        except BaseException:
            for connection in busy:  # else the next call would read this one's answers
                self._processes[connection].terminate()
                self._replace(connection)
            raise
        return results

    def _work(
        self, jobs: Sequence[ClientJob], results: list[Report], busy: dict[Connection, int]
    ) -> None:
        waiting = deque(range(len(jobs)))
        attempts = [0] * len(jobs)
        while waiting or busy:
            for connection in [c for c in self._processes if c not in busy][: len(waiting)]:
                index = busy[connection] = waiting.popleft()
                attempts[index] += 1
                with suppress(OSError):  # of a dead worker: waiting for its answer finds that out
                    connection.send(jobs[index])
            for connection in (c for c in wait(list(busy)) if isinstance(c, Connection)):
                index = busy.pop(connection)
                try:
                    is_update, value = connection.recv()
                except (EOFError, OSError):
                    code = self._replace(connection)
                    self._check_attempts(jobs[index], attempts[index], code)
                    waiting.appendleft(index)
                    continue
                if not is_update:
                    raise value
                results[index] = value

    def close(self) -> None:
        """Ends the workers."""
        for connection, process in self._processes.items():
            connection.close()
            process.terminate()
            process.join()
        self._processes.clear()

    def _start(self) -> None:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(there, self._factory), daemon=True)
        process.start()
        there.close()
        self._processes[here] = process

    def _replace(self, connection: Connection) -> int | None:
        """Starts a worker in place of one that is ending; returns the exit code of that one."""
        process = self._processes.pop(connection)
        process.join()
        connection.close()
        self._start()
        return process.exitcode

    @staticmethod
    def _check_attempts(job: ClientJob, attempts: int, code: int | None) -> None:
        if attempts >= MAX_ATTEMPTS:
            raise WorkerError(
                f"workers die of one client's work: got client {job.client}, {attempts} times, "
                f"exit code {code}; expected an update or an exception; run without workers to see "
                "why; memory may have run out"
            )


def _serve(connection: Connection, factory: Callable[[], Clients]) -> None:
    """The life of a worker."""
    keep_freed_memory()
    set_one_thread()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    clients = factory()
    while True:
        try:
            job: Any = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = True, job.run(clients)
        except Exception as error:  # noqa: BLE001
            # The parent raises it.
            answer = False, portable(error)
        connection.send(answer)


def portable(error: Exception, who: str = "a client", alone: str = "without workers") -> Exception:
    """Returns the error if it survives the way to the parent, with the lines of your own code that
    led to it, or else its words.

    Args:
        who: failed.
        alone: how to run it where the error shows.
    """
    if lines := own_frames(error):
        error.add_note(f"in a worker:\n{lines}")
    try:
        pickle.loads(pickle.dumps(error))  # of this process  # nosec B301
    except Exception:  # noqa: BLE001
        return WorkerError(
            f"{who} failed with an error that does not pickle: got {error!r}; expected a result, "
            f"or an exception that does; run {alone} to see where"
        )
    return error
