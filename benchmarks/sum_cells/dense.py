"""Dense secure sums, and the same steps with Flower's SecAgg+ functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness import Goal, measure
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.crypto.ring import add_masks
from sum_cells import flower
from sum_cells.cohort import timed
from sum_cells.parties import run_timed

AHEAD = 5.0  # times
FULL = (50, 10**6)


@dataclass(frozen=True)
class Times:
    """CPU seconds of one implementation.

    Args:
        client_masks: all masks of one client, from seeds.
        server_masks: all masks that the server removes, from seeds.
        client: from agreements to the masked vector.
        server: from masked vectors and shares to the sum.
    """

    client_masks: float
    server_masks: float
    client: float
    server: float

    def __str__(self) -> str:
        return (
            f"client {self.client:.3f} s (masks {self.client_masks:.3f}),"
            f" server {self.server:.2f} s (masks {self.server_masks:.2f})"
        )


@dataclass(frozen=True)
class Cell:
    """One cohort.

    Args:
        clients: N.
        lost: after they have shared their secrets.
        entries: of a vector.
        ours: with everything: shares are opened, messages are checked and made.
        theirs: none where Flower is not installed.
        version: of Flower.
    """

    clients: int
    lost: int
    entries: int
    ours: Times
    theirs: Times | None
    version: str | None

    def goals(self) -> list[Goal]:
        if self.theirs is None or (self.clients, self.entries) != FULL:
            return []
        where = f"N={self.clients}, {self.entries} entries"
        return [
            Goal(f"Flower's time over ours, {part}, {where}", ratio, AHEAD)
            for part, ratio in self.ratios(self.theirs).items()
        ]

    def ratios(self, theirs: Times) -> dict[str, float]:
        """How many times as long Flower takes."""
        return {
            "client's masks": theirs.client_masks / self.ours.client_masks,
            "server's masks": theirs.server_masks / self.ours.server_masks,
            "client": theirs.client / self.ours.client,
            "server": theirs.server / self.ours.server,
        }

    def __str__(self) -> str:
        text = f"dense  N={self.clients} ({self.lost} lost) {self.entries} entries: {self.ours}; "
        if self.theirs is None:
            return text + "Flower is not installed: nothing to compare with"
        ahead = ", ".join(f"{name} {ratio:.1f}" for name, ratio in self.ratios(self.theirs).items())
        return text + f"Flower {self.version}: {self.theirs}; times as long: {ahead}"


def measure_dense(clients: int, lost: int, entries: int) -> Cell:
    """Runs our sum and compares it with the plain one; then both sides' masks take turns."""
    settings = SecAggParams(bytes(16), clients, entries)
    rng = np.random.default_rng(0)
    vectors = rng.integers(0, 2**32, (clients, entries), dtype=np.uint32)
    run_timed(settings, vectors.__getitem__, range(lost))  # warms up
    spent = run_timed(settings, vectors.__getitem__, range(lost))
    if not np.array_equal(spent.total, vectors[lost:].sum(axis=0, dtype=np.uint32)):
        raise SystemExit("the secure sum is not the plain sum")
    kept = clients - lost
    counts = {"client": clients, "server": kept + lost * kept}  # masks
    work = {
        f"our {side}": lambda n=count: add_masks(vectors[-1], [(bytes(16), 1)] * n)
        for side, count in counts.items()
    }
    peer = _peer(settings, clients, lost)
    if peer is not None:
        seeds = {"client": peer.client_masks(clients - 1), "server": peer.server_masks()}
        wide = vectors[0].astype(np.int64)  # what Flower's sums become with the first mask
        work |= {f"their {side}": lambda s=seeds[side]: peer.add_masks(wide, s) for side in counts}
    samples = {"our client": 5, "our server": 3, "their client": 3, "their server": 1}
    timings = measure(work, {name: samples[name] for name in work})
    cpu = {name: timing.cpu for name, timing in timings.items()}
    ours = Times(cpu["our client"], cpu["our server"], spent.mask, spent.add + spent.unmask)
    if peer is None:
        return Cell(clients, lost, entries, ours, None, None)
    theirs = _their_times(peer, wide, cpu["their client"], cpu["their server"])
    return Cell(clients, lost, entries, ours, theirs, peer.version)


def _peer(settings: SecAggParams, clients: int, lost: int) -> flower.Flower | None:
    if not flower.is_installed():
        return None
    flower.check()
    return flower.Flower(clients, lost, settings.shares_needed)


def _their_times(
    peer: flower.Flower, vector: np.ndarray, client_masks: float, server_masks: float
) -> Times:
    """Masks as they were timed, and beside them what else a step takes."""
    agreed = timed(lambda: peer.client_masks(peer.staying[-1]))[1]
    rebuilt = timed(peer.rebuild)[1] + timed(peer.server_masks)[1]
    added = timed(lambda: [peer.add(vector, vector) for _ in peer.staying])[1]
    return Times(client_masks, server_masks, client_masks + agreed, server_masks + rebuilt + added)
