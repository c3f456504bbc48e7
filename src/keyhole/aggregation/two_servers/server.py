"""Adds up shares at one of the two servers, which tell it nothing.

    open (accept) --close--> closed --reduce--> reduced --agree--> agreed (add) --share--> over

Over a network a client may reach one server only. So each server closes its list, both exchange
lists and keep whom both have, with the same public message; then they compare what is left, and
only then is a row touched. The sum of both shares is the plain sum in the ring, bit for bit.

Hidden: every client's keys and rows, from each server, if the two do not collude and follow the
protocol; of the sum, only what is combined is learnt. Each server adds its own noise where the
terms ask for it, so that the sum is protected from the other one, too.

Not covered: clients that lie (`client.py`); servers, or a trainer that names the cohort, that
invent clients to get past `min_clients`; whether a message comes from the client it is said to come
from, which is for the connection to say; what sums of several rounds tell together, which is for
noise to hide.

No sockets, no clock, no files: the caller keeps the messages, and brings them again when they are
to be added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Literal, Protocol, TypeAlias

import numpy as np

from keyhole.aggregation.privacy.gaussian import add_ring_noise
from keyhole.aggregation.two_servers.batches import ClientShare, add_clients
from keyhole.aggregation.two_servers.messages import (
    Agreed,
    Share,
    list_digest,
    pack_agreed,
    pack_list,
    read_agreed,
    read_list,
    read_own,
    read_public,
)
from keyhole.aggregation.two_servers.params import SumParams
from keyhole.aggregation.two_servers.sparse import (
    SparseParams,
    read_sparse_own,
    read_sparse_public,
    sparse_public_bytes,
)
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import RingArray, add_mask
from keyhole.errors import (
    InputError,
    MismatchError,
    NotAdmittedError,
    ReplayError,
    ShapeError,
    ThresholdError,
    TooLateError,
    ViolationError,
)

_MAX_WAITING = 64  # clients that are added together: then what a big table costs hardly counts
_MAX_BYTES = 256 << 20  # of their messages


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

    def __init__(self, terms: SparseParams, party: int) -> None:
        self._terms, self._party = terms, party
        self._waiting: list[ClientShare] = []
        self._total: RingArray | None = np.zeros((terms.num_keys, terms.row), terms.dtype)

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; raises MalformedError or StaleError, and adds nothing."""
        root, _ = read_sparse_own(self._terms, self._party, own)
        self._waiting.append(ClientShare(root, read_sparse_public(self._terms, public)))
        held = len(self._waiting)
        if held >= _MAX_WAITING or held * sparse_public_bytes(self._terms) >= _MAX_BYTES:
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

    def __init__(self, terms: SumParams, place: int, party: int) -> None:
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


def part_adders(terms: SumParams, party: int) -> list[PartAdder]:
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


_Phase: TypeAlias = Literal["open", "closed", "reduced", "agreed", "over"]


