"""Serves on sockets: TLS, worker processes, and an end without lost requests.

Compiled code that queries run is loaded before the first of them: to load it takes a third of a
second, to compile it some seconds, and every query would wait for that.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import uvloop

from keyhole.errors import InputError
from keyhole.server.allocator import keep_freed_memory
from keyhole.server.checksums import compiled, sum_records
from keyhole.service.edge import Application
from keyhole.service.mapped import MappedTable
from keyhole.service.metrics import Metrics, MetricsBoard
from keyhole.service.process import BACKLOG, WorkerPipe, accept, allow_many_files, supervise
from keyhole.service.slabs import SliceSlab
from keyhole.wire.manifest import SegmentInfo, TableInfo


def warm_up() -> None:
    """Asks tables of a few bytes for a few keys, in every way in which queries do."""
    keys, halves = np.array([3, 0]), tuple(SegmentInfo(first, 2, "") for first in (0, 2))
    info = TableInfo("warm-up", 4, None, (), "plain", 0, 4, halves)
    records, sums = np.zeros((4, 4), np.uint8), np.zeros(4, np.uint64)
    records.flags.writeable = sums.flags.writeable = False  # as mapped ones are
    parts = (records[:2], records[2:]), (sums[:2], sums[2:])
    for whole in (None, (records, sums)):
        MappedTable(info, *parts, whole).gather(keys)
    SliceSlab(2**62, 4, max_bytes=10**5).claim(keys)  # too many keys for slots of their own
    compiled()
    sum_records(np.zeros((4, 4), np.uint8))


@dataclass(frozen=True)
class Listen:
    """Where and how to listen.

    Args:
        host: name or address.
        port: 0 takes any that is free.
        certfile: PEM file of the certificate chain; None speaks plain HTTP.
        keyfile: PEM file of its key; None if it is in `certfile`.
        client_ca: PEM file; clients must show a certificate that it signed.
        insecure: allows plain HTTP on an address that others can reach.

    Raises:
        InputError: the settings contradict each other.
    """

    host: str = "127.0.0.1"
    port: int = 0
    certfile: Path | None = None
    keyfile: Path | None = None
    client_ca: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.certfile is None and (self.keyfile or self.client_ca):
            raise InputError(
                "a key or client authority without a certificate",
                got="no certificate",
                allowed="a certificate with them",
                fix="pass --tls-cert",
            )

    def tls(self) -> ssl.SSLContext | None:
        """The settings of TLS, 1.2 or newer; None for plain HTTP.

        Raises:
            InputError: a file cannot be used.
        """
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
                "the certificate or its key cannot be used",
                got=type(error).__name__,
                allowed="PEM files that belong together",
                fix="check --tls-cert, --tls-key and --client-ca",
            ) from error
        return context


def bind(listen: Listen) -> socket.socket:
    """Returns a socket that listens.

    Raises:
        InputError: there is no such address, it is taken, or others could reach it without TLS.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _cannot_listen(listen, "no such address") from error
    if listen.certfile is None and not listen.insecure and not _is_loopback(address[0]):
        raise InputError(
            "others could read what is sent",
            got=f"{listen.host} without TLS",
            allowed="TLS, or a loopback address",
            fix="pass --tls-cert, or --insecure where something in front speaks TLS",
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
    """The URL of a listening socket; its port may have been chosen by the system."""
    scheme = "http" if listen.certfile is None else "https"
    host = f"[{listen.host}]" if ":" in listen.host else listen.host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def run(
    make_app: Callable[[Metrics], Application],
    listen: Listen,
    *,
    workers: int = 1,
    on_listen: Callable[[str], None] = lambda _: None,
) -> None:
    """Serves until SIGTERM or SIGINT; requests under way are answered first.

    Workers share one listening socket: what waits there outlives each of them. One that dies is
    replaced.

    Args:
        make_app: called in each worker, so that workers share no open file.
        listen: where.
        workers: processes that answer; one more watches over them.
        on_listen: is told the URL once all workers can answer.

    Raises:
        InputError: it is not possible to listen there.
        KeyholeError: `make_app` fails.
    """
    tls, listener = listen.tls(), bind(listen)
    board = MetricsBoard(workers, is_shared=True)
    with listener:
        warm_up()  # workers inherit what was compiled
        supervise(
            partial(_work, make_app, listener, tls, board),
            workers,
            on_ready=lambda: on_listen(url_of(listener, listen)),
            on_stop=listener.close,  # as workers do: what waits there would wait in vain
        )


@contextmanager
def serving(app: Application, listen: Listen | None = None) -> Iterator[str]:
    """Serves in a thread of this process as long as the context lasts; gives the URL.

    Args:
        app: the service.
        listen: where; a free port of the loopback address by default.
    """
    listen = listen or Listen()
    tls, listener = listen.tls(), bind(listen)
    warm_up()
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
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    board: MetricsBoard,
    worker: int,
    line: WorkerPipe,
) -> None:
    """One worker, from its start until a signal, or the end of its supervisor."""
    keep_freed_memory()
    allow_many_files()
    app = make_app(Metrics(board, worker))

    async def serve() -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:
            loop.remove_reader(line.parent)
            stop.set()

        loop.add_reader(line.parent, end)
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, end)
        await accept(app, listener, tls, stop, line.ready)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())


def _is_loopback(address: object) -> bool:
    return ipaddress.ip_address(str(address).split("%", 1)[0]).is_loopback


def _cannot_listen(listen: Listen, got: str) -> InputError:
    return InputError(
        f"cannot listen at {listen.host} port {listen.port}",
        got=got,
        allowed="a free port of this machine",
        fix="choose another --host or --port",
    )
