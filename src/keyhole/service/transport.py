"""Serves on sockets: TLS, worker processes that are replaced, an end without lost requests.

A worker can die of what no code catches: a file that shrinks while it is mapped ends all who read
it. So there is always a process above, which answers nothing and therefore lives. A worker takes
connections until it is told to stop, then lets them finish.

uvicorn's supervisor does not do this; docs/decisions/0008-service-libraries.md says why.

Compiled code that queries run is loaded before the first of them: to load it takes a third of a
second, to compile it some seconds, and every query would wait for that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import multiprocessing
import multiprocessing.connection
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeAlias

import numpy as np
import uvloop

from keyhole.arrays import keep_freed_memory
from keyhole.compiled import load_compiler
from keyhole.crypto import merkle
from keyhole.errors import InputError, KeyholeError
from keyhole.service.connections import BACKLOG, accept, allow_many_files
from keyhole.service.metrics import Metrics, MetricsBoard
from keyhole.service.on_demand import SliceSlab
from keyhole.service.reading import MappedTable
from keyhole.service.routes import Application, MetricsApp
from keyhole.signals import stop_on_signals
from keyhole.wire.manifest import SegmentInfo, TableInfo, place_nodes

_SUPERVISE_EVERY = 0.1  # seconds between looks at workers
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 30.0  # seconds before a worker is replaced
_STEADY = 10.0  # seconds after which a worker has not died of its start
_LOG = logging.getLogger("keyhole.service")


@dataclass(frozen=True)
class Listen:
    """Where and how to listen."""

    host: str = "127.0.0.1"
    port: int = 0  # 0 takes any that is free
    certfile: Path | None = None  # PEM file of the certificate chain; None speaks plain HTTP
    keyfile: Path | None = None  # PEM file of its key; None if it is in `certfile`
    client_ca: Path | None = None  # PEM file; clients must show a certificate that it signed
    insecure: bool = False  # allows plain HTTP on an address that others can reach

    def __post_init__(self) -> None:
        if self.certfile is None and (self.keyfile or self.client_ca):
            raise InputError(
                "a key or client authority without a certificate: got no certificate; expected a "
                "certificate with them; pass --tls-cert"
            )

    def tls(self) -> ssl.SSLContext | None:
        """Returns the settings of TLS, 1.2 or newer; None for plain HTTP."""
        if self.certfile is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.certfile, self.keyfile)
            if self.client_ca is not None:
                context.load_verify_locations(self.client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as error:
            raise InputError(
                f"the certificate or its key cannot be used: got {type(error).__name__}; expected "
                "PEM files that belong together; check --tls-cert, --tls-key and --client-ca"
            ) from error
        return context


def bind(listen: Listen) -> socket.socket:
    """Returns a socket that listens; refuses an address that others could reach without TLS."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(listen, "no such address") from error
    is_loopback = ipaddress.ip_address(str(address[0]).split("%", 1)[0]).is_loopback
    if listen.certfile is None and not listen.insecure and not is_loopback:
        raise InputError(
            f"others could read what is sent: got {listen.host} without TLS; expected TLS, or a "
            "loopback address; pass --tls-cert, or --insecure where something in front speaks TLS"
        )
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise _cannot_listen(listen, error.strerror or "refused") from error
    return made


def url_of(listener: socket.socket, listen: Listen) -> str:
    """Returns the URL of a listening socket; its port may have been chosen by the system."""
    scheme = "http" if listen.certfile is None else "https"
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def _cannot_listen(listen: Listen, got: str) -> InputError:
    return InputError(
        f"cannot listen at {listen.host} port {listen.port}: got {got}; expected a free port of "
        "this machine; choose another --host or --port"
    )


Work: TypeAlias = Callable[[int, Callable[[], None], Connection], None]
"""`(place, on_ready, parent)`: one worker, from its start until SIGTERM. It calls `on_ready` once
it can answer; `parent` can be read as soon as the supervisor is gone."""


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
    on_ready: Callable[[], None],
    on_stop: Callable[[], None],
    on_look: Callable[[], None] = lambda: None,
) -> None:
    """Runs workers until SIGTERM or SIGINT, then ends them all.

    They are forked: nothing may run here that a fork would tear apart. A worker that ends before
    all of them could answer ends the service with its error; those that die later are replaced.
    `on_look` is called with every look at them, and must not fail.
    """
    # Workers hold the first end; the second is the supervisor's alone, and closes with it.
    parent, alive = multiprocessing.Pipe(duplex=False)
    start = partial(_start, work, parent, alive)
    with stop_on_signals(every=True) as stop, parent, alive:
        places: list[_Worker] = []
        try:
            places += [start(place) for place in range(workers)]
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
                on_look()
                for one in dead:
                    _LOG.error("a worker is replaced: %s", one.error or _exit_of(one.process))
                for place, one in enumerate(places):
                    if one.is_dead and time.monotonic() >= one.due:
                        places[place] = start(place, one.wait)
        finally:
            on_stop()
            _end([one.process for one in places])


