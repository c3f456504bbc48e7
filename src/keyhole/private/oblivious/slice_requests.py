"""What is asked through a relay: one slice at a time, and how long the answers are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import NotFoundError
from keyhole.private.oblivious.binary_http import BinaryRequest, BinaryResponse
from keyhole.private.oblivious.gateway import Handler, Reply
from keyhole.private.oblivious.varints import encode_varint

__all__ = [
    "CHECK_FIELD",
    "TableShape",
    "parse_slice_path",
    "slice_handler",
    "slice_path",
    "slice_reply_bytes",
]

CHECK_FIELD = b"keyhole-check"
"""The field in which a service vouches for a slice: eight hex digits."""

_PATH = re.compile(
    rb"/v1/rounds/([0-9a-f-]{1,64})/tables/(0|[1-9]\d{0,8})/slices/(0|[1-9]\d{0,18})"
)
_CHECK_BYTES = 8


@dataclass(frozen=True)
class TableShape:
    """The public numbers of one table.

    Args:
        table: its place in the round.
        num_keys: K.
        record_bytes: of one slice.
        most_keys: m, to which every client's requests are padded; 0 for a table that is not asked.
    """

    table: int
    num_keys: int
    record_bytes: int
    most_keys: int


def slice_reply_bytes(record_bytes: int) -> int:
    """The length of an answer that holds one slice, before it is sealed."""
    line = 2 + len(CHECK_FIELD) + _CHECK_BYTES
    return 1 + 2 + 1 + line + len(encode_varint(record_bytes)) + record_bytes


def slice_path(round_id: str, table: int, key: int) -> bytes:
    """The path of one slice."""
    return f"/v1/rounds/{round_id}/tables/{table}/slices/{key}".encode("ascii")


def parse_slice_path(request: BinaryRequest) -> tuple[str, int, int]:
    """Returns round, table and key that a request asks for.

    Raises:
        NotFoundError: it asks for something else.
    """
    found = _PATH.fullmatch(request.path) if request.method == b"GET" else None
    if found is None:
        raise NotFoundError(
            "a gateway answers requests for slices only",
            got="another request",
            allowed="GET /v1/rounds/{round}/tables/{table}/slices/{key}",
            fix="ask the service directly for what is no secret",
        )
    round_id, table, key = found.groups()
    return round_id.decode("ascii"), int(table), int(key)


def slice_handler(round_id: str, tables: Sequence[NDArray[np.uint8]]) -> Handler:
    """Answers from tables in memory.

    Args:
        round_id: of the round that they are.
        tables: (K, record_bytes) uint8 each, in the order of the round.
    """

    def answer(request: BinaryRequest) -> Reply:
        asked, table, key = parse_slice_path(request)
        if asked != round_id or table >= len(tables) or key >= len(tables[table]):
            raise NotFoundError(
                "no such slice", got="another", allowed="one of the round", fix="check the round"
            )
        record = tables[table][key]
        return Reply(BinaryResponse(200, (), record.tobytes()), slice_reply_bytes(len(record)))

    return answer
