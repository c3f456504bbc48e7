"""What every scheme of private retrieval offers, whatever happens inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from keyhole.private.pir.terms import Terms
from keyhole.private.prg import Prg
from keyhole.types import KeyArray

__all__ = ["Answerer", "Asker", "Question", "Retrieved"]


@dataclass(frozen=True, repr=False)
class Retrieved:
    """What a client found.

    Args:
        records: (m, record_bytes) uint8 in the order of the keys, checked against their tags; zeros
            where `is_found` is false.
        is_found: (m,) bool. A key that found no place in a query is not retrieved; nobody but the
            client knows, and it must train without the key.
    """

    records: NDArray[np.uint8]
    is_found: NDArray[np.bool_]

    def __repr__(self) -> str:
        """Keys are private: printing shows how many there are."""
        return f"Retrieved({self.is_found.sum()} of {len(self.is_found)} keys)"


class Question(Protocol):
    """One query of a client, for one use."""

    def messages(self) -> tuple[bytes, ...]:
        """One message for each server, in their order.

        Raises:
            ReplayError: they have been taken before. To ask again, make a new question.
        """
        ...

    def open(self, replies: Sequence[bytes]) -> Retrieved:
        """Returns the slices, from one reply of each server.

        Raises:
            MalformedError, StaleError: a reply is not one to this question.
            IntegrityError: a slice, wanted or of padding, lacks the tag of its round and key.
                Nothing is returned, and whoever asks again does so for all keys: what failed must
                not show.
            ReplayError: replies have been opened before.
        """
        ...


class Asker(Protocol):
    """The client of one table."""

    @property
    def terms(self) -> Terms:
        """What was agreed."""
        ...

    def ask(self, keys: KeyArray, prg: Prg | None = None) -> Question:
        """Makes a question for keys; repeats and order are the client's own business.

        Args:
            keys: (n,) int64 with at most `terms.most_keys` different ones.
            prg: where secrets come from; a fresh one if None. Given by tests only.

        Raises:
            KeySpaceError: keys are outside the table, or too many.
        """
        ...


class Answerer(Protocol):
    """One server of one table."""

    @property
    def terms(self) -> Terms:
        """What was agreed."""
        ...

    def answer_many(self, queries: Sequence[bytes]) -> list[bytes]:
        """Answers queries in one pass over the table.

        Raises:
            MalformedError, StaleError, ReplayError: a query cannot be answered; raised before any
                slice is read, and none of the others is answered either.
        """
        ...
