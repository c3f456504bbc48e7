"""Starts worker processes, replaces those that die, and ends all together.

A worker can die of what no code catches: a file that shrinks while it is mapped ends all who read
it. So there is always a process above, which answers nothing and therefore lives.

A worker takes connections until it is told to stop, then lets them finish.

The HTTP protocol is uvicorn's, its server is not: that one sets no limit on the time of a TLS
handshake, nor looks at once whether it is to stop.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from keyhole.errors import KeyholeError
from keyhole.service.connections import Connections
from keyhole.service.edge import Application

_SUPERVISE_EVERY = 0.1  # seconds between looks at workers
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 30.0  # seconds before a worker is replaced
_STEADY = 10.0  # seconds after which a worker has not died of its start
_LOG = logging.getLogger("keyhole.service")


@dataclass(frozen=True)
class WorkerPipe:
    """What connects a worker with its supervisor.

    Args:
        ready: called once, when the worker can answer.
        parent: a descriptor that can be read as soon as the supervisor is gone.
    """

    ready: Callable[[], None]
    parent: int


Work: TypeAlias = Callable[[int, WorkerPipe], None]
"""`(place, line)`: one worker, from its start until SIGTERM."""


@dataclass
class _Worker:
    """A process, and what it has said. Its pipe ends with it."""

    process: BaseProcess
    told: Connection
    since: float
    wait: float
    is_ready: bool = False
    is_dead: bool = False
    due: float = 0.0  # when it is to be replaced
    error: KeyholeError | None = None

    def hear(self) -> None:
        """Takes in what it says, or that it is dead."""
        try:
            self.error = self.told.recv()
            self.is_ready = self.error is None
        except EOFError:
            self.process.join()
            self.told.close()
            self.is_dead = True
            now = time.monotonic()
            self.wait = next_wait(self.wait, now - self.since)
            self.due = now + self.wait


def next_wait(wait: float, lived: float) -> float:
    """Seconds until a worker that died is replaced: longer each time one dies soon after its start.

    >>> [next_wait(5.0, lived=60.0), next_wait(0.1, lived=0.5), next_wait(30.0, lived=0.5)]
    [0.1, 0.2, 30.0]
    """
    return _FIRST_WAIT if lived >= _STEADY else min(max(_FIRST_WAIT, 2 * wait), _LONGEST_WAIT)


def supervise(
    work: Work,
    workers: int,
    *,
    on_ready: Callable[[], None] = lambda: None,
    on_stop: Callable[[], None] = lambda: None,
) -> None:
    """Runs workers until SIGTERM or SIGINT, then ends them all.

    Args:
        work: called in each process. They are forked: nothing may run here that a fork would tear
            apart.
        workers: how many.
        on_ready: called when all of them can answer.
        on_stop: called before they are told to end.

    Raises:
        KeyholeError: one ends before it ever could answer. Those that die later are replaced.
    """
    with _stop_signals() as stop, _pipe() as parent:
        places: list[_Worker] = []
        try:
            places += [_start(work, place, parent) for place in range(workers)]
            while not all(one.is_ready for one in places):
                _hear(places)
                if stop.is_set():  # asked after the wait: a signal may have ended workers as well
                    return
                _check_start(places)
            on_ready()
            while True:
                dead = _hear(places)
                if stop.is_set():
                    return
                for one in dead:
                    _LOG.error("a worker is replaced: %s", one.error or _exit_of(one.process))
                for place, one in enumerate(places):
                    if one.is_dead and time.monotonic() >= one.due:
                        places[place] = _start(work, place, parent, one.wait)
        finally:
            on_stop()
            _end([one.process for one in places])


def _start(work: Work, place: int, parent: tuple[int, int], wait: float = 0.0) -> _Worker:
    # Forked: workers inherit the socket and the block of numbers.
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(
        target=_begin, args=(work, place, parent, tell), name=f"worker {place}"
    )
    process.start()
    tell.close()
    return _Worker(process, told, time.monotonic(), wait)


def _begin(work: Work, place: int, parent: tuple[int, int], tell: Connection) -> None:
    """In the worker: an error of its start is told, not printed."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)  # the parent's would let it live
    os.close(parent[1])
    try:
        work(place, WorkerPipe(lambda: tell.send(None), parent[0]))
    except KeyholeError as error:
        tell.send(error)


def _hear(places: Sequence[_Worker]) -> list[_Worker]:
    """Waits a moment for workers to say something; returns those that have died."""
    living = [one for one in places if not one.is_dead]
    ready = multiprocessing.connection.wait([one.told for one in living], timeout=_SUPERVISE_EVERY)
    for one in living:
        if one.told in ready:
            one.hear()
    return [one for one in living if one.is_dead]


def _check_start(places: Sequence[_Worker]) -> None:
    for one in places:
        if one.error is not None:
            raise one.error
        if one.is_dead:
            raise KeyholeError(
                "a worker ends before it can answer",
                got=_exit_of(one.process),
                allowed="a worker that lives",
                fix="see what it printed",
            )


def _exit_of(process: BaseProcess) -> str:
    code = process.exitcode or 0
    return f"exit status {code}" if code >= 0 else signal.Signals(-code).name


def _end(processes: Sequence[BaseProcess]) -> None:
    """Tells workers to end until they have: one that was just starting may not have heard."""
    while any(process.is_alive() for process in processes):
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(timeout=1.0)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = {each: signal.signal(each, lambda *_: stop.set()) for each in signals}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """Workers hold the first end; the second is the supervisor's alone, and closes with it."""
    ends = os.pipe()
    try:
        yield ends
    finally:
        for end in ends:
            os.close(end)


BACKLOG = 4096
"""Connections that may wait to be accepted: with fewer, a herd of devices loses some."""

_OTHER_FILES = 128  # descriptors that are kept for rounds, updates and the process itself
_LOOK_EVERY = 0.02  # seconds between looks at what is still under way


def allow_many_files() -> None:
    """Lets this process have as many descriptors as the system allows; shells ask for 1024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def accept(
    app: Application,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    stop: asyncio.Event,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until `stop` is set and requests under way are answered, or out of time.

    Args:
        app: the service.
        listener: of the connections; closed when no more are taken.
        tls: None for plain HTTP.
        stop: ends it.
        on_ready: called when connections are taken.
    """
    limits, state, loop = app.limits, ServerState(), asyncio.get_running_loop()
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    connections = Connections(limits, app.metrics, max(1, min(limits.max_connections, room)))
    config = _config(app)
    server = await loop.create_server(
        lambda: connections.make(config=config, server_state=state, app_state={}),
        sock=listener,
        ssl=tls,
        backlog=BACKLOG,
        ssl_handshake_timeout=None if tls is None else limits.head_seconds,
    )
    watch = loop.create_task(connections.watch())
    on_ready()
    await stop.wait()
    server.close()
    listener.close()
    for connection in list(state.connections):
        connection.shutdown()
    deadline = loop.time() + limits.drain_seconds
    while (state.connections or state.tasks) and loop.time() < deadline:
        await asyncio.sleep(_LOOK_EVERY)
    watch.cancel()
    connections.cut_off_all()


def _config(app: Application) -> uvicorn.Config:
    """What uvicorn's protocol asks for: the app, and how long a connection may rest."""
    config = uvicorn.Config(
        cast("Any", app),
        http=HttpToolsProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=cast("int", app.limits.idle_seconds),
    )
    config.load()
    return config
