"""Says how the rows of a lazy table start: at zero, uniform or normal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from keyhole.errors import InputError

ZEROS, UNIFORM, NORMAL = np.uint8(0), np.uint8(1), np.uint8(2)


@dataclass(frozen=True)
class Zeros:
    """Rows start at zero."""

    code: ClassVar[tuple[int, float]] = int(ZEROS), 0.0


@dataclass(frozen=True)
class Uniform:
    """Rows start uniform in [-scale, scale)."""

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def code(self) -> tuple[int, float]:
        """Kind and scale."""
        return int(UNIFORM), self.scale


@dataclass(frozen=True)
class Normal:
    """Rows start normal with mean 0.

    Args:
        scale: the standard deviation, above 0.
    """

    scale: float

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    @property
    def code(self) -> tuple[int, float]:
        """Kind and scale."""
        return int(NORMAL), self.scale


Initial = Zeros | Uniform | Normal


def _check_scale(scale: float) -> None:
    if not 0 < scale < np.inf:
        raise InputError(
            f"scale is out of range: got {scale}; expected above 0; use Zeros for no spread"
        )
