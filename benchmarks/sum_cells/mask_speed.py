"""Masks against memcpy of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness import Goal, Timing, aligned_zeros, measure, memcpy
from keyhole.crypto.ring import add_mask, add_masks

GOAL = 0.4  # of memcpy
MANY = 16


@dataclass(frozen=True)
class Cell:
    """One vector of one ring.

    Args:
        bits: of an element.
        megabytes: of the vector.
        memcpy: of the vector.
        one: one mask drawn and added.
        many: 16 masks, piece by piece.
    """

    bits: int
    megabytes: float
    memcpy: Timing
    one: Timing
    many: Timing

    def goals(self) -> list[Goal]:
        ratio = self.memcpy.cpu / self.one.cpu
        return [Goal(f"masks of {self.bits} bits over memcpy", ratio, GOAL)]

    def __str__(self) -> str:
        speed = [
            self.megabytes / 1e3 * masks / timing.cpu
            for masks, timing in ((1, self.memcpy), (1, self.one), (MANY, self.many))
        ]
        return (
            f"masks  {self.bits} bits, {self.megabytes:.0f} MB: memcpy {speed[0]:.1f} GB/s,"
            f" one mask {speed[1]:.1f} ({speed[1] / speed[0]:.2f} of it),"
            f" {MANY} at once {speed[2]:.1f} each ({speed[2] / speed[0]:.2f})"
        )


def measure_masks(bits: int, megabytes: int) -> Cell:
    """Checks that masks cancel, then times."""
    dtype = np.uint16 if bits == 16 else np.uint32
    source, target = (aligned_zeros((megabytes * 10**6 * 8 // bits,), dtype) for _ in range(2))
    seeds = [bytes([i]) * 16 for i in range(MANY)]
    add_masks(target, [(seed, 1) for seed in seeds])
    for seed in seeds:
        add_mask(target, seed, -1)
    if target.any():
        raise SystemExit("masks do not cancel")
    timings = measure(
        {
            "memcpy": memcpy(source, target),
            "one": lambda: add_mask(target, seeds[0], 1),
            "many": lambda: add_masks(target, [(seed, 1) for seed in seeds]),
        }
    )
    return Cell(bits, source.nbytes / 1e6, **timings)
