"""Whole requests of clients at two servers: bytes, and CPU time of either side."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from harness import Goal
from keyhole.crypto.merkle import HASH_BYTES, TreeShape, proof_length
from keyhole.delivery.base import SelectServer
from keyhole.delivery.paths import top_bytes
from keyhole.delivery.pir.two_server import TwoServerClient, params_of, servers_of
from keyhole.service.limits import Gate
from keyhole.service.passes import Passes
from keyhole.wire.messages import Ask, encode_query
from private_cells.tables import Table

TURNS, TOGETHER = 9, 16
# Two servers answer for 1.3 slots a key of 100 and 1.16 of 1,000, each with a row and its path:
# 2.6 and 2.3 rows a key, a little more than in the clear with its proof where paths are longer than
# a key's part of the proof. Queries are at most 0.15. The top comes once a round, however many
# keys: at most 4,096 hashes.
BYTES_GOALS = {100: 2.7, 1000: 2.4}  # times the clear with its proof: queries and rows
TOP_GOAL = 1 << 17  # bytes
CLIENT_GOAL = 10.0  # ms
SERVER_GOALS = {(10**5, 1000): 46.0, (10**6, 1000): 600.0}  # ms, of the prototype
TOGETHER_GOALS = {(10**5, 1000): 12.0}  # ms
APART = 0.00025  # seconds from one of the queries that come together to the next

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cell:
    """One table and one number of keys; CPU times in ms are medians over clients.

    Args:
        num_keys: K.
        keys_per_client: m.
        up: bytes to both servers.
        down: bytes from both servers, a path with every row.
        top: bytes that rows are compared with, which a device fetches once a round.
        clear: bytes of the plain slice query and its slices.
        proof: bytes of the proof that comes with them in the clear.
        ask: ms of the client until it sends.
        open: ms of the client with the replies.
        server: ms of one server for one client.
        server_together: ms of one server for each of 16 clients whose queries come one after the
            other within 4 ms, at a service.
        passes: that it answered them in.
        first: ms of one server for its first client, which finds the buckets.
    """

    num_keys: int
    keys_per_client: int
    up: int
    down: int
    top: int
    clear: int
    proof: int
    ask: float
    open: float
    server: float
    server_together: float
    passes: int
    first: float

    @property
    def total(self) -> int:
        """Bytes of a client in both directions, the top included."""
        return self.up + self.down + self.top

    def goals(self) -> list[Goal]:
        where = f"K={self.num_keys} m={self.keys_per_client}"
        client, bytes_goal = self.ask + self.open, BYTES_GOALS[self.keys_per_client]
        goals = [
            Goal(
                f"{bytes_goal} x clear with proof over queries and rows {where}",
                bytes_goal * (self.clear + self.proof) / (self.up + self.down),
                1,
            ),
            Goal(f"{TOP_GOAL} bytes over the top {where}", TOP_GOAL / self.top, 1),
            Goal(f"{CLIENT_GOAL:.0f} ms over client work {where}", CLIENT_GOAL / client, 1),
        ]
        bound = SERVER_GOALS.get((self.num_keys, self.keys_per_client))
        if bound:
            goals.append(Goal(f"{bound:.0f} ms over server work {where}", bound / self.server, 1))
        goals.append(
            Goal(f"one pass over those of {TOGETHER} together {where}", 1 / self.passes, 1)
        )
        bound = TOGETHER_GOALS.get((self.num_keys, self.keys_per_client))
        if bound:
            name = f"{bound:.0f} ms over server work, {TOGETHER} together {where}"
            goals.append(Goal(name, bound / self.server_together, 1))
        return goals

    def __str__(self) -> str:
        return (
            f"client K={self.num_keys:.0e} m={self.keys_per_client}: {self.up} bytes up,"
            f" {self.down} down, {self.top} of top:"
            f" {self.total / (self.clear + self.proof):.3f} x clear with proof,"
            f" {self.total / self.clear:.3f} x slices alone; client"
            f" {self.ask:.2f} + {self.open:.2f} ms; server {self.server:.1f} ms,"
            f" {self.server_together:.1f} of {TOGETHER} together in {self.passes} pass"
            f" (first one {self.first:.1f})"
        )


def measure_clients(table: Table, keys_per_client: int) -> Cell:
    """Clients one after the other, then some in one pass; every slice is compared."""
    database = table.database.padded_to(keys_per_client)
    params, servers = params_of(database), servers_of(database)
    asker, rng = TwoServerClient(params), np.random.default_rng(2)
    asks, opens, answers, firsts = [], [], [], []
    for turn in range(TURNS + 1):  # the first one compiles and finds the buckets
        keys = rng.choice(table.database.num_keys, keys_per_client, replace=False)
        messages, ask = timed(lambda keys=keys: asker.query(keys))
        question, messages = messages, messages.messages()
        replies = []
        for server, message in zip(servers, messages, strict=True):
            (reply,), spent = timed(lambda s=server, m=message: s.answer([m]))
            replies.append(reply)
            (answers if turn else firsts).append(spent)
        found, opened = timed(
            lambda q=question, r=replies, k=keys: q.decode(r).checked(table.top, k)
        )
        if not np.array_equal(found.records, table.records[keys]):
            raise SystemExit("a client found other slices than it asked for")
        if turn:
            asks.append(ask)
            opens.append(opened)
    return Cell(
        params.num_keys,
        keys_per_client,
        sum(map(len, messages)),
        sum(map(len, replies)),
        top_bytes(params.num_keys),
        len(encode_query([Ask(0, keys, None)])) + keys_per_client * table.record_bytes,
        HASH_BYTES * proof_length(TreeShape(params.num_keys), np.sort(keys)),
        statistics.median(asks),
        statistics.median(opens),
        statistics.median(answers),
        *_measure_together(asker, servers[0], rng),
        max(firsts),
    )


def _measure_together(
    asker: TwoServerClient, server: SelectServer, rng: np.random.Generator
) -> tuple[float, int]:
    """ms of a service for each of some clients whose queries come together, and in how many passes
    it answered them: medians of three."""
    taken, made = [], []
    for _ in range(4):  # the first one compiles
        keys = [
            rng.choice(asker.params.num_keys, asker.params.max_keys, replace=False)
            for _ in range(TOGETHER)
        ]
        messages = [asker.query(some).messages()[0] for some in keys]
        passes, spent = timed(lambda m=messages: asyncio.run(_ask_together(server, m)))
        taken.append(spent)
        made.append(passes)
    return statistics.median(taken[1:]) / TOGETHER, statistics.median_high(made[1:])


async def _ask_together(server: SelectServer, messages: list[bytes]) -> int:
    """Asks one after the other; returns in how many passes all were answered."""
    made = 0

    def count(passes: int, _: int) -> None:
        nonlocal made
        made += passes

    async def ask(place: int, message: bytes) -> None:
        await asyncio.sleep(place * APART)
        await passes.answer(message)

    passes = Passes(server, Gate(1, TOGETHER), 64, count)
    await asyncio.gather(*(ask(*each) for each in enumerate(messages)))
    return made


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What a call returns, and its CPU time in ms."""
    start = time.process_time()
    result = work()
    return result, 1e3 * (time.process_time() - start)
