"""Key spaces and keys: which numbers a client may ask for, checked in one place.

A key space is `[K] = {0, ..., K-1}`. The paper counts from 1; keyhole counts from 0. `Keys` are
what one client asks for: a sequence, so order and repeats mean something, and clients may have
different numbers of keys, none included. Whoever holds a `Keys` knows that it has been checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.errors import KeySpaceError
from keyhole.primitives.placement import ClientValue, at_clients, map_clients
from keyhole.types import ClientId, KeyArray

__all__ = ["MAX_KEYS", "KeySpace", "Keys"]

MAX_KEYS = 2**63
"""The largest key space: its last key, 2^63 - 1, is the largest int64."""


@dataclass(frozen=True)
class KeySpace:
    """The keys 0 to num_keys - 1, under a name that tells them from other keys.

    Args:
        name: what a key stands for, such as "word" or "filter".
        num_keys: K, from 1 to 2^63.

    Raises:
        KeySpaceError: `num_keys` is not a whole number in that range.

    >>> word = KeySpace("word", 10_000)
    >>> list(word.keys([42, 7, 42]))
    [42, 7, 42]
    >>> word.keys([10_000])
    Traceback (most recent call last):
    keyhole.errors.KeySpaceError: key is outside key space 'word': got 10000, allowed is 0..9999; \
rebuild the vocabulary or raise num_keys
    """

    name: str
    num_keys: int

    def __post_init__(self) -> None:
        whole = isinstance(self.num_keys, (int, np.integer)) and not isinstance(self.num_keys, bool)
        if not whole or not 1 <= self.num_keys <= MAX_KEYS:
            raise KeySpaceError(
                f"key space {self.name!r} has an impossible size",
                got=self.num_keys,
                allowed=f"a whole number from 1 to 2^63 ({MAX_KEYS})",
                fix="count the keys; a product of key spaces must stay below that too",
            )
        object.__setattr__(self, "num_keys", int(self.num_keys))

    def keys(self, values: Any) -> Keys:
        """Returns `values` as the keys of one client, in their order, repeats kept.

        Args:
            values: integers in 0..num_keys-1, shape (m,); m = 0 is allowed.

        Raises:
            KeySpaceError: wrong rank, not integers, or out of range.
        """
        array = np.asarray(values)
        if array.ndim != 1:
            raise KeySpaceError(
                f"keys of {self.name!r} have the wrong rank",
                got=f"shape {array.shape}",
                allowed="one dimension, (m,)",
                fix="pass a flat sequence of keys",
            )
        if array.size and not np.issubdtype(array.dtype, np.integer):
            self._refuse_dtype(array)
        if array.size:
            self._check_range(array)
        return Keys(self, array.astype(np.int64))

    def all_keys(self) -> Keys:
        """Returns every key in order: selecting them all is training without select."""
        return Keys(self, np.arange(self.num_keys, dtype=np.int64))

    def place(self, values: Mapping[ClientId, Any] | Sequence[Any]) -> ClientValue[Keys]:
        """Places keys on clients; each client's keys are checked there.

        >>> KeySpace("row", 5).place([[0, 3], [4], []])
        ClientValue(3 of 3 clients present)
        """
        return map_clients(self.keys, at_clients(values))

    def _refuse_dtype(self, array: np.ndarray[Any, Any]) -> None:
        """Python integers beyond 64 bits make an object array: those are out of range, not typed
        wrong."""
        if array.dtype == object and all(isinstance(key, int) for key in array):
            self._check_range(array)
        raise KeySpaceError(
            f"keys of {self.name!r} are not integers",
            got=f"dtype {array.dtype}",
            allowed="integers",
            fix="convert them where they are made; rounding here would hide a mistake",
        )

    def _check_range(self, array: np.ndarray[Any, Any]) -> None:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self.num_keys:
            raise KeySpaceError(
                f"key is outside key space {self.name!r}",
                got=low if low < 0 else high,
                allowed=f"0..{self.num_keys - 1}",
                fix="rebuild the vocabulary or raise num_keys",
            )


@dataclass(frozen=True, eq=False, repr=False)
class Keys:
    """The keys of one client, checked: `z_n = [z_{n,1}, ..., z_{n,m}]`.

    Made by `KeySpace.keys`. Iterating gives Python integers; `array` is int64, read-only. Printing
    shows how many there are and never which: keys may be private.

    >>> z = KeySpace("word", 10).keys([3, 1, 3])
    >>> z
    Keys(3 of 'word')
    >>> z == KeySpace("word", 10).keys([3, 1, 3])
    True
    """

    space: KeySpace
    array: KeyArray

    def __post_init__(self) -> None:
        self.array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> KeyArray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        return self.space == other.space and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.space, self.array.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        """Keys stay read-only in another process."""
        return Keys, (self.space, self.array)

    def __repr__(self) -> str:
        return f"Keys({len(self)} of {self.space.name!r})"
