"""Questions whose answer is the XOR of two replies: what the client keeps and how it opens them.

Every row of a reply is checked, that of padding too: it is the row of a key that the client drew.
Were padding not checked, a server that changes one row and sees whether the client fails would
learn whether that query was padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.errors import IntegrityError, MalformedError
from keyhole.private.asking import Once
from keyhole.private.pir.database import tags_of
from keyhole.private.pir.messages import check_of, unseal_reply
from keyhole.private.pir.retrieval import Retrieved
from keyhole.private.pir.terms import Terms
from keyhole.types import KeyArray

__all__ = ["Wanted", "XorQuestion", "check_tags"]


@dataclass(frozen=True, repr=False)
class Wanted:
    """What a client asked for and where in the replies it will be.

    Args:
        keys: (q,) int64: the key of each row of a reply, wanted or drawn as padding.
        slots: (n,) int64: the row of each key that was asked for; -1 if it is in none.
    """

    keys: KeyArray
    slots: NDArray[np.int64]

    def __repr__(self) -> str:
        """Keys are private: printing shows how many queries there are, padding included."""
        return f"Wanted({len(self.keys)} queries)"


class XorQuestion:
    """One query to two servers, for one use.

    Args:
        terms: under which it is asked.
        messages: one for each server.
        wanted: what for.
    """

    def __init__(self, terms: Terms, messages: tuple[bytes, bytes], wanted: Wanted) -> None:
        self._terms = terms
        self._checks = [check_of(message) for message in messages]
        self._messages = Once(messages, "messages")
        self._wanted = Once(wanted, "replies")
        self._num_slots = len(wanted.keys)

    def __repr__(self) -> str:
        """Keys are private: printing shows what everybody sees."""
        return f"XorQuestion({self._num_slots} queries to each of 2 servers)"

    def messages(self) -> tuple[bytes, bytes]:
        """One message for each server; see `Question`."""
        return self._messages.take()

    def open(self, replies: Sequence[bytes]) -> Retrieved:
        """Returns the slices; see `Question`. Replies that are none do not use the question up."""
        self._wanted.peek()
        one, other = self._read(replies)
        wanted = self._wanted.take()
        opened = check_tags(self._terms, wanted.keys, one ^ other)
        is_found = wanted.slots >= 0
        records = opened[wanted.slots]
        records[~is_found] = 0
        return Retrieved(records, is_found)

    def _read(self, replies: Sequence[bytes]) -> list[NDArray[np.uint8]]:
        """The rows of two replies, (num_slots, row_bytes) each."""
        if len(replies) != 2:
            raise MalformedError(
                "replies of some servers only",
                got=f"{len(replies)} replies",
                allowed="2, in the order of the messages",
                fix="wait for both servers",
            )
        shape = self._num_slots, self._terms.row_bytes
        length = self._num_slots * self._terms.row_bytes
        bodies = [
            unseal_reply(reply, check, self._terms, server, length)
            for server, (reply, check) in enumerate(zip(replies, self._checks, strict=True))
        ]
        return [np.frombuffer(body, np.uint8).reshape(shape) for body in bodies]


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
