"""Binary HTTP: requests and responses as bytes that can be sealed (RFC 9292, `message/bhttp`).

Messages are written with known lengths and read in both forms. They are valid as soon as they
exist: what RFC 9292 calls invalid cannot be made, neither by reading nor by writing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from keyhole.crypto.codec import Reader, encode_varint, prefixed
from keyhole.errors import InputError, MalformedError

Fields: TypeAlias = tuple[tuple[bytes, bytes], ...]
"""Header or trailer lines: names in lower case, values."""

_KNOWN_REQUEST, _KNOWN_RESPONSE, _OPEN_REQUEST, _OPEN_RESPONSE = range(4)
_MAX_FIELDS = 256  # of one section: more would only be to keep a reader busy
_MAX_INFORMATIONAL = 16
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VISIBLE = re.compile(rb"[!-~]*")
_CONTROL_NAMES = {b":method", b":scheme", b":authority", b":path", b":status"}


@dataclass(frozen=True, repr=False)
class BinaryRequest:
    """A request; its authority is empty if the Host field has it, or nobody needs it."""

    method: bytes
    path: bytes
    scheme: bytes = b"https"
    authority: bytes = b""
    fields: Fields = ()
    content: bytes = b""
    trailers: Fields = ()

    def __post_init__(self) -> None:
        is_connect = self.method == b"CONNECT"
        if not _TOKEN.fullmatch(self.method):
            raise _invalid("a method")
        if not (_TOKEN.fullmatch(self.scheme) or (is_connect and not self.scheme)):
            raise _invalid("a scheme")
        if not _VISIBLE.fullmatch(self.authority):
            raise _invalid("an authority")
        if not (_VISIBLE.fullmatch(self.path) and (self.path or is_connect)):
            raise _invalid("a path")
        _check_fields(self.fields)
        _check_fields(self.trailers, is_trailer=True)

    def __repr__(self) -> str:
        """A request may say what somebody wants: printing shows its size."""
        return f"BinaryRequest({len(self.path)} bytes of path, {len(self.content)} of content)"


@dataclass(frozen=True)
class Informational:
    """An interim response: a status of 100 to 199, and its header."""

    status: int
    fields: Fields = ()

    def __post_init__(self) -> None:
        if not 100 <= self.status <= 199:
            raise _invalid("an interim status")
        _check_fields(self.fields)


@dataclass(frozen=True, repr=False)
class BinaryResponse:
    """A response with a status of 200 to 599."""

    status: int
    fields: Fields = ()
    content: bytes = b""
    trailers: Fields = ()
    informational: tuple[Informational, ...] = ()

    def __post_init__(self) -> None:
        if not 200 <= self.status <= 599:
            raise _invalid("a status")
        _check_fields(self.fields)
        _check_fields(self.trailers, is_trailer=True)

    def __repr__(self) -> str:
        return f"BinaryResponse({self.status}, {len(self.content)} bytes)"


def encode_request(request: BinaryRequest, length: int | None = None) -> bytes:
    """Returns a request with known lengths, without the empty sections at its end.

    Args:
        length: of the result, which zeros fill up; None for no padding. A message that is padded
            to a length that is public tells nothing by its own.

    >>> encode_request(BinaryRequest(b"GET", b"/", authority=b"example.com")).hex()
    '00034745540568747470730b6578616d706c652e636f6d012f'
    """
    control = (request.method, request.scheme, request.authority, request.path)
    head = encode_varint(_KNOWN_REQUEST) + b"".join(map(prefixed, control))
    rest = _sections(request.fields, request.content, request.trailers)
    return _padded(head + rest, length)


def encode_response(response: BinaryResponse, length: int | None = None) -> bytes:
    """Returns a response with known lengths; `length` and what is raised as for a request.

    >>> encode_response(BinaryResponse(200)).hex()
    '0140c8'
    """
    parts = [encode_varint(_KNOWN_RESPONSE)]
    for one in response.informational:
        parts += [encode_varint(one.status), _field_section(one.fields)]
    parts.append(encode_varint(response.status))
    parts.append(_sections(response.fields, response.content, response.trailers))
    return _padded(b"".join(parts), length)


def decode_request(data: bytes) -> BinaryRequest:
    """Returns the request that `data` holds, in either form."""
    reader = Reader(data)
    framing = reader.varint()
    if framing not in (_KNOWN_REQUEST, _OPEN_REQUEST):
        raise _invalid("the framing of a request")
    method, scheme, authority, path = (reader.prefixed() for _ in range(4))
    fields, content, trailers = _read_sections(reader, framing == _KNOWN_REQUEST)
    return BinaryRequest(method, path, scheme, authority, fields, content, trailers)


def decode_response(data: bytes) -> BinaryResponse:
    """Returns the response that `data` holds, in either form."""
    reader = Reader(data)
    framing = reader.varint()
    if framing not in (_KNOWN_RESPONSE, _OPEN_RESPONSE):
        raise _invalid("the framing of a response")
    read_fields = _read_known_fields if framing == _KNOWN_RESPONSE else _read_open_fields
    interim: list[Informational] = []
    status = reader.varint()
    while 100 <= status <= 199 and len(interim) < _MAX_INFORMATIONAL:
        interim.append(Informational(status, read_fields(reader)))
        status = reader.varint()
    fields, content, trailers = _read_sections(reader, framing == _KNOWN_RESPONSE)
    return BinaryResponse(status, fields, content, trailers, tuple(interim))


def _sections(fields: Fields, content: bytes, trailers: Fields) -> bytes:
    """Header, content and trailer; empty ones at the end need not be written (section 3.8)."""
    parts = [_field_section(fields), prefixed(content), _field_section(trailers)]
    while parts and parts[-1] == b"\0":
        parts.pop()
    return b"".join(parts)


def _field_section(fields: Fields) -> bytes:
    return prefixed(b"".join([prefixed(part) for line in fields for part in line]))


def _padded(data: bytes, length: int | None) -> bytes:
    if length is not None and len(data) > length:
        raise InputError(
            f"a message is longer than all of its kind are to be: got {len(data)} bytes; expected "
            f"{length} bytes; take the length from the longest message that is possible"
        )
    return data if length is None else data.ljust(length, b"\0")


def _read_sections(reader: Reader, is_known: bool) -> tuple[Fields, bytes, Fields]:
    """Header, content, trailer and padding: everything behind the control data."""
    read_fields = _read_known_fields if is_known else _read_open_fields
    fields = read_fields(reader)
    content = b""
    if not reader.at_end:
        content = reader.prefixed() if is_known else b"".join(_read_chunks(reader))
    trailers = read_fields(reader)
    if any(reader.rest()):
        raise _invalid("padding that is not zero")
    return fields, content, trailers


def _read_known_fields(reader: Reader) -> Fields:
    section = Reader(b"" if reader.at_end else reader.prefixed())
    found: list[tuple[bytes, bytes]] = []
    while not section.at_end:
        found.append(_read_line(section, section.varint(), len(found)))
    return tuple(found)


def _read_open_fields(reader: Reader) -> Fields:
    """Lines up to a zero; a section that is missing altogether is empty."""
    found: list[tuple[bytes, bytes]] = []
    if reader.at_end:
        return ()
    while name_length := reader.varint():
        found.append(_read_line(reader, name_length, len(found)))
    return tuple(found)


def _read_line(reader: Reader, name_length: int, count: int) -> tuple[bytes, bytes]:
    if count >= _MAX_FIELDS:
        raise _invalid(f"more than {_MAX_FIELDS} fields")
    return reader.take(name_length).lower(), reader.prefixed()


def _read_chunks(reader: Reader) -> Iterator[bytes]:
    while length := reader.varint():
        yield reader.take(length)


def _check_fields(fields: Sequence[tuple[bytes, bytes]], *, is_trailer: bool = False) -> None:
    """What section 3.6 demands; fields that start with a colon come first, or not at all."""
    may_be_pseudo = not is_trailer
    for name, value in fields:
        is_pseudo = name.startswith(b":")
        may_be_pseudo = may_be_pseudo and is_pseudo
        if is_pseudo and (not may_be_pseudo or name in _CONTROL_NAMES):
            raise _invalid("a pseudo-field")
        if not _TOKEN.fullmatch(name[1:] if is_pseudo else name) or name != name.lower():
            raise _invalid("the name of a field")
        if value != value.strip(b" \t") or set(value) & {0, 10, 13}:
            raise _invalid("the value of a field")


def _invalid(what: str) -> MalformedError:
    return MalformedError(
        f"an invalid message of binary HTTP: got {what}; expected what RFC 9292 calls valid; check "
        "that both sides are of one version"
    )
