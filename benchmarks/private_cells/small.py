"""One query over 262,144 entries of 64 bytes: the shape for which others publish a number."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from harness import Goal
from keyhole.delivery.pir.two_server import TwoServerClient, params_of, servers_of
from private_cells.clients import timed
from private_cells.tables import make_table

ENTRIES, ENTRY_BYTES, TURNS = 262_144, 64, 60
PUBLISHED = 13.0  # queries/s of one thread: Google's library, in the README of GPU-DPF
AHEAD = 10.0  # times


@dataclass(frozen=True)
class Cell:
    """All that one server does for a query: checking, expanding, scanning, sealing.

    Args:
        entries: K.
        entry_bytes: of a slice, without its path.
        per_second: queries of one thread in a CPU-second.
        published: of Google's DPF library, on another machine.
    """

    entries: int
    entry_bytes: int
    per_second: float
    published: float

    def goals(self) -> list[Goal]:
        return [Goal("queries/s over 13 published", self.per_second / self.published, AHEAD)]

    def __str__(self) -> str:
        return (
            f"small  {self.entries} entries of {self.entry_bytes} bytes:"
            f" {self.per_second:.0f} queries/s of one thread; published {self.published:.0f}"
        )


def measure_small() -> Cell:
    """Fresh queries one after the other; each is opened and compared."""
    table = make_table(ENTRIES, ENTRY_BYTES)
    database = table.database.padded_to(1)
    servers = servers_of(database)
    asker, rng, spent = TwoServerClient(params_of(database)), np.random.default_rng(4), []
    for turn in range(TURNS):
        key = rng.integers(0, ENTRIES, 1)
        question = asker.query(key)
        replies = []
        for server, message in zip(servers, question.messages(), strict=True):
            (reply,), ms = timed(lambda s=server, m=message: s.answer([m]))
            replies.append(reply)
            if turn:  # the first one compiles
                spent.append(ms)
        found = question.decode(replies).checked(table.top, key)
        if not np.array_equal(found.records, table.records[key]):
            raise SystemExit("a client found another slice than it asked for")
    return Cell(ENTRIES, ENTRY_BYTES, 1e3 / statistics.median(spent), PUBLISHED)
