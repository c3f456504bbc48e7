"""Lets pages of named origins use a service from a browser: cross-origin resource sharing.

A browser hides an answer from the page that asked unless the service names the origin of the page,
and asks beforehand, by OPTIONS, whether a page may send a token. A service without allowed origins
says nothing of the kind, and no page can use it.

This keeps out nobody but pages in browsers. Tokens decide who is let in, and the service takes no
cookies: a page has no rights but those of the token that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from keyhole.errors import InputError, NotAdmittedError
from keyhole.service.routes import (
    Application,
    Headers,
    Receive,
    Response,
    Scope,
    Send,
    error_response,
    send_response,
)

_METHODS, _HEADERS = b"GET, HEAD, POST", b"authorization, content-type"
_SHOWN = b"etag, keyhole-server, keyhole-signature, retry-after"
_REMEMBERED = b"7200"  # seconds, the most that Chromium keeps
_VARY = (b"vary", b"origin")


def check_origin(text: str) -> str:
    """Returns an origin as browsers write it; raises InputError where it is none.

    >>> check_origin("https://app.example")
    'https://app.example'
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    host = parts.hostname or ""
    shown = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    written = f"{parts.scheme}://{shown}" + ("" if port in (None, usual) else f":{port}")
    if usual is None or not host or written != text:
        raise InputError(
            f"not the origin of a page: got {text!r}; expected scheme, host and port as browsers "
            "write them, such as https://app.example or http://127.0.0.1:8300; name each page's "
            "own, since * would be everybody's"
        )
    return text


class WithOrigins:
    """A service that pages of some origins may use.

    Args:
        app: the service.
        origins: of pages, as browsers write them.
    """

    def __init__(self, app: Application, origins: Iterable[str]) -> None:
        self._app = app
        self._origins = frozenset(check_origin(each).encode("ascii") for each in origins)
        self.limits, self.metrics = app.limits, app.metrics
        self._preflights = self.metrics.route("preflight")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        origin = headers.get(b"origin")
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            response = self._preflight(origin)
            self._preflights.count(response.status, 0.0)
            await send_response(response, scope, send)
            return
        added = self._named(origin)

        async def send_with(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        await self._app(scope, receive, send_with)

    def _named(self, origin: bytes | None) -> Headers:
        """What an answer says of origins: to caches, that others get another answer."""
        if origin not in self._origins or origin is None:
            return [_VARY]
        shown = (b"access-control-expose-headers", _SHOWN)
        return [(b"access-control-allow-origin", origin), shown, _VARY]

    def _preflight(self, origin: bytes | None) -> Response:
        """What a browser asks before it sends a token."""
        if origin not in self._origins:
            refused = NotAdmittedError(
                "pages of this origin may not use the service: got another origin; expected one "
                "that its operator allows; the operator may name it with --allow-origin"
            )
            return error_response(refused, None, _VARY)
        allowed = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", _HEADERS),
            (b"access-control-max-age", _REMEMBERED),
        ]
        return Response(200, [*self._named(origin), *allowed])
