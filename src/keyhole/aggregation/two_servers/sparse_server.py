"""One of both servers of a sparse sum: it adds up shares that tell it nothing.

Each server adds the shares of the clients it accepts, the servers compare whom they have added, and
only then, and only if there are enough, does each give out its share of the sum, once. The sum of
both shares is the plain sum in the ring, bit for bit.

Hidden: every client's keys and rows, from each server, if both do not collude and follow the
protocol; of the sum, only what is combined is learnt. A client that is lost needs nothing: it is in
both lists or in none. A client that reaches one server only is in one list, and then nothing is
released: servers that want to go on ask `check` of each other before they add.

Not covered: clients that lie (`sparse_client.py`), servers that invent clients to get past
`min_clients`, whether a message comes from the client it is said to come from, which is for the
connection to say, and what sums of several rounds tell together, which is for noise to hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np

from keyhole.aggregation.two_servers.batches import ClientShare, add_clients
from keyhole.aggregation.two_servers.sparse import (
    Framing,
    SparseParams,
    pack_sparse_list,
    read_sparse_list,
    read_sparse_own,
    read_sparse_public,
    sparse_public_bytes,
)
from keyhole.crypto.once import SumsJoined
from keyhole.crypto.ring import RingArray
from keyhole.errors import (
    InputError,
    MismatchError,
    ReplayError,
    ShapeError,
    ThresholdError,
    TooLateError,
)

Arrived: TypeAlias = tuple[int, bytes, bytes]
"""A client's place, its public message and its own."""

_MAX_WAITING = 64  # clients that are added together: then what a big table costs hardly counts
_MAX_BYTES = 256 << 20  # of their messages


