"""Agrees with the other server on clients, and adds up their shares: one of the two of a sum.

    open (accept) --close--> closed --reduce--> reduced --agree--> agreed (add) --share--> over
                                                     agreed --counts--> counted --drop--> dropped

Over a network a client may reach one server only. So each server closes its list, both exchange
lists and keep whom both have, with the same public message; then they compare receipts of what is
left, and only then is a share touched. Everybody whom both have is added, once: nobody can name
fewer. Where rows of few clients are dropped, the two tell each other their shares of the counts,
and of nothing else; both come to the same rows, and set their shares of these to zero before they
give out anything. What a share holds, and how shares are added, is the business of the
aggregation's `ShareAdder`.

Hidden: every client's keys and rows, from each server, if the two do not collude and follow the
protocol, and if each share tells nothing; of the sum, only what is combined is learnt. Not hidden
where rows are dropped: how many clients sent each key, from both servers, up to the noise that they
add to counts.

Not covered: clients that lie; servers, or a trainer that names the cohort, that invent clients to
get past `min_clients`; whether a message comes from the client it is said to come from, which is
for the connection to say; what sums of several rounds tell together, which is for noise to hide.

No sockets, no clock, no files: the caller keeps the messages, and brings them again when they are
to be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from keyhole.aggregation.shares import (
    DroppedRows,
    Receipt,
    SumFacts,
    pack_counts,
    pack_list,
    pack_receipt,
    pack_share,
    read_counts,
    read_list,
    read_own,
    read_public,
    read_receipt,
)
from keyhole.crypto.codec import Body
from keyhole.crypto.prg import Prg
from keyhole.errors import (
    InputError,
    MismatchError,
    NotAdmittedError,
    ReplayError,
    ThresholdError,
    TooLateError,
    ViolationError,
)

Noise: TypeAlias = Callable[[int], Prg]
"""Number of a part -> where the noise of one server on it comes from."""


class ShareAdder(Protocol):
    """Adds up shares at one server. It holds no table before the first is added."""

    def check_own(self, own: bytes) -> None:
        """Raises MalformedError where a payload for this server, of the right length, is none;
        left out, all bytes are one."""
        _ = own

    def check_public(self, public: bytes) -> None:
        """Raises MalformedError where a payload for both servers, of the right length, is none;
        left out, all bytes are one."""
        _ = public

    def add(self, public: bytes, own: bytes) -> None:
        """Adds what one client sent; both payloads have been checked."""
        ...

    def take(self, noise: Noise) -> Sequence[Body]:
        """Returns the payload of this server's share, with its noise; nothing is left."""
        ...


@runtime_checkable
class CountingAdder(ShareAdder, Protocol):
    """Adds up shares of a sum that drops rows of few clients: whose facts have a `min_per_key`."""

    def counts(self, noise: Noise) -> bytes:
        """Returns this server's share of how many clients sent each key, as many bytes as the facts
        say."""
        ...

    def drop(self, one: bytes, other: bytes) -> int:
        """Sets its share of rows that too few clients sent to zero, by the counts of both servers,
        the first's first; returns how many of those that anybody sent."""
        ...


_Phase: TypeAlias = Literal["open", "closed", "reduced", "agreed", "counted", "dropped", "over"]