class SumServer:
    """Adds up one sum at one of the two servers.

    Args:
        terms: of the sum.
        party: 0 or 1: which of the two this one is.
        cohort: names of everybody asked, in an order that both servers are told.

    Raises:
        InputError: there is no such server, or a cohort that is repeated or larger than the ring.
    """

    def __init__(self, terms: SumParams, party: int, cohort: Sequence[str]) -> None:
        if party not in (0, 1):
            raise InputError(
                "there are two servers", got=party, allowed="0 or 1", fix="say which this one is"
            )
        self._places = {name: place for place, name in enumerate(cohort)}
        if len(self._places) != len(cohort) or len(cohort) > terms.max_clients:
            raise InputError(
                "a cohort that cannot be added",
                got=f"{len(cohort)} clients, {len(self._places)} of them different",
                allowed=f"{terms.max_clients} different ones or fewer",
                fix="make the terms for the cohort that is asked",
            )
        self.terms, self.party = terms, party
        self._names, self._cohort = tuple(cohort), cohort_digest(cohort)
        self._phase: _Phase = "open"
        self._digests: dict[int, bytes] = {}  # of public messages
        self._owns: dict[int, bytes] = {}  # digests of own messages
        self._seen: set[bytes] = set()
        self._left: set[int] = set()  # agreed on, and not yet added
        self._adders: list[PartAdder] = []

    def __repr__(self) -> str:
        """Nothing of a message."""
        return f"SumServer(party {self.party}, {self._phase}, {len(self._digests)} clients)"

    @property
    def clients(self) -> tuple[str, ...]:
        """Whom it has; once reduced, whom both have."""
        return tuple(self._names[place] for place in sorted(self._digests))

    def accept(self, client: str, own: bytes) -> bytes:
        """Takes note of a client's own message.

        Returns:
            SHA-256 of the public message that it belongs to.

        Raises:
            NotAdmittedError: nobody of the cohort.
            MalformedError: a message that cannot be read, or that is for the other server.
            StaleError: of another round, or under other terms.
            ReplayError: a client, or a public message, that was accepted before.
            TooLateError: the list is closed.
        """
        place = self._place(client)
        if self._phase != "open":
            raise TooLateError(
                "the sum takes no more clients",
                got="one more client",
                allowed="clients while it is open",
                fix="take part in a later round",
            )
        digest, pieces = read_own(self.terms, self.party, own)
        for terms, part, piece in zip(self.terms.sparse, self.terms.parts, pieces, strict=True):
            if part.is_sparse:
                read_sparse_own(terms, self.party, piece)
        if place in self._digests or digest in self._seen:
            raise ReplayError(
                "a client, or a message, that was accepted before",
                got="a second time",
                allowed="each once a round",
                fix="leave it out",
            )
        self._digests[place], self._owns[place] = digest, sha256(own).digest()
        self._seen.add(digest)
        return digest

    def close(self, taken: Iterable[str] | None = None) -> bytes:
        """Accepts nobody any more.

        Args:
            taken: whom to keep of those accepted; everybody if left out. Closing again changes
                nothing.

        Returns:
            The list of clients, for the other server's `reduce`.
        """
        if self._phase == "open":
            if taken is not None:
                kept = {self._place(name) for name in taken}
                self._digests = {p: d for p, d in self._digests.items() if p in kept}
            self._phase = "closed"
        self._demand("closed")
        return pack_list(self.terms, self.party, self._cohort, self._digests)

    def reduce(self, other: bytes) -> bytes:
        """Keeps the clients that both servers have, with the same public message.

        Args:
            other: what `close` of the other server gave.

        Returns:
            Whom it will add, for the other server's `agree`.

        Raises:
            MalformedError: a list that cannot be read, or not one of the other server.
            StaleError: of another round, or under other terms.
            MismatchError: the servers were told different cohorts.
            ThresholdError: fewer than `min_clients` are left.
        """
        self._demand("closed")
        cohort, theirs = read_list(self.terms, 1 - self.party, other)
        if cohort != self._cohort:
            raise _different("another cohort", "the same names in the same order at both")
        self._digests = {p: d for p, d in self._digests.items() if theirs.get(p) == d}
        self._check_cohort()
        self._phase = "reduced"
        return pack_agreed(self.terms, self.party, self._agreed())

    def agree(self, other: bytes) -> None:
        """Compares whom the other server will add; before that nothing is added.

        Args:
            other: what `reduce` of the other server gave.

        Raises:
            MalformedError, StaleError: as `reduce`.
            MismatchError: other clients, or other messages.
            ThresholdError: fewer than `min_clients`.
        """
        self._demand("reduced")
        theirs, ours = read_agreed(self.terms, 1 - self.party, other), self._agreed()
        if theirs != ours:
            got = f"{ours.clients} clients here and {theirs.clients} there"
            raise _different(got, "the same clients and messages at both")
        self._check_cohort()
        self._left = set(self._digests)
        self._adders = part_adders(self.terms, self.party)
        self._phase = "agreed"

    def add(self, client: str, public: bytes, own: bytes) -> None:
        """Adds a client that both servers have agreed on.

        Args:
            client: its name.
            public: its public message.
            own: its own message, the one that was accepted.

        Raises:
            ViolationError: the servers have not agreed.
            MismatchError: nobody they agreed on, or other messages than those they agreed on.
            ReplayError: it has been added.
            MalformedError, StaleError: a public message that cannot be read.
        """
        self._demand("agreed")
        place = self._place(client)
        if place not in self._digests:
            raise _different("a client that is not in both lists", "those of `clients`")
        if place not in self._left:
            raise ReplayError(
                "a client that was added before", got="a second time", allowed="once", fix="stop"
            )
        is_known = sha256(own).digest() == self._owns[place]
        if not is_known or sha256(public).digest() != self._digests[place]:
            raise _different("other messages of a client", "those that were agreed on")
        _, pieces = read_own(self.terms, self.party, own)
        parts = check_public(self.terms, public)
        self._left.discard(place)
        for adder, part, piece in zip(self._adders, parts, pieces, strict=True):
            adder.add(part, piece)

    def share(self, noise: Sequence[Prg] | None = None) -> Share:
        """Returns this server's share of the sum, once.

        Args:
            noise: of each part, where its noise comes from; fresh if left out. A party that knows
                it can take the noise away.

        Raises:
            ViolationError: the servers have not agreed, or the share has been given out.
            MismatchError: somebody they agreed on has not been added.
            ThresholdError: fewer than `min_clients`.
        """
        self._demand("agreed")
        self._check_cohort()
        if self._left:
            raise _different(f"{len(self._left)} clients that are not added", "none")
        self._phase = "over"
        parts = [adder.take() for adder in self._adders]
        self._adders = []
        drawn = [Prg.fresh() for _ in parts] if noise is None else noise
        for part, prg in zip(parts, drawn, strict=True):
            if self.terms.noise:
                add_ring_noise(part, self.terms.ring_noise, prg, out=part)
        agreed = self._agreed()
        return Share(self.party, agreed.clients, agreed.digest, tuple(parts))

    def _agreed(self) -> Agreed:
        return Agreed(self._cohort, len(self._digests), list_digest(self._digests))

    def _place(self, client: str) -> int:
        place = self._places.get(client)
        if place is None:
            raise NotAdmittedError(
                "a client outside the cohort",
                got="another name",
                allowed=f"the {len(self._names)} clients of the cohort",
                fix="take part in a round that asks for this client",
            )
        return place

    def _demand(self, phase: _Phase) -> None:
        if self._phase != phase:
            raise ViolationError(
                "a step of a sum out of turn",
                got=f"a sum that is {self._phase}",
                allowed=f"one that is {phase}",
                fix="accept, close, reduce, agree, add and share in this order, each once",
            )

    def _check_cohort(self) -> None:
        if len(self._digests) < self.terms.min_clients:
            raise ThresholdError(
                "too few clients for a sum to be released",
                got=len(self._digests),
                allowed=f"{self.terms.min_clients} or more",
                fix="ask more clients",
            )


