"""Remembers what must happen once: secrets given out, sums joined, requests answered."""

from __future__ import annotations

from threading import Lock
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.errors import InputError, KeySpaceError, ReplayError

T = TypeVar("T")


class Once(Generic[T]):
    """Something for one use: the same secrets sent twice can show what they hide."""

    def __init__(self, value: T, what: str) -> None:
        self._left: list[T] = [value]
        self._what = what

    def __repr__(self) -> str:
        return f"Once({self._what})"

    def peek(self) -> T:
        """Returns it and leaves it there."""
        try:
            return self._left[0]
        except IndexError:
            raise self._taken() from None

    def take(self) -> T:
        """Returns it; nothing is left. Of threads that try at once, one gets it."""
        try:
            return self._left.pop()  # one step: nobody comes in between
        except IndexError:
            raise self._taken() from None

    def _taken(self) -> ReplayError:
        return ReplayError(
            f"a query is for one use: got its {self._what} a second time; expected once; make a "
            "new query: the same secrets sent twice can show keys"
        )


def distinct_keys(
    keys: KeyArray, num_keys: int, max_keys: int
) -> tuple[KeyArray, NDArray[np.int64]]:
    """Returns the different ones of keys (n,), at most `max_keys`, sorted, and which of them stands
    at each place."""
    keys = np.asarray(keys)
    if keys.ndim != 1 or (keys.dtype.kind not in "iu" and keys.size):
        raise _bad_keys(f"{keys.dtype} of shape {keys.shape}", "whole numbers, shape (n,)")
    outside = np.count_nonzero((keys < 0) | (keys >= num_keys))
    if outside:
        raise _bad_keys(f"{outside} of {len(keys)} outside", f"0..{num_keys - 1}")
    found, places = np.unique(keys.astype(np.int64), return_inverse=True)
    if len(found) > max_keys:
        raise _bad_keys(f"{len(found)} different keys", f"{max_keys} a query")
    return found, places.astype(np.int64)


def _bad_keys(got: str, allowed: str) -> KeySpaceError:
    return KeySpaceError(
        f"keys cannot be queried: got {got}; expected {allowed}; check them before asking"
    )


class SumsJoined:
    """Remembers rounds by their names, so that none is run twice.

    A client that adds the same input to two sums of one round shows what the sums differ by, and
    so does a server that adds up one round twice, with a client more or less. Anyone who restarts
    keeps what `names` returns, and starts from there. Safe for threads.
    """

    def __init__(self, names: frozenset[bytes] = frozenset()) -> None:
        self._names = set(names)
        self._lock = Lock()

    @property
    def names(self) -> frozenset[bytes]:
        """The rounds so far, 16 bytes each."""
        with self._lock:
            return frozenset(self._names)

    def claim(self, name: bytes) -> None:
        """Takes a round."""
        with self._lock:
            if name in self._names:
                raise ReplayError(
                    "a round of a secure sum is for one use: got a round that has been taken "
                    "before; expected each round once; start a round with a new name"
                )
            self._names.add(name)


MAX_REMEMBERED = 1 << 18
"""Requests that are remembered by default: some 30 MB."""


class ReplayWindow:
    """The `enc` of the requests that were answered last (RFC 9458, section 6.5).

    A relay may copy a request and send it again. What it gets is sealed to the client as before, so
    it learns nothing; but it must not make the gateway work again and again, nor count a key twice.

    Bounded by number, not by age: a request older than the last `limit` ones is answered again, for
    as long as its round is there and its key is not removed, and each process remembers for itself.
    Slices are only read, so an answer too many does no harm. A Date inside of requests would bound
    their age (section 6.5.1), and is not sent: it shows a client's clock (section 6.8), and clocks
    that differ would tell which requests belong together, which this way is there to hide.
    """

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        if limit < 1:
            raise InputError(
                f"replay window remembers nothing: got {limit}; expected 1 or more; raise it"
            )
        self._limit = limit
        self._seen: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def admit(self, enc: bytes) -> None:
        """Lets in a request that has been opened: what does not open costs no place here."""
        if enc in self._seen:
            raise ReplayError(
                "request was answered before: got the same one again; expected each request once; "
                "seal a new request"
            )
        self._seen[enc] = None
        if len(self._seen) > self._limit:
            del self._seen[next(iter(self._seen))]  # the oldest: dicts keep their order