class SparseServer:
    """One of both servers, for one sum.

    Args:
        terms: of the sum.
        party: 0 or 1: which of both this one is.
        rounds: what this server has added up, so that no name of a round is used twice: two sums
            of the same messages, with a client more or less, would show what that client sent.

    Raises:
        InputError: there is no such server.
        ReplayError: this server has run the round before.
    """

    def __init__(self, terms: SparseParams, party: int, rounds: SumsJoined | None = None) -> None:
        if party not in (0, 1):
            raise InputError(
                "there are two servers", got=party, allowed="0 or 1", fix="say which this one is"
            )
        if rounds is not None:
            rounds.claim(terms.round)
        self.terms = terms
        self._party = party
        self._digests: dict[int, bytes] = {}
        self._seen: set[bytes] = set()
        self._waiting: list[ClientShare] = []
        self._total: RingArray | None = np.zeros((terms.num_keys, terms.row), terms.dtype)
        self._has_agreed = False

    def __repr__(self) -> str:
        return f"SparseServer(party {self._party}, {len(self._digests)} clients)"

    @property
    def accepted(self) -> bytes:
        """The list of clients that this server has added, for the other one's `agree`."""
        return pack_sparse_list(self.terms, self._party, self._digests)

    def check(self, client: int, public: bytes, own: bytes) -> bytes:
        """Refuses what `add` would refuse and adds nothing.

        Returns:
            32 bytes that are the same at both servers if the client told them the same.
        """
        return self._read([(client, public, own)])[0][1]

    def add(self, client: int, public: bytes, own: bytes) -> None:
        """Adds one client; see `add_many`."""
        self.add_many([(client, public, own)])

    def add_many(self, arrived: Sequence[Arrived]) -> None:
        """Adds clients: all of them, or, if anything is wrong, none.

        The work is done for many clients at once, here or when the share is asked for.

        Args:
            arrived: place, public message and own message of each.

        Raises:
            MalformedError: a message that cannot be read, or that is for the other server.
            StaleError: of another round, or under other terms.
            MismatchError: a public message that is not the one its client speaks of.
            ReplayError: a client, or a message, that was added before.
            TooLateError: the servers have agreed whom they add.
        """
        for client, digest, share in self._read(arrived):
            self._digests[client] = digest
            self._seen.add(digest)
            self._waiting.append(share)
            held = len(self._waiting)
            if held >= _MAX_WAITING or held * sparse_public_bytes(self.terms) >= _MAX_BYTES:
                self._work()

    def agree(self, other: bytes) -> None:
        """Compares the other server's list with one's own; from then on nobody is added.

        Args:
            other: what `accepted` of the other server says.

        Raises:
            MalformedError: a list that cannot be read, or not one of the other server.
            StaleError: of another round, or under other terms.
            MismatchError: other clients, or clients that told each server something else.
            ThresholdError: fewer clients than `min_clients`.
        """
        theirs = read_sparse_list(self.terms, 1 - self._party, bytes(other))
        ours = read_sparse_list(self.terms, self._party, self.accepted)
        if ours.digest != theirs.digest:
            here, there = set(ours.clients.tolist()), set(theirs.clients.tolist())
            raise MismatchError(
                "the servers have not added the same clients and messages",
                got=f"{len(here - there)} clients only here and {len(there - here)} only there",
                allowed="the same at both",
                fix="run the round again; compare check() of both before adding",
            )
        self._check_cohort()
        self._has_agreed = True

    def share(self) -> RingArray:
        """Returns this server's share of the sum, once.

        Returns:
            (num_keys, row) ring; alone it is noise.

        Raises:
            MismatchError: the servers have not agreed whom they add.
            ThresholdError: fewer clients than `min_clients`.
            ReplayError: it has been given out.
        """
        self._check_cohort()
        if not self._has_agreed:
            raise MismatchError(
                "the servers have not agreed whom they have added",
                got="no list of the other server that agrees",
                allowed="agree() first",
                fix="exchange `accepted`",
            )
        self._work()
        total = self._take()
        if self._party == 1:
            np.negative(total, out=total)
        return total

    def _read(self, arrived: Sequence[Arrived]) -> list[tuple[int, bytes, ClientShare]]:
        """Returns place, digest of the public message and share of each, none of them known."""
        if self._has_agreed:
            raise TooLateError(
                "the servers have agreed whom they add",
                got=f"{len(arrived)} more clients",
                allowed="none",
                fix="take part in a later round",
            )
        read: dict[int, tuple[bytes, ClientShare]] = {}
        digests: set[bytes] = set()
        for client, public, own in arrived:
            digest, share = self._read_one(client, public, own)
            is_known = client in self._digests or digest in self._seen
            if is_known or client in read or digest in digests:
                raise ReplayError(
                    "a client, or a message, that was added before",
                    got="a second time",
                    allowed="each once a round",
                    fix="leave it out",
                )
            read[client] = digest, share
            digests.add(digest)
        return [(client, digest, share) for client, (digest, share) in read.items()]

    def _read_one(self, client: int, public: bytes, own: bytes) -> tuple[bytes, ClientShare]:
        if not 0 <= client < 2**64:
            raise InputError(
                "a place that no client has", got=client, allowed="0..2^64-1", fix="count from 0"
            )
        root, spoken_of = read_sparse_own(self.terms, self._party, bytes(own))
        Framing.check_length(public, sparse_public_bytes(self.terms))
        public = bytes(public)  # nobody changes it once its digest is known
        digest = sha256(public).digest()
        if digest != spoken_of:
            raise MismatchError(
                "a public message that its client does not speak of",
                got="another digest",
                allowed="the digest in the client's own message",
                fix="relay the public message as it came",
            )
        return digest, ClientShare(root, read_sparse_public(self.terms, public))

    def _check_cohort(self) -> None:
        if len(self._digests) < self.terms.min_clients:
            raise ThresholdError(
                "too few clients for a sum to be released",
                got=len(self._digests),
                allowed=f"{self.terms.min_clients} or more",
                fix="wait for more clients, or run a round with more",
            )

    def _work(self) -> None:
        """Adds the clients that wait. If that breaks off, the sum is lost: half of one is not
        released."""
        if self._waiting:
            total = self._take()
            add_clients(total, self.terms, self._party, self._waiting)
            self._waiting.clear()
            self._total = total

    def _take(self) -> RingArray:
        """Returns the sum so far; nothing is left."""
        total, self._total = self._total, None
        if total is None:
            raise ReplayError(
                "a share of a sum is given out once",
                got="a request for one that was given out, or lost when adding broke off",
                allowed="one",
                fix="keep what was given out, or run the round again",
            )
        return total


def combine(one: RingArray, other: RingArray) -> RingArray:
    """Returns the sum of all rows of all keys, from both servers' shares.

    Args:
        one: (num_keys, row) ring.
        other: of the same shape and ring.

    Raises:
        ShapeError: shares of different sums.

    >>> from keyhole.aggregation.two_servers.client import share_rows
    >>> terms = SparseParams(bytes(16), 4, 1, 2, bits=32, min_clients=2)
    >>> servers = SparseServer(terms, 0), SparseServer(terms, 1)
    >>> for client, keys in enumerate(([0, 3], [3])):
    ...     sent = share_rows(terms, np.array(keys), np.full((len(keys), 1), 5, np.uint32))
    ...     for server, own in zip(servers, sent.to):
    ...         server.add(client, sent.public, own)
    >>> servers[0].agree(servers[1].accepted)
    >>> servers[1].agree(servers[0].accepted)
    >>> combine(servers[0].share(), servers[1].share())[:, 0]
    array([ 5,  0,  0, 10], dtype=uint32)
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ShapeError(
            "shares of different sums",
            got=f"{one.dtype} {one.shape} and {other.dtype} {other.shape}",
            allowed="the same shape and ring",
            fix="combine the shares of both servers of one sum",
        )
    return one + other
