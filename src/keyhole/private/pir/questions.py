"""Questions whose answer is the XOR of two replies: what the client keeps and how it opens them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import IntegrityError, MalformedError
from keyhole.private.asking import Once
from keyhole.private.pir.database import tags_of
from keyhole.private.pir.messages import unseal
from keyhole.private.pir.retrieval import Retrieved
from keyhole.private.pir.terms import Terms
from keyhole.types import KeyArray

__all__ = ["Wanted", "XorQuestion", "check_tags"]


@dataclass(frozen=True, repr=False)
class Wanted:
    """What a client asked for and where in the replies it will be.

    Args:
        keys: (u,) int64, different and sorted.
        places: (n,) int64: which of them stands at each place of what the client asked.
        slots: (u,) int64: the row of a reply that each key is in; -1 if it is in none.
    """

    keys: KeyArray
    places: NDArray[np.int64]
    slots: NDArray[np.int64]

    def __repr__(self) -> str:
        """Keys are private: printing shows how many there are."""
        return f"Wanted({len(self.keys)} keys)"


class XorQuestion:
    """One query to two servers, for one use.

    Args:
        terms: under which it is asked.
        messages: one for each server.
        wanted: what for.
        num_slots: rows of a reply.
    """

    def __init__(
        self, terms: Terms, messages: tuple[bytes, bytes], wanted: Wanted, num_slots: int
    ) -> None:
        self._terms = terms
        self._messages = Once(messages, "messages")
        self._wanted = Once(wanted, "replies")
        self._num_slots = num_slots

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"XorQuestion({self._num_slots} queries to each of 2 servers)"

    def messages(self) -> tuple[bytes, bytes]:
        """One message for each server; see `Question`."""
        return self._messages.take()

    def open(self, replies: Sequence[bytes]) -> Retrieved:
        """Returns the slices; see `Question`. Replies that are none do not use the question up."""
        self._wanted.peek()
        one, other = _read_replies(replies, self._terms, self._num_slots)
        wanted = self._wanted.take()
        is_found = wanted.slots >= 0
        slots = wanted.slots[is_found]
        opened = check_tags(self._terms, wanted.keys[is_found], one[slots] ^ other[slots])
        if is_found.all():
            return Retrieved(opened[wanted.places], is_found[wanted.places])
        records = np.zeros((len(wanted.keys), self._terms.record_bytes), np.uint8)
        records[is_found] = opened
        return Retrieved(records[wanted.places], is_found[wanted.places])


def check_tags(terms: Terms, keys: KeyArray, rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the slices of rows (m, row_bytes), once all of them have the tags of their keys.

    Raises:
        IntegrityError: one has not. The error does not tell which, nor how many.
    """
    records, tags = rows[:, : terms.record_bytes], rows[:, terms.record_bytes :]
    if not np.array_equal(tags_of(terms.round, keys, records), tags):
        raise IntegrityError(
            "slices that are not those of this round",
            got="a slice without the tag of its round and key",
            allowed="slices as the digest of the table covers them",
            fix="ask again for all keys, or leave the round: a server lies or is damaged",
        )
    return records


def _read_replies(
    replies: Sequence[bytes], terms: Terms, num_slots: int
) -> list[NDArray[np.uint8]]:
    """The rows of two replies, (num_slots, row_bytes) each."""
    if len(replies) != 2:
        raise MalformedError(
            "replies of some servers only",
            got=f"{len(replies)} replies",
            allowed="2, in the order of the messages",
            fix="wait for both servers",
        )
    shape = num_slots, terms.row_bytes
    length = num_slots * terms.row_bytes
    bodies = [unseal(reply, "reply", terms, i, length) for i, reply in enumerate(replies)]
    return [np.frombuffer(body, np.uint8).reshape(shape) for body in bodies]
