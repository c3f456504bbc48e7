"""What a client's time tells of how many keys it wanted: few keys and all that it may ask for."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import numpy as np

from harness import Goal
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.one_server import OneServerClient, server_of
from keyhole.delivery.pir.two_server import TwoServerClient, params_of, servers_of
from private_cells.clients import timed
from private_cells.tables import Table, make_table

NUM_KEYS, KEYS_PER_CLIENT, FEW = 20_000, 1000, 5
TURNS = 31


@dataclass(frozen=True)
class Cell:
    """CPU times of a client in ms for 5 keys and for 1,000, in turn: quartiles.

    Args:
        way: how slices are retrieved.
        ask: until it sends: (5 keys, 1,000 keys), three quartiles each.
        open: of the reply, likewise.
        check: of rows with the top, likewise.
    """

    way: str
    ask: tuple[list[float], list[float]]
    open: tuple[list[float], list[float]]
    check: tuple[list[float], list[float]]

    def goals(self) -> list[Goal]:
        return []

    def __str__(self) -> str:
        parts = (("query", self.ask), ("reply", self.open), ("rows", self.check))
        return f"sides  {self.way} K={NUM_KEYS}, {FEW} and {KEYS_PER_CLIENT} keys: " + "; ".join(
            f"{name} "
            + " and ".join(f"{q[1]:.2f} ({q[0]:.2f} to {q[2]:.2f})" for q in both)
            + " ms"
            for name, both in parts
        )


def measure_sides() -> list[Cell]:
    """Clients of one server and of two."""
    table = make_table(NUM_KEYS)
    database = table.database.padded_to(KEYS_PER_CLIENT)
    one = server_of(database)
    single = OneServerClient(PirParams.decode(one.params), one.hint)
    pair = TwoServerClient(params_of(database))
    return [
        _measure("one server", table, [one], single),
        _measure("two servers", table, servers_of(database), pair),
    ]


def _measure(way, table: Table, servers, client) -> Cell:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(4)
    taken: list[tuple[list[list[float]], ...]] = [([], [], []), ([], [], [])]
    for turn in range(TURNS + 1):
        for count, times in zip((FEW, KEYS_PER_CLIENT), taken, strict=True):
            keys = rng.choice(NUM_KEYS, count, replace=False)
            query, ask = timed(lambda k=keys: client.query(k))
            sent = query.messages()
            replies = [s.answer([each])[0] for s, each in zip(servers, sent, strict=True)]
            rows, opened = timed(lambda q=query, r=replies: q.decode(r))
            found, checked = timed(lambda r=rows, k=keys: r.checked(table.top, k))
            if not np.array_equal(found.records, table.records[keys]):
                raise SystemExit("a client found other slices than it asked for")
            if turn:  # the first one compiles
                for kind, spent in zip(times, (ask, opened, checked), strict=True):
                    kind.append(spent)
    quartiles = [tuple(statistics.quantiles(kind, n=4) for kind in times) for times in taken]
    return Cell(way, *zip(*quartiles, strict=True))
