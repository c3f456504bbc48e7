"""Points along an axis, and how fast grows what was measured at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from harness import Goal

DISTINCT = 10_000  # keys that rounds and slices on demand are about
LINEAR = 1.15  # the steepest slope that counts as linear
FLAT = 1.3  # the most that a point of a flat axis may cost beside the first
_TAIL = 100  # a slope is over the points within this factor of the last
_FLAT = "population", "num_keys"

Measured: TypeAlias = Literal["cpu", "memory"]


@dataclass(frozen=True)
class Place:
    """What a round or a request is about.

    Args:
        population: clients that there are.
        cohort: clients of a round.
        keys_per_client: m.
        num_keys: K.
        slice_bytes: of one slice.
    """

    population: int
    cohort: int
    keys_per_client: int
    num_keys: int
    slice_bytes: int

    @property
    def width(self) -> int:
        """Numbers of a slice."""
        return self.slice_bytes // 4

    @property
    def spacing(self) -> int:
        """Between keys that are chosen, so that they are as many and lie evenly whatever K is."""
        return self.num_keys // DISTINCT


@dataclass(frozen=True)
class Spent:
    """CPU seconds and bytes of memory at a point; the bytes of a message, where there is one."""

    cpu: float
    memory: int
    message: int = 0


@dataclass(frozen=True)
class Line:
    """What was measured along an axis.

    Args:
        of: what is measured.
        axis: the field of `Place` that grows.
        places: from the smallest to the largest.
        spent: at each of them.
        slopes: `cpu` and `memory` -> the exponent with which it grows; see `slope_of`.
    """

    of: str
    axis: str
    places: Sequence[Place]
    spent: Sequence[Spent]
    slopes: dict[Measured, float]

    @staticmethod
    def made(of: str, axis: str, places: Sequence[Place], spent: Sequence[Spent]) -> Line:
        """Returns the line with its slopes; of memory, where it was measured."""
        at = [getattr(place, axis) for place in places]
        tail = 1.0 if axis in _FLAT else max(at) / _TAIL
        found: dict[Measured, float] = {"cpu": slope_of(at, [one.cpu for one in spent], tail)}
        if all(one.memory for one in spent):
            found["memory"] = slope_of(at, [one.memory for one in spent], tail)
        return Line(of, axis, places, spent, found)

    def goals(self) -> list[Goal]:
        """Flat where what is selected stays the same, else linear at most."""
        found = []
        for what, slope in self.slopes.items():
            name = f"{what} of {self.of} over {self.axis}"
            if self.axis in _FLAT:
                first, *others = (getattr(one, what) for one in self.spent)
                found.append(
                    Goal(f"{name}: the first over the most", first / max(others), 1 / FLAT)
                )
            else:
                steepness = LINEAR / max(slope, 0.01)
                found.append(Goal(f"{name}: slope {LINEAR} over ours", steepness, 1.0))
        return found

    def __str__(self) -> str:
        lines = [f"{self.of} over {self.axis}: slopes {self.slopes}"]
        for place, one in zip(self.places, self.spent, strict=True):
            at = getattr(place, self.axis)
            lines.append(f"{at:14,} {1e3 * one.cpu:12.3f} ms {one.memory / 1e6:10.2f} MB")
        return "\n".join(lines)


def slope_of(at: Sequence[float], values: Sequence[float], tail: float) -> float:
    """Returns the slope in log-log from `tail` on, least squares: where an axis may cost something,
    fixed costs weigh little at its end."""
    pairs = [(x, y) for x, y in zip(at, values, strict=True) if x >= tail]
    x, y = np.log(pairs).T
    return round(float(np.polyfit(x, y, 1)[0]), 3)
