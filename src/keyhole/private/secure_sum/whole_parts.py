"""Adding up one part of the updates of many clients, at one server."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from keyhole.errors import ReplayError
from keyhole.private.secure_sum.fixed_point import RingArray
from keyhole.private.secure_sum.masks import add_mask
from keyhole.private.secure_sum.sparse_batches import ClientShare, add_clients
from keyhole.private.secure_sum.sparse_messages import public_bytes, read_own, read_public
from keyhole.private.secure_sum.sparse_terms import SparseTerms
from keyhole.private.secure_sum.whole_terms import WholeTerms

__all__ = ["DensePart", "PartAdder", "SparsePart", "part_adders"]

_MOST_WAITING = 64  # clients that are added together: then what a big table costs hardly counts
_MOST_BYTES = 256 << 20  # of their messages


class PartAdder(Protocol):
    """Adds up one part."""

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent of it."""
        ...

    def take(self) -> RingArray:
        """Returns this server's share of the sum, (num_keys, row) ring; nothing is left."""
        ...


class SparsePart:
    """Of point functions. What clients sent waits until there are enough to be added together.

    Args:
        terms: of the part.
        party: 0 or 1.
    """

    def __init__(self, terms: SparseTerms, party: int) -> None:
        self._terms, self._party = terms, party
        self._waiting: list[ClientShare] = []
        self._total: RingArray | None = np.zeros((terms.num_keys, terms.row), terms.dtype)

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; raises MalformedError or StaleError, and adds nothing."""
        root, _ = read_own(self._terms, self._party, own)
        self._waiting.append(ClientShare(root, read_public(self._terms, public)))
        held = len(self._waiting)
        if held >= _MOST_WAITING or held * public_bytes(self._terms) >= _MOST_BYTES:
            self._work()

    def take(self) -> RingArray:
        """Returns the share, once."""
        self._work()
        total, self._total = _there(self._total), None
        if self._party == 1:
            np.negative(total, out=total)
        return total

    def _work(self) -> None:
        """Adds those that wait. If that breaks off the sum is lost: half of one is not released."""
        if self._waiting:
            total, self._total = _there(self._total), None
            add_clients(total, self._terms, self._party, self._waiting)
            self._waiting.clear()
            self._total = total


class DensePart:
    """Of all rows: server 0 adds masks, server 1 what is left of rows without them.

    Args:
        terms: of the sum.
        place: of the part.
        party: 0 or 1.
    """

    def __init__(self, terms: WholeTerms, place: int, party: int) -> None:
        self._party = party
        self._total: RingArray | None = np.zeros(terms.shape(place), terms.dtype)

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; its length has been checked."""
        total = _there(self._total)
        if self._party == 0:
            add_mask(total, own, 1)
        else:
            total += np.frombuffer(own, total.dtype.newbyteorder("<")).reshape(total.shape)

    def take(self) -> RingArray:
        """Returns the share, once."""
        total, self._total = _there(self._total), None
        return total


def part_adders(terms: WholeTerms, party: int) -> list[PartAdder]:
    """One for each part."""
    return [
        SparsePart(terms.sparse[place], party) if part.is_sparse else DensePart(terms, place, party)
        for place, part in enumerate(terms.parts)
    ]


def _there(total: RingArray | None) -> RingArray:
    if total is None:
        raise ReplayError(
            "a share of a sum is given out once",
            got="a request for one that was given out, or lost when adding broke off",
            allowed="one",
            fix="keep what was given out, or run the round again",
        )
    return total
