"""What every private question does: take keys once, give out secrets once."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import KeySpaceError, ReplayError
from keyhole.types import KeyArray

__all__ = ["Once", "distinct_keys"]

T = TypeVar("T")


class Once(Generic[T]):
    """Something for one use: the same secrets sent twice can show what they hide.

    Args:
        value: to be taken.
        what: it is, in a few words.
    """

    def __init__(self, value: T, what: str) -> None:
        self._left: list[T] = [value]
        self._what = what

    def __repr__(self) -> str:
        return f"Once({self._what})"

    def peek(self) -> T:
        """Returns it and leaves it there.

        Raises:
            ReplayError: it has been taken.
        """
        try:
            return self._left[0]
        except IndexError:
            raise self._taken() from None

    def take(self) -> T:
        """Returns it; nothing is left. Of threads that try at once, one gets it.

        Raises:
            ReplayError: it has been taken before.
        """
        try:
            return self._left.pop()  # one step: nobody comes in between
        except IndexError:
            raise self._taken() from None

    def _taken(self) -> ReplayError:
        return ReplayError(
            "a question is for one use",
            got=f"its {self._what} a second time",
            allowed="once",
            fix="make a new question: the same secrets sent twice can show keys",
        )


def distinct_keys(
    keys: KeyArray, num_keys: int, most_keys: int
) -> tuple[KeyArray, NDArray[np.int64]]:
    """Returns the different keys, sorted, and which of them stands at each place.

    Args:
        keys: (n,) whole numbers.
        num_keys: K.
        most_keys: how many different ones there may be.

    Raises:
        KeySpaceError: keys that are no row of whole numbers, outside the table, or too many.
    """
    keys = np.asarray(keys)
    if keys.ndim != 1 or (keys.dtype.kind not in "iu" and keys.size):
        raise _bad_keys(f"{keys.dtype} of shape {keys.shape}", "whole numbers, shape (n,)")
    outside = np.count_nonzero((keys < 0) | (keys >= num_keys))
    if outside:
        raise _bad_keys(f"{outside} of {len(keys)} outside", f"0..{num_keys - 1}")
    found, places = np.unique(keys.astype(np.int64), return_inverse=True)
    if len(found) > most_keys:
        raise _bad_keys(f"{len(found)} different keys", f"{most_keys} a query")
    return found, places.astype(np.int64)


def _bad_keys(got: str, allowed: str) -> KeySpaceError:
    return KeySpaceError(
        "keys that cannot be asked for", got=got, allowed=allowed, fix="check them before asking"
    )
