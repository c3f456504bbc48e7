"""Names for the kinds of arrays and functions that pass between the layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""Any numeric array."""

KeyArray: TypeAlias = NDArray[np.int64]
"""Keys of one client, shape (m,)."""

ClientId: TypeAlias = Hashable
"""What names a client within one cohort."""

Tree: TypeAlias = Any
"""Nested dicts, lists and tuples with arrays as leaves."""

SelectFn: TypeAlias = Callable[[Any, Any], Any]
"""psi: (server value, key) -> slice; the key is a Python int, or traced in JAX."""

DeselectFn: TypeAlias = Callable[[Any, Any], Any]
"""phi: (update of one client, its keys) -> value shaped like the server's."""