def _start(
    work: Work, parent: Connection, alive: Connection, place: int, wait: float = 0.0
) -> _Worker:
    # Forked: workers inherit the socket and the block of numbers.
    context = multiprocessing.get_context("fork")
    told, tell = context.Pipe(duplex=False)
    process = context.Process(
        target=_begin, args=(work, place, parent, alive, tell), name=f"worker {place}"
    )
    process.start()
    tell.close()
    return _Worker(process, told, time.monotonic(), wait)


def _begin(work: Work, place: int, parent: Connection, alive: Connection, tell: Connection) -> None:
    """In the worker: an error of its start is told, not printed."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_DFL)  # the parent's would let it live
    alive.close()
    try:
        work(place, lambda: tell.send(None), parent)
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
                f"a worker ends before it can answer: got {_exit_of(one.process)}; expected a "
                "worker that lives; see what it printed"
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


def warm_up() -> None:
    """Asks tables of a few bytes for a few keys, in every way in which queries do."""
    keys, halves = np.array([3, 0]), tuple(SegmentInfo(first, 2) for first in (0, 2))
    info = TableInfo("warm-up", 4, None, (), "plain", 0, 4, "", halves)
    records = np.zeros((4, 4), np.uint8)
    load_compiler()
    merkle.find_siblings.load()
    tree = merkle.Tree.of(merkle.hash_leaves(records))
    records.flags.writeable = tree.nodes.flags.writeable = False  # as mapped ones are
    for whole in (None, records):
        MappedTable(info, tree, (records[:2], records[2:]), whole).gather(keys)
    place_nodes(tree.shape, keys)
    SliceSlab(2**62, 4, max_bytes=10**5).claim(keys)  # too many keys for slots of their own


def run(
    make_app: Callable[[Metrics], Application],
    listen: Listen,
    *,
    workers: int = 1,
    metrics: Listen | None = None,
    on_listen: Callable[[str, str], None] = lambda url, metrics_url: None,
    on_look: Callable[[Callable[[], Mapping[str, float]]], None] = lambda totals: None,
) -> None:
    """Serves until SIGTERM or SIGINT; requests under way are answered first.

    Workers share one listening socket: what waits there outlives each of them. One that dies is
    replaced.

    Args:
        make_app: called in each worker, so that workers share no open file.
        workers: processes that answer; one more watches over them.
        metrics: where `/metrics` is, in plain HTTP; a free port of this machine alone if None.
        on_listen: is told the URL of the service and that of its metrics, once all workers can
            answer.
        on_look: is called ten times a second by the process above, with what returns the counts of
            all workers.
    """
    shown = metrics or Listen()
    tls, listener = listen.tls(), bind(listen)
    board = MetricsBoard(workers, is_shared=True)
    with listener, bind(shown) as page:
        urls = url_of(listener, listen), url_of(page, shown) + "/metrics"

        def stop() -> None:  # as workers do: what waits there would never be answered
            listener.close()
            page.close()

        warm_up()  # workers inherit what was compiled
        supervise(
            partial(_work, make_app, (listener, page), tls, board),
            workers,
            on_ready=lambda: on_listen(*urls),
            on_stop=stop,
            on_look=partial(on_look, board.by_name),
        )


@contextmanager
def serving(
    app: Application, listen: Listen | None = None, prepare: Callable[[], None] = warm_up
) -> Iterator[str]:
    """Serves in a thread of this process as long as the context lasts; gives the URL.

    `prepare` is called first: what answers with slices loads compiled code.
    """
    listen = listen or Listen()
    tls, listener = listen.tls(), bind(listen)
    prepare()
    stop, runner = asyncio.Event(), asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def work() -> None:
        with runner:
            runner.run(accept(app, listener, tls, stop))

    loop = runner.get_loop()
    thread = threading.Thread(target=work, name="keyhole service")
    with listener:
        thread.start()
        try:
            yield url_of(listener, listen)
        finally:
            if thread.is_alive():
                loop.call_soon_threadsafe(stop.set)
            thread.join()


def _work(
    make_app: Callable[[Metrics], Application],
    listeners: tuple[socket.socket, socket.socket],
    tls: ssl.SSLContext | None,
    board: MetricsBoard,
    worker: int,
    on_ready: Callable[[], None],
    parent: Connection,
) -> None:
    """One worker, from its start until a signal, or the end of its supervisor."""
    keep_freed_memory()
    allow_many_files()
    app = make_app(Metrics(board, worker))

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            loop.remove_reader(parent.fileno())
            stop.set()

        loop.add_reader(parent.fileno(), end)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, end)
        service, page = listeners
        shown = MetricsApp(app.metrics, app.limits)
        await asyncio.gather(
            accept(app, service, tls, stop, on_ready), accept(shown, page, None, stop)
        )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
