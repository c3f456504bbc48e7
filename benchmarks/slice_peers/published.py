"""The table that all contestants serve: rows of 512 numbers, published as a round."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from keyhole.delivery.sources import sources_of
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.publishing import Publisher
from keyhole.service.segments import records_path, table_path
from keyhole.wire.messages import Ask, encode_query
from slice_peers.load import ask, http_length

WIDTH = 512  # numbers of a slice of 2 KB
RECORD = 4 * WIDTH
SMALL = 4  # bytes of a slice of the other table
_NO_SPLIT = 1 << 40


@dataclass(frozen=True)
class Round:
    """A published round.

    Args:
        directory: of the service.
        id: of the round.
        rows: (K, 2048) bytes, what the large table holds.
        packed: the file that holds just that.
        place: of the large and of the small table in the manifest.
    """

    directory: Path
    id: str
    rows: np.ndarray
    packed: Path
    place: dict[str, int]

    def query(self, keys: np.ndarray, table: str = "row", wants_proof: bool = True) -> bytes:
        """The request for some slices."""
        return query(self.id, self.place[table], keys, wants_proof)

    def check(self, port: int, keys: np.ndarray) -> None:
        """Demands that a server gives the right bytes."""
        answer = ask(port, self.query(keys), http_length)
        if not answer.endswith(self.rows[keys].tobytes()):
            raise RuntimeError("a server gives other slices than were published")


def query(round_id: str, table: int, keys: np.ndarray, wants_proof: bool = True) -> bytes:
    """The request for some slices of a table."""
    body = encode_query([Ask(table, keys, None, wants_proof)])
    head = (
        f"POST /v1/rounds/{round_id}/slices HTTP/1.1\r\nhost: a\r\n"
        f"content-type: application/octet-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def make_state(num_keys: int, has_small: bool = True) -> ServerState:
    """A model of one large table, and one of single numbers if asked for."""
    rng = np.random.default_rng(0)
    model = {"w": rng.standard_normal((num_keys, WIDTH), np.float32)}
    cuts = [Cut(KeySpace("row", num_keys), {"w": 0})]
    if has_small:
        model["b"] = rng.standard_normal(num_keys, np.float32)
        cuts.append(Cut(KeySpace("word", num_keys), {"b": 0}))
    return ServerState.dense(Layout.of(model, *cuts), model, SGD(0.1))


def publish(state: ServerState, directory: Path) -> Round:
    """Publishes the model; one file holds the large table, so that all contestants share it."""
    with Publisher(directory) as publisher:
        published = publisher.publish(
            sources_of(state),
            layout=state.layout,
            number=0,
            step=0,
            durable=False,
            segment_bytes=_NO_SPLIT,
        )
    place = {table.name: at for at, table in enumerate(published.manifest.tables)}
    tables = directory / "rounds" / published.id
    packed = records_path(table_path(tables, place["row"]), 0)
    rows = np.memmap(packed, np.uint8, "r").reshape(-1, RECORD)
    return Round(directory, published.id, rows, packed, place)


def current_round(port: int) -> str:
    """The round that a service has."""
    request = b"GET /v1/rounds/current HTTP/1.1\r\nhost: a\r\n\r\n"
    body = ask(port, request, http_length).partition(b"\r\n\r\n")[2]
    return str(json.loads(body)["round"])
