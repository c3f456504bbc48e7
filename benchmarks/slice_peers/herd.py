"""A herd: thousands of devices that connect in the same moment, each for one answer."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool

import numpy as np

from harness import Goal, progress
from slice_peers import nginx
from slice_peers.contest import Contestant, burst, http_contestant
from slice_peers.gather import Servers
from slice_peers.published import Round

DEVICES, KEYS_PER_CLIENT, SAMPLES, AT_MOST = 5000, 100, 3, 4.0


@dataclass(frozen=True)
class Cell:
    """Wall seconds, medians, until the last device has its slices; and devices without them."""

    devices: int
    seconds: float
    nginx_seconds: float | None
    errors: int

    def goals(self) -> list[Goal]:
        served = Goal("herd: share of devices served", 1 - self.errors / self.devices, 1.0)
        if self.nginx_seconds is None:
            return [served]
        ratio = self.nginx_seconds / self.seconds
        return [served, Goal("herd: time of nginx over ours", ratio, 1 / AT_MOST)]


def measure(pool: Pool, published: Round, running: Servers) -> Cell:
    """The service and nginx in turns."""
    progress(f"herd of {DEVICES}")
    rng, num_keys = np.random.default_rng(5), len(published.rows)
    keys = [rng.integers(0, num_keys, KEYS_PER_CLIENT) for _ in range(DEVICES)]
    contestants = {"keyhole": _herd(running.keyhole, [published.query(one) for one in keys])}
    if running.nginx is not None:
        files = nginx.whole_requests(num_keys, KEYS_PER_CLIENT)
        requests = [files[at % len(files)] for at in range(DEVICES)]
        contestants["nginx"] = _herd(running.nginx, requests)
    walls: dict[str, list[float]] = {name: [] for name in contestants}
    errors = 0
    for _ in range(SAMPLES):
        for name, one in contestants.items():
            outcome, _ = burst(pool, one)
            walls[name].append(outcome.wall)
            errors += outcome.errors if name == "keyhole" else 0
    medians = {name: statistics.median(each) for name, each in walls.items()}
    return Cell(DEVICES, medians["keyhole"], medians.get("nginx"), errors)


def _herd(server: tuple[int, int], requests: list[bytes]) -> Contestant:
    """Every request on a connection of its own."""
    one = http_contestant(server, requests)
    return replace(one, job=replace(one.job, seconds=0))