def check_public(terms: SumParams, public: bytes) -> list[bytes]:
    """Returns the public message of each part, empty for a dense one, all of them checked.

    Raises:
        MalformedError: one that cannot be read.
        StaleError: of another round, or under other terms.
    """
    parts = read_public(terms, public)
    for sparse, part, piece in zip(terms.sparse, terms.parts, parts, strict=True):
        if part.is_sparse:
            read_sparse_public(sparse, piece)
    return parts


def cohort_digest(cohort: Sequence[str]) -> bytes:
    """SHA-256 of the names, each followed by a zero byte."""
    return sha256(b"".join(name.encode() + b"\0" for name in cohort)).digest()


def combine(one: RingArray, other: RingArray) -> RingArray:
    """Returns the sum of all rows of all keys, from both servers' shares.

    Args:
        one: (num_keys, row) ring.
        other: of the same shape and ring.

    Raises:
        ShapeError: shares of different sums.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ShapeError(
            "shares of different sums",
            got=f"{one.dtype} {one.shape} and {other.dtype} {other.shape}",
            allowed="the same shape and ring",
            fix="combine the shares of the two servers of one sum",
        )
    return one + other


def combine_shares(one: Share, other: Share) -> tuple[RingArray, ...]:
    """Returns the sum of each part, (num_keys, row) ring, from both servers' shares.

    Raises:
        MismatchError: shares of one server, or of different clients.
        ShapeError: shares of different sums.
    """
    if {one.party, other.party} != {0, 1}:
        raise _different("two shares of one server", "one of each")
    if (one.clients, one.digest) != (other.clients, other.digest):
        got = f"{one.clients} and {other.clients} clients"
        raise _different(got, "shares of the same clients and messages")
    return tuple(combine(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def _different(got: str, allowed: str) -> MismatchError:
    return MismatchError(
        "the servers do not speak of the same clients and messages",
        got=got,
        allowed=allowed,
        fix="run the round again",
    )
