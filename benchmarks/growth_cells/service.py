"""Requests of devices to the real service, and what the trainer does with their updates.

Memory is what the service holds beside files of slices, which the system keeps as it sees fit.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from growth_cells.places import DISTINCT, Line, Place, Spent
from growth_cells.rounds import status_bytes
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.service.access import Keyring
from keyhole.wire.manifest import name_round
from round_cells.requests import Request, Round, Server, fetch
from round_cells.service_costs import adding_seconds
from slice_peers.processes import free_port, serving
from slice_peers.published import current_round

FETCH, UPDATE, ADDING, ADDING_ALL, ON_DEMAND = (
    "a fetch",
    "storing an update",
    "adding an update",
    "adding all updates",
    "a fetch on demand",
)
SAMPLES = 3
ADDED = 64  # updates: a block
SECONDS = 0.2  # of the server, for a sample, about
_GUESS = 500e-6, 5e-7, 1e-9  # seconds for a request, a key and a byte: decides how many are sent


def measure_published(axis: str, places: Sequence[Place]) -> list[Line]:
    """Fetches, updates and their sum, each place over a table of its own."""
    taken: dict[str, list[Spent]] = {FETCH: [], UPDATE: [], ADDING: []}
    for place in places:
        m, count = place.keys_per_client, _count(place)
        with tempfile.TemporaryDirectory(prefix="growth-") as made:
            round_ = Round.publish(Path(made), place.num_keys, place.width)
            with round_.served() as server:
                fetches = round_.fetches(count, m)
                taken[FETCH].append(_spent(server, lambda _, sent=fetches: sent))
                batches = [round_.updates(count, m, n * count) for n in range(SAMPLES + 1)]
                taken[UPDATE].append(_spent(server, batches.__getitem__))
            bodies = [one.body for one in round_.updates(ADDED, m)]
            adding = [adding_seconds(round_.layout, bodies) for _ in range(SAMPLES)]
            taken[ADDING].append(Spent(statistics.median(adding), 0, len(bodies[0])))
    return [Line.made(of, axis, places, spent) for of, spent in taken.items()]


def measure_adding(axis: str, places: Sequence[Place]) -> Line:
    """All updates of a round, added up: sums of blocks are added to one another, too."""
    spent = []
    for place in places:
        like = {"w": np.broadcast_to(np.float32(0), (place.num_keys, place.width))}
        layout = Layout.of(like, Cut(KeySpace("row", place.num_keys), {"w": 0}))
        round_ = Round(Path(), name_round(b"", 0), layout, Keyring((bytes(32),)))
        bodies = [round_.update(n, place.keys_per_client) for n in range(place.cohort)]
        spent.append(Spent(len(bodies) * adding_seconds(layout, bodies), 0, len(bodies[0])))
    return Line.made(ADDING_ALL, axis, places, spent)


def measure_on_demand(axis: str, places: Sequence[Place]) -> Line:
    """Fetches of slices that are computed for those who ask, from tables of any size."""
    spent = []
    for place in places:
        port, m = free_port(), place.keys_per_client
        script = [sys.executable, str(Path(__file__).with_name("served.py"))]
        with serving([*script, str(port), str(place.num_keys), str(place.width)], port) as pid:
            id_, rng, spacing = current_round(port), np.random.default_rng(0), place.spacing
            ranks = (rng.choice(DISTINCT, m, replace=False) for _ in range(_count(place)))
            sent = [fetch(id_, spacing * chosen) for chosen in ranks]
            spent.append(_spent(Server(port, pid), lambda _, sent=sent: sent))
    return Line.made(ON_DEMAND, axis, places, spent)


def _count(place: Place) -> int:
    once, key, byte = _GUESS
    seconds = once + place.keys_per_client * (key + byte * place.slice_bytes)
    return int(min(max(SECONDS / seconds, 16), 1_000)) // 8 * 8


def _spent(server: Server, batch: Callable[[int], list[Request]]) -> Spent:
    """The median of some batches, after one that warms up."""
    taken = [server.spent(batch(n)) for n in range(SAMPLES + 1)]
    cpu = statistics.median(cpu for cpu, _, _ in taken[1:])
    message = max(len(batch(0)[0].body), len(taken[0][2]))
    return Spent(cpu, status_bytes("RssAnon", server.pid), message)
