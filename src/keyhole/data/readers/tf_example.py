"""tf.train.Example, decoded from the protobuf wire format.

    Example   { Features features = 1; }
    Features  { map<string, Feature> feature = 1; }       an entry is { key = 1; value = 2; }
    Feature   { oneof: BytesList = 1, FloatList = 2, Int64List = 3 }, each { repeated value = 1; }

A field starts with a varint `number << 3 | wire type`; numbers may come packed into one field or
one by one, and fields we do not know are passed over.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np

from keyhole.data.source import bad_file
from keyhole.types import Array

__all__ = ["Feature", "decode_example"]

Feature: TypeAlias = list[bytes] | Array
"""The values of one feature: texts, float32 (n,), or int64 (n,)."""

_VARINT, _BYTES, _FIXED32 = 0, 2, 5
_FIXED = {1: 8, _FIXED32: 4}  # wire type -> bytes
_MOST_VARINT = 10  # bytes of 64 bits, seven in each


def decode_example(message: bytes, path: Path, wanted: Sequence[str] = ()) -> dict[str, Feature]:
    """Decodes one message.

    Args:
        message: a serialized tf.train.Example.
        path: the file it is from, for the error.
        wanted: the features to decode, which saves the time of others; all where it is empty.

    Returns:
        feature name -> its values.

    Raises:
        InputError: the message is cut short or is something else.

    >>> decode_example(bytes.fromhex("0a0c0a0a0a017812051a030a0107"), Path("f"))
    {'x': array([7])}
    """
    if not isinstance(message, bytes):  # a column of SQLite holds values of any type
        got = f"a message of {type(message).__name__}"
        raise bad_file(path, got=got, allowed="serialized tf.train.Example")
    try:
        entries = [_entry(e) for part in _contents(message) for e in _contents(part)]
        return {name: _feature(value) for name, value in entries if not wanted or name in wanted}
    except ValueError as error:
        raise bad_file(path, got=error, allowed="serialized tf.train.Example") from error


def _entry(entry: bytes) -> tuple[str, bytes]:
    """One entry of the map; a missing key or value is the empty one."""
    name, feature = b"", b""
    for number, wire, value in _fields(entry):
        if wire == _BYTES and number == 1:
            name = value
        elif wire == _BYTES and number == 2:
            feature = value
    return name.decode(), feature


def _feature(feature: bytes) -> Feature:
    """The last of the lists counts, as in every oneof."""
    found: Feature = []
    for number, wire, value in _fields(feature):
        if wire != _BYTES or number not in (1, 2, 3):
            continue
        if number == 1:
            found = _contents(value)
        else:
            found = _floats(value) if number == 2 else _integers(value)
    return found


def _floats(values: bytes) -> Array:
    parts = []
    for number, wire, value in _fields(values):
        if number == 1 and wire in (_BYTES, _FIXED32):
            if len(value) % 4:
                raise ValueError(f"{len(value)} bytes of floats")
            parts.append(value)
    return np.frombuffer(b"".join(parts), "<f4")


def _integers(values: bytes) -> Array:
    found: list[int] = []
    for number, wire, value in _fields(values):
        if number != 1:
            continue
        if wire == _VARINT:
            found.append(struct.unpack("<Q", value)[0])
        elif wire == _BYTES:
            at = 0
            while at < len(value):
                integer, at = _varint(value, at)
                found.append(integer)
    return np.array(found, np.uint64).view(np.int64)  # negative numbers are two's complement


def _contents(data: bytes) -> list[bytes]:
    """The contents of every field 1 that holds bytes; all that we look into has that number."""
    return [value for number, wire, value in _fields(data) if number == 1 and wire == _BYTES]


def _fields(data: bytes) -> list[tuple[int, int, bytes]]:
    """Number, wire type and bytes of each field; a varint becomes eight bytes."""
    found = []
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == _VARINT:
            integer, at = _varint(data, at)
            found.append((tag >> 3, wire, struct.pack("<Q", integer)))
            continue
        if wire == _BYTES:
            length, at = _varint(data, at)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(data):
            raise ValueError(f"a field of {length} bytes where {len(data) - at} are left")
        found.append((tag >> 3, wire, data[at : at + length]))
        at += length
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at this place, modulo 2^64, and the place behind it."""
    if at < len(data) and data[at] < 0x80:  # nearly all are one byte
        return data[at], at + 1
    integer = 0
    for count in range(_MOST_VARINT):
        if at + count >= len(data):
            raise ValueError("a number that is cut short")
        byte = data[at + count]
        integer |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return integer & 0xFFFF_FFFF_FFFF_FFFF, at + count + 1
    raise ValueError(f"a number of more than {_MOST_VARINT} bytes")
