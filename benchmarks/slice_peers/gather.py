"""Slices of scattered keys: the service beside nginx, Redis and a bare event loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

import numpy as np

from harness import Goal, progress
from slice_peers import nginx, redis
from slice_peers.contest import Contestant, Score, compare, contestant, http_contestant
from slice_peers.load import ask, http_length
from slice_peers.processes import free_port, script, serving
from slice_peers.published import RECORD, SMALL, Round

REQUESTS, SLOW_REQUESTS = 256, 48  # different ones, of fast and of slow contestants
KEYS_PER_CLIENT = (100, 1000)
OF_NGINX = {100: 0.15, 1000: 0.35}
TIMES_AT_1000 = {"bare loop": 0.8, "nginx ranges": 2.0, "nginx per slice": 5.0, "Redis MGET": 2.0}
WIRE, WIRE_SMALL = 1.01, 1.05  # of answers without a proof
PROVED = (10**5, 1000)  # where proofs are held to a price: K and m
PROOF_BYTES, PROOF_CPU = 1.12, 1.25  # of the slices, and of the same answer without a proof


@dataclass(frozen=True)
class Cell:
    """One K and m; scores by contestant."""

    num_keys: int
    keys_per_client: int
    scores: dict[str, Score]

    def ratio(self, name: str) -> float:
        """How many times the work of another the service does in a CPU-second."""
        return self.scores["keyhole"].per_cpu_second / self.scores[name].per_cpu_second

    def over_ideal(self, name: str) -> float:
        """Bytes of an answer over those of its slices."""
        return self.scores[name].answer_bytes / (self.keys_per_client * RECORD)

    def goals(self) -> list[Goal]:
        m = self.keys_per_client
        where = f"K={self.num_keys:.0e} m={m}"
        bounds = {"nginx files": OF_NGINX[m], **(TIMES_AT_1000 if m == 1000 else {})}
        found = [
            Goal(f"{where} work of {name}", self.ratio(name), bound)
            for name, bound in bounds.items()
            if name in self.scores
        ]
        bare = 1 / self.over_ideal("no proofs")
        found.append(Goal(f"{where} ideal bytes over sent without a proof", bare, 1 / WIRE))
        if (self.num_keys, m) == PROVED:
            proved = 1 / self.over_ideal("keyhole")
            found.append(Goal(f"{where} ideal bytes over sent with proof", proved, 1 / PROOF_BYTES))
            cpu = self.ratio("no proofs")
            found.append(Goal(f"{where} work with proofs over without", cpu, 1 / PROOF_CPU))
        return found


@dataclass(frozen=True)
class SmallSlices:
    """Bytes of an answer of 4-byte slices over the bytes of its slices, without a proof and with
    it, and over those of the whole table."""

    keys_per_client: int
    over_ideal: float
    proved_over_ideal: float
    proved_over_table: float

    def goals(self) -> list[Goal]:
        name = f"4-byte slices m={self.keys_per_client} ideal bytes over sent without a proof"
        return [Goal(name, 1 / self.over_ideal, 1 / WIRE_SMALL)]


@dataclass(frozen=True)
class Servers:
    """Port and process of every server that is there."""

    keyhole: tuple[int, int]
    bare: tuple[int, int]
    nginx: tuple[int, int] | None
    redis: tuple[int, int] | None


@contextmanager
def servers(published: Round, root: Path) -> Iterator[Servers]:
    """All servers over one table."""
    with ExitStack() as stack:
        ours, bare = free_port(), free_port()
        command = script("service", "files", ours, published.directory)
        keyhole = (ours, stack.enter_context(serving(command, ours)))
        command = script("bare", bare, published.packed, RECORD)
        loop = (bare, stack.enter_context(serving(command, bare)))
        web = store = None
        if nginx.find():
            (root / "packed").mkdir()
            (root / "packed" / "rows").hardlink_to(published.packed)
            web = stack.enter_context(nginx.nginx(root))
        if redis.find():
            progress(f"Redis is filled with {len(published.rows)} slices")
            store = stack.enter_context(redis.redis(root, published.rows))
        yield Servers(keyhole, loop, web, store)


def measure(
    pool: Pool, published: Round, root: Path, running: Servers, seconds: float
) -> Iterator[Cell]:
    """All contestants, for each number of keys."""
    slices = nginx.write_slices(root, published.rows) if running.nginx else None
    for m in KEYS_PER_CLIENT:
        num_keys = len(published.rows)
        progress(f"gather, K={num_keys:.0e}, m={m}")
        rng = np.random.default_rng([num_keys, m])
        keys = [rng.integers(0, num_keys, m) for _ in range(REQUESTS)]
        queries = [published.query(one) for one in keys]
        for port, _ in (running.keyhole, running.bare):
            published.check(port, keys[0])
        contestants = {
            "keyhole": http_contestant(running.keyhole, queries),
            "no proofs": http_contestant(
                running.keyhole, [published.query(one, wants_proof=False) for one in keys]
            ),
            "bare loop": http_contestant(running.bare, queries),
        }
        if running.nginx is not None and slices is not None:
            contestants |= _over_nginx(running.nginx, published, root, slices, keys)
        if running.redis is not None:
            requests = [redis.mget(one) for one in keys]
            lengths = [redis.answer_length(m, RECORD)] * len(keys)
            contestants["Redis MGET"] = contestant(running.redis, requests, lengths)
        yield Cell(num_keys, m, compare(pool, contestants, seconds))


def _over_nginx(
    web: tuple[int, int], published: Round, root: Path, slices: Path, keys: list[np.ndarray]
) -> dict[str, Contestant]:
    m = len(keys[0])
    ranges = [nginx.get_ranges(one, RECORD) for one in keys[:SLOW_REQUESTS]]
    each = [nginx.get_each(slices, one) for one in keys[:SLOW_REQUESTS]]
    one_slice = each[0][: each[0].index(b"\r\n\r\n") + 4]
    length = m * len(ask(web[0], one_slice, http_length))
    return {
        "nginx files": http_contestant(web, nginx.write_whole(root, published.rows, m)),
        "nginx ranges": http_contestant(web, ranges),
        "nginx per slice": contestant(web, each, [length] * len(each)),
    }


def measure_small(published: Round, running: Servers, keys_per_client: int = 1000) -> SmallSlices:
    """Slices of one number."""
    keys = np.random.default_rng(0).integers(0, len(published.rows), keys_per_client)
    ideal, table = SMALL * keys_per_client, SMALL * len(published.rows)
    bare, proved = (
        len(ask(running.keyhole[0], published.query(keys, "word", wants_proof), http_length))
        for wants_proof in (False, True)
    )
    return SmallSlices(keys_per_client, bare / ideal, proved / ideal, proved / table)
