"""The hash behind initial values and the key index: `noise.mix`, compiled for single numbers."""

from __future__ import annotations

from typing import Any

from numba import njit

from keyhole.primitives import noise

__all__ = ["mix"]

mix: Any = njit(cache=True, nogil=True)(noise.mix)