class SumServer:
    """Adds up one sum at one of the two servers.

    Args:
        cohort: names of everybody asked, in an order that both servers are told.
    """

    def __init__(
        self, facts: SumFacts, party: int, cohort: Sequence[str], adder: ShareAdder
    ) -> None:
        if party not in (0, 1):
            raise InputError(
                f"there are two servers: got {party}; expected 0 or 1; say which this one is"
            )
        self._places = {name: place for place, name in enumerate(cohort)}
        if len(self._places) != len(cohort) or len(cohort) > facts.max_clients:
            raise InputError(
                f"the cohort cannot be added: got {len(cohort)} clients, {len(self._places)} of "
                f"them different; expected {facts.max_clients} different ones or fewer; make the "
                "params for the cohort that is asked"
            )
        self.facts, self.party = facts, party
        self._counting = _counting(adder) if facts.count_bytes else None
        names = b"".join(name.encode() + b"\0" for name in cohort)
        self._names, self._cohort, self._adder = tuple(cohort), sha256(names).digest(), adder
        self._phase: _Phase = "open"
        self._digests: dict[int, bytes] = {}  # of public messages
        self._owns: dict[int, bytes] = {}  # digests of own messages
        self._seen: set[bytes] = set()
        self._left: set[int] = set()  # agreed on, and not yet added
        self._dropped = DroppedRows()

    def __repr__(self) -> str:
        """Nothing of a message."""
        return f"SumServer(party {self.party}, {self._phase}, {len(self._digests)} clients)"

    @property
    def clients(self) -> tuple[str, ...]:
        """Whom it has; once reduced, whom both have."""
        return tuple(self._names[place] for place in sorted(self._digests))

    def check(self, body: bytes) -> None:
        """Looks at what a client sent to this server, without taking note of it."""
        own, public = self.facts.split_body(self.party, body)
        digest, payload = read_own(self.facts, self.party, own)
        self._adder.check_own(payload)
        if self.party == 0:
            self._adder.check_public(read_public(self.facts, public))
            if sha256(public).digest() != digest:
                raise MismatchError(
                    "a public message that its own message does not speak of: got another digest; "
                    "expected two messages of one update; share the update again"
                )

    def accept(self, client: str, own: bytes) -> bytes:
        """Takes note of a client's own message; returns SHA-256 of its public message.

        Raises:
            ReplayError: a client, or a public message, that was accepted before.
        """
        place = self._place(client)
        if self._phase != "open":
            raise TooLateError(
                "the sum takes no more clients: got one more client; expected clients while it is "
                "open; take part in a later round"
            )
        digest, payload = read_own(self.facts, self.party, own)
        self._adder.check_own(payload)
        if place in self._digests or digest in self._seen:
            raise ReplayError(
                "a client, or a message, that was accepted before: got a second time; expected "
                "each once a round; leave it out"
            )
        self._digests[place], self._owns[place] = digest, sha256(own).digest()
        self._seen.add(digest)
        return digest

    @property
    def receipt(self) -> Receipt:
        """What it adds."""
        return Receipt.of(self.facts, self._cohort, self._digests)

    def close(self) -> bytes:
        """Accepts nobody any more; returns the list of clients, for the other server's `reduce`.
        Closing again changes nothing."""
        if self._phase == "open":
            self._phase = "closed"
        self._demand("closed")
        return pack_list(self.facts, self.party, self._cohort, self._digests)

    def reduce(self, other: bytes) -> bytes:
        """Keeps the clients that both servers have, with the same public message.

        Returns:
            Its receipt, for the other server's `agree`.

        Raises:
            MismatchError: the servers were told different cohorts.
            ThresholdError: fewer than `min_clients` are left.
        """
        self._demand("closed")
        cohort, theirs = read_list(self.facts, 1 - self.party, other)
        if cohort != self._cohort:
            raise different("another cohort", "the same names in the same order at both")
        self._digests = {p: d for p, d in self._digests.items() if theirs.get(p) == d}
        self._check_cohort()
        self._phase = "reduced"
        return pack_receipt(self.facts, self.party, self.receipt)

    def agree(self, other: bytes) -> None:
        """Compares the receipt of the other server; before that nothing is added."""
        self._demand("reduced")
        theirs, ours = read_receipt(self.facts, 1 - self.party, other), self.receipt
        if theirs != ours:
            got = f"{len(ours.places)} clients here and {len(theirs.places)} there"
            raise different(got, "the same receipt at both")
        self._check_cohort()
        self._left = set(self._digests)
        self._phase = "agreed"

    def add(self, client: str, public: bytes, own: bytes) -> None:
        """Adds a client that both servers have agreed on, with the message that was accepted.

        Raises:
            ViolationError: the servers have not agreed.
            MismatchError: nobody they agreed on, or other messages than those they agreed on.
            ReplayError: it has been added.
        """
        self._demand("agreed")
        place = self._place(client)
        if place not in self._digests:
            raise different("a client that is not in both lists", "those of `clients`")
        if place not in self._left:
            raise ReplayError(
                "a client that was added before: got a second time; expected once; stop"
            )
        is_known = sha256(own).digest() == self._owns[place]
        if not is_known or sha256(public).digest() != self._digests[place]:
            raise different("other messages of a client", "those that were agreed on")
        payload = read_public(self.facts, public)
        self._adder.check_public(payload)
        self._left.discard(place)
        self._adder.add(payload, read_own(self.facts, self.party, own)[1])

    def counts(self, noise: Noise = lambda part: Prg.fresh()) -> bytes:
        """Returns this server's share of how many clients sent each key, for the other's `drop`;
        once, since noise that is drawn twice can be taken away."""
        self._demand("agreed")
        self._check_all_added()
        self._phase = "counted"
        return pack_counts(self.facts, self.party, self._told_by().counts(noise))

    def drop(self, one: bytes, other: bytes) -> None:
        """Drops the rows that too few clients sent, by what both servers told, the first's first:
        the same rows at both."""
        self._demand("counted")
        both = read_counts(self.facts, 0, one), read_counts(self.facts, 1, other)
        digest = sha256(one + other).digest()
        self._dropped = DroppedRows(self._told_by().drop(*both), digest)
        self._phase = "dropped"

    def share(self, noise: Noise = lambda part: Prg.fresh()) -> list[Body]:
        """Returns this server's share of the sum as a message in pieces, once.

        Args:
            noise: where the noise on a part comes from. A party that knows it can take it away.

        Raises:
            ViolationError: the servers have not agreed, or the share has been given out.
        """
        self._demand("dropped" if self.facts.count_bytes else "agreed")
        self._check_cohort()
        self._check_all_added()
        self._phase = "over"
        payload = self._adder.take(noise)
        return pack_share(self.facts, self.party, self.receipt, payload, self._dropped)

    def _told_by(self) -> CountingAdder:
        """Who counts; raises ViolationError where the params ask for no counts."""
        if self._counting is None:
            raise ViolationError(
                "counts of a sum that opens every row: got a server that is asked for them; "
                "expected params with a least number of clients of a key; open the sum with them"
            )
        return self._counting

    def _check_all_added(self) -> None:
        if self._left:
            raise different(f"{len(self._left)} clients that are not added", "none")

    def _place(self, client: str) -> int:
        place = self._places.get(client)
        if place is None:
            raise NotAdmittedError(
                f"a client outside the cohort: got another name; expected the {len(self._names)} "
                "clients of the cohort; take part in a round that asks for this client"
            )
        return place

    def _demand(self, phase: _Phase) -> None:
        if self._phase != phase:
            raise ViolationError(
                f"a step of a sum out of turn: got a sum that is {self._phase}; expected one that "
                f"is {phase}; accept, close, reduce, agree, add and share in this order, each "
                "once, with counts and drop before share where rows are dropped"
            )

    def _check_cohort(self) -> None:
        if len(self._digests) < self.facts.min_clients:
            raise ThresholdError(
                f"too few clients for a sum to be released: got {len(self._digests)}; expected "
                f"{self.facts.min_clients} or more; ask more clients"
            )


def _counting(adder: ShareAdder) -> CountingAdder:
    if not isinstance(adder, CountingAdder):
        raise InputError(
            f"a sum that cannot drop rows of few clients: got {type(adder).__name__} without "
            "`counts` and `drop`; expected both, since its params have a least number of clients "
            "of a key; write them, or leave that number out"
        )
    return adder


def different(got: str, allowed: str) -> MismatchError:
    """Returns the error of servers that disagree."""
    return MismatchError(
        f"the servers do not speak of the same clients and messages: got {got}; expected "
        f"{allowed}; run the round again"
    )
