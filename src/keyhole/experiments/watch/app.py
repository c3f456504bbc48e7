"""Serves a page on which the runs and rounds of a folder or a service can be watched.

    GET /                 the page
    GET /watch.js         its script
    GET /api/overview     all runs in a line each, and how rounds stand
    GET /api/run?name=N   everything that is shown of a run

The page asks again every two seconds; an answer that has not changed is sent as 304. It needs no
other host, and its policy forbids it to speak to one. Everything can only be read. Anyone who
reaches the port reads it, so it is at a loopback address unless told otherwise; requests under
another name than the address of the page are refused, so that no other site in a browser can ask.
"""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from collections.abc import Awaitable, Mapping
from hashlib import sha256
from importlib.resources import files
from typing import Protocol
from urllib.parse import parse_qs

import msgspec

from keyhole.errors import InputError, NotFoundError
from keyhole.experiments.watch.folder import Told
from keyhole.service.limits import Limits
from keyhole.service.metrics import Metrics
from keyhole.service.routes import (
    JSON,
    Edge,
    Headers,
    Receive,
    Request,
    Response,
    Route,
    Routes,
    Scope,
    Send,
    health_routes,
    refuse_led_here,
)

_TYPES = {"page.html": b"text/html", "watch.js": b"text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'sha256-{style}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_GUARDS: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]


class Watched(Protocol):
    """What the page shows."""

    def overview(self) -> Told:
        """Returns a line for every run, and how rounds stand."""
        ...


class WatchedRuns(Watched, Protocol):
    """What the page shows, where it has runs."""

    def run(self, name: str) -> Told:
        """Returns everything that is shown of a run; raises InputError where there is none."""
        ...


class WatchApp:
    """The page as an ASGI application.

    Args:
        watched: what it shows.
        runs: the same, where it has runs.
        hosts: names under which it may be asked, beside localhost and addresses.
    """

    def __init__(
        self, watched: Watched, runs: WatchedRuns | None, hosts: frozenset[str] = frozenset()
    ) -> None:
        self.limits, self.metrics = Limits(), Metrics()
        self._watched, self._runs, self._hosts = watched, runs, hosts
        self._lock = asyncio.Lock()  # one look at the folder at a time
        folder = files("keyhole.experiments.watch")
        self._files = {name: (folder / name).read_bytes() for name in _TYPES}
        _, _, style = self._files["page.html"].partition(b"<style>")
        digest = b64encode(sha256(style.partition(b"</style>")[0]).digest()).decode()
        self._policy = (b"content-security-policy", _POLICY.format(style=digest).encode())
        routes = [
            Route("page", ("GET",), "/", self._page),
            Route("script", ("GET",), "/watch.js", self._page),
            Route("overview", ("GET",), "/api/overview", self._overview),
            Route("run", ("GET",), "/api/run", self._run),
            *health_routes(),
        ]
        rng = random.SystemRandom()
        self._edge = Edge(Routes(routes, self.metrics), self.limits, self.metrics, rng)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answers one request."""
        return self._edge(scope, receive, send)

    async def _page(self, request: Request) -> Response:
        refuse_led_here(request, self._hosts)
        name = str(request.scope["path"]).lstrip("/") or "page.html"
        kind = (b"content-type", _TYPES[name] + b"; charset=utf-8")
        return _answer(request, [kind, self._policy, *_GUARDS], self._files[name])

    async def _overview(self, request: Request) -> Response:
        refuse_led_here(request, self._hosts)
        async with self._lock:
            return _told(request, await asyncio.to_thread(self._watched.overview))

    async def _run(self, request: Request) -> Response:
        refuse_led_here(request, self._hosts)
        query = parse_qs(bytes(request.scope["query_string"]).decode("utf-8", "replace"))
        (name, *_) = query.get("name", [""])
        async with self._lock:
            try:
                if self._runs is None:
                    raise InputError("a service has no runs: got a name; expected none; ask none")
                return _told(request, await asyncio.to_thread(self._runs.run, name))
            except InputError as error:
                raise NotFoundError(str(error)) from error


def _told(request: Request, told: Mapping[str, object]) -> Response:
    """Plain values as JSON; the time alone makes no answer a new one."""
    stable = {name: value for name, value in told.items() if name != "now"}
    tag = sha256(msgspec.json.encode(stable)).hexdigest()[:32]
    return _answer(request, [JSON, *_GUARDS], msgspec.json.encode(told), tag)


def _answer(request: Request, headers: Headers, body: bytes, tag: str = "") -> Response:
    """The body, or that it has not changed."""
    quoted = f'"{tag or sha256(body).hexdigest()[:32]}"'.encode("ascii")
    headers = [*headers, (b"etag", quoted)]
    if quoted in request.headers.get(b"if-none-match", b""):
        return Response.of(304, headers, b"")
    return Response.of(200, headers, body)
