"""What a server has answered: so that no query is answered twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import ReplayError
from keyhole.private.pir.messages import CHECK_BYTES, check_of

__all__ = ["MOST_QUERIES", "Answered"]

MOST_QUERIES = 1 << 22
"""How many queries a table answers, unless it is told otherwise."""

_FRESH = 1 << 14  # checks that are held one by one; then they are sorted in among the others


class Answered:
    """Remembers queries by their checks, for as long as a table is served.

    A query that comes back shows a client that sends one key twice, or somebody in between. It is
    refused; but whoever can make a new check can get round that, so the secrecy of keys does not
    rest on it. Safe for threads.

    Args:
        limit: how many queries are remembered. Then every further one is refused: none is ever
            forgotten. Each takes 16 bytes, those of the last 16,384 about 110; every 16,384
            queries all are copied once. 4,194,304 take 67 MB, twice that while they are copied.
    """

    def __init__(self, limit: int = MOST_QUERIES) -> None:
        self._limit = limit
        self._claimed: set[bytes] = set()
        self._fresh: set[bytes] = set()
        self._sorted = np.empty((0, 2), np.uint64)
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._claimed) + len(self._fresh) + len(self._sorted)

    @contextmanager
    def claim(self, queries: Sequence[bytes]) -> Iterator[None]:
        """Holds queries while they are answered: all of them, or none. If the answer fails they are
        given back, since nothing was answered; else they are remembered.

        Raises:
            ReplayError: one has been answered before, is being answered or stands here twice, or
                there is no room.
        """
        checks = {check_of(query) for query in queries}
        self._take(checks, len(queries))
        try:
            yield
        except BaseException:
            with self._lock:
                self._claimed -= checks
            raise
        with self._lock:
            self._claimed -= checks
            self._fresh |= checks
            if len(self._fresh) >= _FRESH:
                self._sort_in()

    def _take(self, checks: set[bytes], count: int) -> None:
        with self._lock:
            new = checks - self._claimed - self._fresh
            again = count - len(new) + _count_known(self._sorted, _words_of(new))
            if again:
                raise _replay(f"{again} of {count} a second time", "each query once")
            if len(self) + len(checks) > self._limit:
                raise _replay(f"{count} after {len(self)}", f"{self._limit} in all")
            self._claimed |= checks

    def _sort_in(self) -> None:
        both = np.concatenate([self._sorted, _words_of(self._fresh)])
        self._sorted = both[np.argsort(both[:, 0], kind="stable")]
        self._fresh = set()


def _words_of(checks: set[bytes]) -> NDArray[np.uint64]:
    """Checks as two words each, (n, 2)."""
    return np.frombuffer(b"".join(checks), np.uint64).reshape(-1, CHECK_BYTES // 8)


def _count_known(known: NDArray[np.uint64], asked: NDArray[np.uint64]) -> int:
    """How many of `asked` are among `known`, whose first words are sorted."""
    first = np.searchsorted(known[:, 0], asked[:, 0], "left")
    last = np.searchsorted(known[:, 0], asked[:, 0], "right")
    # Of checks with the same first word there is hardly ever more than one.
    return sum(
        bool((known[start:end, 1] == second).any())
        for start, end, second in zip(first, last, asked[:, 1], strict=True)
        if start < end
    )


def _replay(got: str, allowed: str) -> ReplayError:
    return ReplayError(
        "queries that this table does not answer",
        got=got,
        allowed=allowed,
        fix="make a new question for every request; a new round has a new table",
    )
