"""Which sums a party has taken part in: the clients and servers of all kinds of secure sum."""

from __future__ import annotations

from threading import Lock

from keyhole.errors import ReplayError

__all__ = ["Rounds"]


class Rounds:
    """Remembers rounds by their names, so that none is run twice.

    A client that adds the same input to two sums of one round shows what the sums differ by, and
    so does a server that adds up one round twice, with a client more or less. Whoever restarts
    keeps what `names` returns, and starts from there. Safe for threads.

    Args:
        names: of rounds that have been taken.
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
        """Takes a round.

        Raises:
            ReplayError: it has been taken before.
        """
        with self._lock:
            if name in self._names:
                raise ReplayError(
                    "a round of a secure sum is for one use",
                    got="a round that has been taken before",
                    allowed="each round once",
                    fix="start a round with a new name",
                )
            self._names.add(name)
