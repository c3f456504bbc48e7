"""What a server has answered: so that no query is answered twice."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

from keyhole.errors import ReplayError
from keyhole.private.pir.messages import check_of

__all__ = ["Answered"]


class Answered:
    """Remembers queries by their checks, for as long as a table is served.

    A query that comes back shows a client that sends one key twice, or somebody in between. It is
    refused; but whoever can make a new check can get round that, so the secrecy of keys does not
    rest on it. Safe for threads.

    Args:
        limit: how many queries are remembered. Then every further one is refused: none is ever
            forgotten. 262,144 take about 30 MB.
    """

    def __init__(self, limit: int = 1 << 18) -> None:
        self._limit = limit
        self._seen: set[bytes] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._seen)

    def claim(self, queries: Sequence[bytes]) -> None:
        """Marks queries as answered: all of them, or none.

        Raises:
            ReplayError: one has been answered before or stands here twice, or there is no room.
        """
        checks = {check_of(query) for query in queries}
        with self._lock:
            again = len(queries) - len(checks - self._seen)
            if again:
                raise _replay(f"{again} of {len(queries)} a second time", "each query once")
            if len(self._seen) + len(checks) > self._limit:
                raise _replay(f"{len(queries)} after {len(self._seen)}", f"{self._limit} in all")
            self._seen |= checks


def _replay(got: str, allowed: str) -> ReplayError:
    return ReplayError(
        "queries that this table does not answer",
        got=got,
        allowed=allowed,
        fix="make a new question for every request; a new round has a new table",
    )
