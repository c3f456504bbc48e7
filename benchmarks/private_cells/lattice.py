"""Whole requests of clients at one server: bytes, and CPU time of either side."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from resource import RUSAGE_SELF, getrusage

import numpy as np

from harness import Goal
from keyhole.delivery.paths import top_bytes
from keyhole.delivery.pir.database import PirParams
from keyhole.delivery.pir.one_server import MAX_MEMORY, OneServerClient, encode, server_of
from keyhole.delivery.pir.shape import TOGETHER, RingShape
from private_cells.clients import timed
from private_cells.tables import Table

TURNS = 5
CLIENT_GOAL = 0.5  # s
ENCODE_GOAL = 5.0  # s, from nothing
PEAK_GOAL = 6.0  # GB of the process, where the encoded table is in files
BYTES_GOALS = {(10**4, 1000): 12.0, (10**5, 1000): 14.5, (10**6, 1000): 35.0, (10**5, 100): 9.0}
SERVER_GOALS = {(10**5, 1000): 0.35, (10**6, 1000): 2.5}  # s a client


@dataclass(frozen=True)
class Cell:
    """One table and one number of keys; CPU times in seconds, medians over clients.

    Args:
        num_keys: K.
        keys_per_client: m.
        up: bytes of a query.
        down: bytes of its reply.
        hint: bytes of the hint, the same for all clients of a round.
        top: bytes that rows are compared with, likewise.
        broadcast: bytes of all slices.
        in_files: whether the encoded table is read from files.
        encoded: gigabytes of it.
        encode: for the encoded table, made from nothing, in a process that has made one before;
            the first one where it is in files.
        encode_first: of a process that never had the memory.
        few_changed: for the table of the next round, of which 1 % of the rows changed that lie
            together.
        hint_seconds: for the hint.
        read_hint: of the client, once a round.
        ask: of the client until it sends.
        open: of the client with the reply.
        one: of the server for a client alone.
        together: of the server for each of eight clients in one pass.
        peak: gigabytes that the process has taken by then, where the encoded table is in files.
    """

    num_keys: int
    keys_per_client: int
    up: int
    down: int
    hint: int
    top: int
    broadcast: int
    in_files: bool
    encoded: float
    encode: float
    encode_first: float
    few_changed: float
    hint_seconds: float
    read_hint: float
    ask: float
    open: float
    one: float
    together: float
    peak: float

    @property
    def megabytes(self) -> float:
        """Of one client in a round."""
        return (self.up + self.down + self.hint + self.top) / 1e6

    @property
    def client(self) -> float:
        """Seconds of one client in a round."""
        return self.read_hint + self.ask + self.open

    def goals(self) -> list[Goal]:
        case, name = (self.num_keys, self.keys_per_client), f"one server {self._case}"
        goals = [Goal(f"{name}, {CLIENT_GOAL} s over client", CLIENT_GOAL / self.client, 1.0)]
        if case in BYTES_GOALS:
            share, sent = BYTES_GOALS[case] / self.megabytes, 1e6 * self.megabytes
            goals.append(Goal(f"{name}, {BYTES_GOALS[case]} MB over bytes", share, 1.0))
            goals.append(Goal(f"{name}, broadcast over bytes", self.broadcast / sent, 1.0))
        if case in SERVER_GOALS:
            goals += [
                Goal(
                    f"{name}, {SERVER_GOALS[case]} s over server, {how}",
                    SERVER_GOALS[case] / spent,
                    1.0,
                )
                for how, spent in (("alone", self.one), (f"of {TOGETHER}", self.together))
            ]
        if self.in_files:
            goals.append(Goal(f"{name}, {PEAK_GOAL} GB over memory", PEAK_GOAL / self.peak, 1.0))
        if case == (10**5, 1000):
            goals.append(
                Goal(f"{name}, {ENCODE_GOAL} s over encoding", ENCODE_GOAL / self.encode, 1.0)
            )
        return goals

    @property
    def _case(self) -> str:
        return f"K={self.num_keys:.0e} m={self.keys_per_client}"

    def __str__(self) -> str:
        where = "in files" if self.in_files else "in memory"
        return (
            f"ring   {self._case}: {self.megabytes:.2f} MB (up {self.up / 1e6:.2f}, down"
            f" {self.down / 1e6:.2f}, hint {self.hint / 1e6:.2f}), broadcast"
            f" {self.broadcast / 1e6:.0f}; client {self.client:.3f} s; server {self.one:.3f} s,"
            f" {self.together:.3f} each of {TOGETHER}; {self.encoded:.2f} GB {where}, encoded in"
            f" {self.encode:.2f} s (first {self.encode_first:.2f}, 1 % changed"
            f" {self.few_changed:.2f}), hint {self.hint_seconds:.2f} s, peak {self.peak:.1f} GB"
        )


def measure_lattice(table: Table, keys_per_client: int) -> Cell:
    """Clients with random keys, one after the other; what each finds is compared."""
    database = table.database.padded_to(keys_per_client)
    made, first = timed_seconds(lambda: encode(database))
    in_files = made.shape.encoded_bytes > MAX_MEMORY
    again, changed = first, 0.0
    if not in_files:
        del made
        made, again = timed_seconds(lambda: encode(database))
        after = database.rows.copy()
        after[: len(after) // 100] ^= np.uint64(1)
        changed = timed_seconds(lambda: made.encode(after, made.shape, made))[1]
        del after
    server, hint_seconds = timed_seconds(lambda: server_of(database, table=made))
    params = PirParams.decode(server.params)
    shape = RingShape.of(params)
    OneServerClient(params, server.hint)
    client, read_hint = timed_seconds(lambda: OneServerClient(params, server.hint))
    rng, asks, opens, answers = np.random.default_rng(2), [], [], []
    for turn in range(TURNS + 1):
        keys = rng.choice(params.num_keys, keys_per_client, replace=False)
        query, ask = timed_seconds(lambda keys=keys: client.query(keys))
        replies, spent = timed_seconds(lambda q=query: server.answer(q.messages()))
        rows, opened = timed_seconds(
            lambda q=query, r=replies, k=keys: q.decode(r).checked(table.top, k)
        )
        if not np.array_equal(rows.records, table.records[keys]):
            raise SystemExit("a client found other slices than it asked for")
        if turn:  # the first one compiles
            asks.append(ask)
            opens.append(opened)
            answers.append(spent)
    many = [client.query(keys).messages()[0] for _ in range(TOGETHER)]
    together = timed_seconds(lambda: server.answer(many))[1] / TOGETHER
    return Cell(
        params.num_keys,
        keys_per_client,
        shape.query_bytes,
        shape.reply_bytes,
        shape.hint_bytes,
        top_bytes(params.num_keys),
        params.num_keys * table.record_bytes,
        in_files,
        shape.encoded_bytes / 1e9,
        again,
        first,
        changed,
        hint_seconds,
        read_hint,
        *map(statistics.median, (asks, opens, answers)),
        together,
        getrusage(RUSAGE_SELF).ru_maxrss / 1e6 if in_files else 0.0,
    )


def timed_seconds(work):  # type: ignore[no-untyped-def]
    """What a call returns, and its CPU time in seconds."""
    found, spent = timed(work)
    return found, spent / 1e3
