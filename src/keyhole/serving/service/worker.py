"""A worker's event loop: takes connections until it is told to stop, then lets them finish.

The HTTP protocol is uvicorn's, its server is not: that one sets no limit on the time of a TLS
handshake, nor looks at once whether it is to stop.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from keyhole.serving.service.connections import Connections
from keyhole.serving.service.edge import Application

__all__ = ["BACKLOG", "accept", "allow_many_files"]

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
    connections = Connections(limits, app.metrics, max(1, min(limits.most_connections, room)))
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
