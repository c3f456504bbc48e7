"""Makes responses: JSON, errors of one shape, files with validators and ranges."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping

import msgspec

from keyhole.errors import KeyholeError, RangeError
from keyhole.service.routes import Body, Headers, Request, Response

BINARY = (b"content-type", b"application/octet-stream")
JSON = (b"content-type", b"application/json")
NO_STORE = (b"cache-control", b"no-store")

_RANGE = re.compile(rb"bytes=([0-9]{0,19})-([0-9]{0,19})")
_PIECE = 1 << 18  # bytes of a file that are copied at a time


def json_response(content: Mapping[str, object], status: int = 200) -> Response:
    """An answer that changes from one moment to the next."""
    return Response.of(status, [JSON, NO_STORE], msgspec.json.encode(content))


def error_response(
    error: KeyholeError, retry_after: float | None = None, *more: tuple[bytes, bytes]
) -> Response:
    """The answer to every request that is refused.

    Args:
        error: its four facts become the body; at the server none of them holds a key.
        retry_after: seconds after which to come back, for errors that pass.
        more: headers.

    >>> error_response(KeyholeError("it is late", got="9", allowed="8", fix="wait")).body
    b'{"error":{"status":500,"kind":"KeyholeError","wrong":"it is late",...
    """
    facts = {
        "status": error.http_status,
        "kind": type(error).__name__,
        "wrong": error.wrong,
        "got": error.got,
        "allowed": error.allowed,
        "fix": error.fix,
    }
    headers: Headers = [JSON, NO_STORE, *more]
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.http_status == 405:
        headers.append((b"allow", error.allowed.encode("latin-1")))
    if retry_after is not None:
        headers.append((b"retry-after", str(math.ceil(retry_after)).encode("ascii")))
    return Response.of(error.http_status, headers, msgspec.json.encode({"error": facts}))


def file_response(
    request: Request,
    headers: Headers,
    etag: str,
    length: int,
    read: Callable[[int, int], Body | Iterator[Body]],
) -> Response:
    """An answer of bytes that never change: whole, a part, or a word that the client has them.

    Args:
        request: may carry if-none-match, range and if-range.
        headers: of the whole.
        etag: without quotes.
        length: of the whole.
        read: `(start, stop) -> bytes`, called if they are needed.
    """
    quoted = f'"{etag}"'.encode("ascii")
    headers = [*headers, (b"etag", quoted)]
    if _matches(request.headers.get(b"if-none-match"), quoted):
        return Response(304, headers)
    headers.append((b"accept-ranges", b"bytes"))
    part = None if request.method == "HEAD" else _range_of(request, quoted, length)
    start, stop = part or (0, length)
    if start >= stop and part is not None:
        return error_response(_behind(length), None, (b"content-range", b"bytes */%d" % length))
    if part is not None:
        shown = f"bytes {start}-{stop - 1}/{length}".encode("ascii")
        headers.append((b"content-range", shown))
    body = b"" if request.method == "HEAD" else read(start, stop)
    return Response(200 if part is None else 206, headers, body, stop - start)


def pieces(whole: memoryview, start: int, stop: int) -> Iterator[bytes]:
    """Copies a mapped file piece by piece, so that nothing points into it when it is let go."""
    for at in range(start, stop, _PIECE):
        yield bytes(whole[at : min(at + _PIECE, stop)])


def _matches(given: bytes | None, quoted: bytes) -> bool:
    """Whether if-none-match names the validator; weak comparison, as for every GET."""
    if given is None:
        return False
    return given.strip() == b"*" or quoted in {
        tag.strip().removeprefix(b"W/") for tag in given.split(b",")
    }


def _range_of(request: Request, quoted: bytes, length: int) -> tuple[int, int] | None:
    """The one range that is asked for, empty where it lies behind the end; None for the whole."""
    given = request.headers.get(b"range")
    condition = request.headers.get(b"if-range")
    found = None if given is None else _RANGE.fullmatch(given.strip())
    if found is None or (condition is not None and condition.strip() != quoted):
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        start, stop = max(0, length - int(last)), length
    else:
        start, stop = int(first), min(int(last or length) + 1, length)
        if last and int(last) < start:
            return None
    return start, stop


def _behind(length: int) -> RangeError:
    return RangeError(
        "the range begins behind the end",
        got="another range",
        allowed=f"0..{length - 1}" if length else "none",
        fix="ask for less",
    )
