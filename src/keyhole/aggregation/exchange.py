"""Drives a sum of shares: the same functions in process, on devices and at two aggregators.

`SumClient` turns an update into messages, `SumServer` adds them up at one of the two servers.
`client_of` and `server_of` make them for one sum of one model, whose digest all messages hold.
`settle` and `add_all` bring a server from its closed list to its share of the sum: `add_shared`
runs them for both servers in one process, and an aggregator runs them for its own, with the other
one at the end of a line. `SharedSum` is what an aggregation offers for that.

Hidden from each server: keys and updates, as far as a share tells nothing and the two do not
collude. Not hidden: who takes part, and the sum once both shares are combined.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, Protocol, TypeAlias, cast

from keyhole.aggregation.base import (
    Aggregation,
    ClientResult,
    PartSum,
    SumRequest,
    SumResult,
    about_of,
    derived,
    name_of_sum,
    withheld,
)
from keyhole.aggregation.shares import (
    NO_MODEL,
    Share,
    SplitUpdate,
    SumFacts,
    SumShares,
    pack_shares,
    read_share,
)
from keyhole.aggregation.sum_server import Noise, ShareAdder, SumServer, different
from keyhole.arrays import Tree
from keyhole.crypto.prg import Prg
from keyhole.errors import InputError, ReplayError
from keyhole.primitives.layout import KeysBySpace, Layout

Split: TypeAlias = Callable[[ClientResult, Prg, Prg], SplitUpdate]
"""(a client's update and keys, its coins for rounding, its secrets) -> what each server gets."""


@dataclass(frozen=True)
class SumRound:
    """The sum of one round, of which an aggregation makes params.

    Args:
        keys_per_client: key space -> max keys of a client; public.
        name: 16 bytes that name the sum among all.
        asked: clients: more cannot be added.
        with_counts: whether the sum says how many clients chose each key.
        min_clients: below which nothing is released, where that is more than the aggregation's
            own floor.
        norm: clients shorten updates that measure more.
    """

    layout: Layout
    keys_per_client: Mapping[str, int]
    name: bytes
    asked: int
    with_counts: bool = False
    min_clients: int = 0
    norm: float = inf


class SumClient:
    """Turns one update into shares.

    Args:
        split: how the aggregation splits an update. A party that foresees the coins learns a little
            more than the sum; one that knows the secrets learns the update.
    """

    def __init__(self, facts: SumFacts, split: Split) -> None:
        self._facts, self._left = facts, [split]

    def shard(self, update: Tree, keys: KeysBySpace, coins: Prg | None = None) -> SumShares:
        """Returns the messages, once.

        Args:
            update: start minus end, shaped as the sub-model of `keys`.
            keys: what the sub-model was selected with, by key space.
            coins: by which numbers are rounded up or down; fresh if None. A simulation gives them.

        Raises:
            NotFiniteError: NaN or infinity in the update.
            ReplayError: there have been shares: two of one update show more than one.
        """
        if not self._left:
            raise ReplayError(
                "an update is shared once a round: got a second time; expected one update for each "
                "client of a sum; make a client for each update"
            )
        secrets, split = Prg.fresh(), self._left.pop()
        one = ClientResult(0, "sent", keys, update)
        return pack_shares(self._facts, split(one, coins or secrets, secrets), secrets)


class SharedSum(Aggregation, Protocol):
    """An aggregation by shares at two servers, which aggregators and devices can use.

    It declares `servers=2` and `is_served`. Its `add` is `add_shared(self, request)`.
    """

    def params(self, round: SumRound) -> bytes:
        """Returns all that clients and servers of one sum must agree on, in one text."""
        ...

    def facts(self, params: bytes) -> SumFacts:
        """Returns what params mean to those who carry messages.

        Raises:
            MalformedError: they are not params of this aggregation and version.
        """
        ...

    def split(self, params: bytes, layout: Layout) -> Split:
        """Returns how a client splits its update.

        Raises:
            StaleError: the params do not fit the model.
        """
        ...

    def adder(self, params: bytes, party: int) -> ShareAdder:
        """Returns what adds up one sum at one server, 0 or 1."""
        ...

    def decode(self, params: bytes, shares: tuple[memoryview, memoryview]) -> Sequence[PartSum]:
        """Returns the sum of each part, from the payloads of the two servers' shares."""
        ...


def check_shared(aggregation: Any) -> SharedSum:
    """Returns an aggregation that two aggregators can run.

    Raises:
        InputError: it does not declare two servers and `is_served`, or lacks a method.
    """
    about = about_of(aggregation)
    lacking = [name for name in _SERVED_HALF if not hasattr(aggregation, name)]
    if lacking or not about.is_shared:
        got = f" without {', '.join(lacking)}" if lacking else ""
        raise InputError(
            f"a sum that two aggregators cannot run: got {about.name}{got}; expected servers=2, "
            f"is_served, and {', '.join(_SERVED_HALF)}; add them: a wrapper forwards those of what "
            "it wraps"
        )
    return cast(SharedSum, aggregation)


_SERVED_HALF = ("params", "facts", "split", "adder", "decode")


def facts_of(aggregation: SharedSum, params: bytes, model: bytes) -> SumFacts:
    """Returns the facts of a sum of updates of one model.

    Args:
        model: SHA-256 of the manifest of the round: what clients trained on.
    """
    return replace(aggregation.facts(params), model=model)


def client_of(aggregation: SharedSum, params: bytes, model: bytes, layout: Layout) -> SumClient:
    """Returns the client of one update of a model; raises StaleError where params do not fit."""
    return SumClient(facts_of(aggregation, params, model), aggregation.split(params, layout))


def server_of(
    aggregation: SharedSum, params: bytes, model: bytes, party: int, cohort: Sequence[str]
) -> SumServer:
    """Returns the state of one sum at one server, 0 or 1; `cohort` in an order that both know.

    Raises:
        InputError: a cohort that is repeated or too large.
    """
    adder = aggregation.adder(params, party)
    return SumServer(facts_of(aggregation, params, model), party, cohort, adder)


Told: TypeAlias = tuple[Literal["list", "receipt"], bytes]
"""What one server tells the other, who answers with its own of the same kind."""


def settle(server: SumServer) -> Generator[Told, bytes, None]:
    """Agrees with the other server: yields what to tell it, and is sent what it told.

    Raises:
        CohortError, ProtocolError: the two do not agree; nothing may be given out.
    """
    listed = yield "list", server.close()
    receipt = yield "receipt", server.reduce(listed)
    server.agree(receipt)


def add_all(
    server: SumServer,
    body_of: Callable[[str], bytes],
    public_of: Callable[[str], bytes],
) -> None:
    """Adds everybody that both servers agreed on.

    Args:
        body_of: name of a client -> what it sent to this server.
        public_of: name of a client -> its public message, where this server was not sent it.
    """
    for name in server.clients:
        own, public = server.facts.split_body(server.party, body_of(name))
        server.add(name, public or public_of(name), own)


def prepare(aggregation: SharedSum, round: SumRound) -> tuple[bytes, SumFacts]:
    """Returns the params of a round's sum, and their facts."""
    params = aggregation.params(round)
    facts = aggregation.facts(params)
    if round.with_counts and not facts.with_counts:
        raise InputError(
            f"a sum that counts nobody: got {aggregation.about.name}, over those who chose a key; "
            "expected an aggregation whose facts have counts; divide by the cohort"
        )
    promised = round.norm, aggregation.about.noise_added
    if (facts.norm, facts.noise) != promised:
        raise InputError(
            "a sum whose params do not keep a promise of privacy: got facts with norm "
            f"{facts.norm:g}, noise {facts.noise:g}; expected norm {promised[0]:g}, noise "
            f"{promised[1]:g}; put `round.norm` and the noise of `with_ring` into the params"
        )
    return params, facts


def combine(aggregation: SharedSum, params: bytes, shares: Sequence[Share]) -> Sequence[PartSum]:
    """Returns the sum of each part, from both servers' shares."""
    one, other = sorted(shares, key=lambda share: share.party)
    if (one.party, other.party) != (0, 1):
        raise different("two shares of one server", "one of each")
    if one.told != other.told:
        got = f"{one.clients} and {other.clients} clients, {one.dropped} and {other.dropped} rows"
        raise different(f"{got} dropped", "shares with the same receipt and counts")
    return aggregation.decode(params, (one.payload, other.payload))


def add_shared(aggregation: SharedSum, request: SumRequest) -> SumResult:
    """Adds up a round at two servers in this process; what sealing adds to messages is counted, and
    left out where nobody stands between."""
    about = aggregation.about
    asked, counts = len(request.results), request.needs_counts
    seen, layout = about.seen_by(with_counts=counts), request.layout
    minimum = about.min_clients_for(asked, request.goal)
    if len(request.sent) < minimum:  # the servers would refuse, after all the work
        return withheld(len(request.sent), minimum, seen)
    name = name_of_sum(request)
    params, facts = prepare(
        aggregation, SumRound(layout, request.keys_per_client, name, asked, counts, minimum)
    )
    sent = {
        str(one.client): client_of(aggregation, params, NO_MODEL, layout).shard(
            one.update, one.keys, derived(b"rounding", request.seed_path, one.client)
        )
        for one in request.sent
    }
    shares = _shares(aggregation, params, request, sent)
    parts = combine(aggregation, params, shares)
    return SumResult(
        tuple(part.divided(request.over, shares[0].clients) for part in parts),
        dict.fromkeys((r.client for r in request.sent), facts.upload_bytes),
        tuple(part.known_counts for part in parts) if request.with_counts else None,
        unplaced_keys=sum(one.unplaced for one in sent.values()),
        dropped_rows=shares[0].dropped,
        seen_by=seen,
    )


def _shares(
    aggregation: SharedSum, params: bytes, request: SumRequest, sent: Mapping[str, SumShares]
) -> list[Share]:
    """What both servers give out, with noise that derives from the seed of the simulation."""
    cohort = [str(one.client) for one in request.results]
    servers = [server_of(aggregation, params, NO_MODEL, party, cohort) for party in (0, 1)]
    for server in servers:
        for name, shares in sent.items():
            server.accept(name, shares.to[server.party])
    _settle_both(*servers)

    def noise_of(server: SumServer) -> Noise:
        return lambda part: derived(b"noise", request.seed_path, part, server.party)

    def add(server: SumServer) -> None:
        party = server.party
        add_all(server, lambda name: sent[name].bodies[party], lambda name: sent[name].public)

    def share_of(server: SumServer) -> Share:
        pieces = server.share(noise_of(server))
        return read_share(server.facts, server.party, b"".join(pieces))

    if servers[0].facts.count_bytes:  # both hold a table at one time
        for server in servers:
            add(server)
        counts = [server.counts(noise_of(server)) for server in servers]
        for server in servers:
            server.drop(*counts)
        return [share_of(server) for server in servers]
    given = []
    for server in servers:
        add(server)
        given.append(share_of(server))
    return given


def _settle_both(one: SumServer, other: SumServer) -> None:
    """Lets two servers of this process agree, each told what the other says."""
    sides = settle(one), settle(other)
    told = [next(side)[1] for side in sides]
    told = [side.send(answer)[1] for side, answer in zip(sides, told[::-1], strict=True)]
    for side, answer in zip(sides, told[::-1], strict=True):
        with suppress(StopIteration):
            side.send(answer)
