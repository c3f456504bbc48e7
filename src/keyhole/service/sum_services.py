"""Adds up a round with two aggregators: what the trainer does in a secure sum.

Hidden from the trainer: every single update and its keys, as long as the two aggregators do not
work together, nor one of them with enough devices of the cohort. Not hidden: who takes part, and
the sum, with the noise of both aggregators where the run promises privacy.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from math import inf
from typing import TypeVar

import msgspec

from keyhole.about import Leak
from keyhole.aggregation import aggregation_names
from keyhole.aggregation.base import AggregationAbout, ClientResult, SumResult, about_of
from keyhole.aggregation.exchange import (
    SharedSum,
    SumRound,
    check_shared,
    combine,
    facts_of,
    prepare,
)
from keyhole.aggregation.privacy.mechanism import PrivateSum
from keyhole.aggregation.shares import (
    Receipt,
    Share,
    SumFacts,
    read_receipt,
    read_share,
    receipt_message_bytes,
)
from keyhole.aggregation.sum_server import different
from keyhole.delivery.clear import Pregenerated
from keyhole.delivery.records import Coding
from keyhole.errors import (
    AccessError,
    DamageError,
    InputError,
    MalformedError,
    NotAdmittedError,
    ServiceError,
    UntimelyError,
)
from keyhole.primitives.layout import Layout
from keyhole.rounds.adding import weighed
from keyhole.rounds.machine import terms_of
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Outcome
from keyhole.service.inbox import Gathered
from keyhole.wire.assignment import NameOf, device_name, is_timely
from keyhole.wire.http import HttpClient
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import Summaries, SumOpening, SumStatus, read_message
from keyhole.wire.settings import sum_settings

T = TypeVar("T")

_JSON = "application/json"
_MAX_MESSAGE = 256 << 20  # bytes of a status: names of a million devices fit


class AggregatorClient:
    """Asks one aggregator; every question may be asked twice.

    Args:
        token: of the trainer there, from its operator.
        party: 0 or 1, which of the two it is.
        wall: unix seconds.
    """

    def __init__(
        self,
        client: HttpClient,
        token: str,
        party: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._client, self._token, self.party, self._wall = client, token, party, wall

    def __repr__(self) -> str:
        """Without the token."""
        return f"AggregatorClient(party {self.party}, {self._client!r})"

    def close(self) -> None:
        """Closes connections."""
        self._client.close()

    def rounds(self) -> list[str]:
        """The rounds of this trainer's sums that are there."""
        with self._refusals():
            got = self._client.get("/v1/sums", token=self._token, limit=_MAX_MESSAGE)
        return _read(got.body, Summaries).rounds

    def open(self, round_id: str, params: bytes, cohort: list[str]) -> None:
        """Opens a sum."""
        opening = SumOpening(self.party, params, cohort)
        self._post(f"/v1/sums/{round_id}", msgspec.json.encode(opening))

    def status(self, round_id: str) -> SumStatus:
        """How far a sum is, asked once."""
        path, token = f"/v1/sums/{round_id}", self._token
        with self._refusals():
            got = self._client.exchange("GET", path, headers={}, token=token, limit=_MAX_MESSAGE)
        if got.problem:
            raise ServiceError(
                f"aggregator {self.party} gives no usable answer: got {got.problem}; expected its "
                "status; check that it runs; the round goes on when it does"
            )
        return _read(got.body, SumStatus)

    def close_sum(self, round_id: str) -> SumStatus:
        """No more shares: those at both are added up, and `status` tells when that is done."""
        return _read(self._post(f"/v1/sums/{round_id}/close", b""), SumStatus)

    def receipt(self, round_id: str, facts: SumFacts, asked: int) -> Receipt:
        """What it says that it added, of a sum that is ready."""
        limit = receipt_message_bytes(asked)
        return self._get(round_id, "receipt", limit, lambda b: read_receipt(facts, self.party, b))

    def share(self, round_id: str, facts: SumFacts) -> Share:
        """Its share of a sum that is ready; asked again, the same."""
        limit = facts.share_message_bytes
        return self._get(round_id, "share", limit, lambda b: read_share(facts, self.party, b))

    def _get(self, round_id: str, what: str, limit: int, read: Callable[[memoryview], T]) -> T:
        found: list[T] = []

        def check(body: memoryview) -> None:
            try:
                found.append(read(body))
            except MalformedError as error:
                raise DamageError(
                    f"the {what} of a sum was damaged: got {len(body)} bytes; expected that of the "
                    "sum; fetch it again"
                ) from error

        path = f"/v1/sums/{round_id}/{what}"
        self._client.get(path, token=self._token, limit=limit, check=check)
        return found[-1]

    def forget(self, round_id: str) -> None:
        """Removes a sum there."""
        self._post(f"/v1/sums/{round_id}/forget", b"")

    def _post(self, path: str, body: bytes) -> memoryview:
        with self._refusals():
            got = self._client.send(
                path, body, token=self._token, limit=_MAX_MESSAGE, content_type=_JSON
            )
        return got.body

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Says which of the two refuses the trainer, and what may be mixed up."""
        try:
            yield
        except (AccessError, NotAdmittedError) as error:
            if isinstance(error, UntimelyError) and is_timely(self._token, self._wall()):
                raise ServiceError(
                    f"aggregator {self.party} has another clock: got {error.got}; expected a token "
                    "that is good by the clock here to be good there; set one of the two clocks; "
                    "the round goes on when the run does"
                ) from error
            raise type(error)(
                f"aggregator {self.party} does not take the trainer's token: got {error.wrong} "
                f"({error.got}) from {self._client.place}; expected a token for aggregators, of "
                f"the operator of party {self.party}; check the order of --aggregators and "
                "--aggregator-tokens, party 0 first, or ask that operator for a token"
            ) from error


def _read(body: memoryview, kind: type[T]) -> T:
    try:
        return read_message(body, kind)
    except MalformedError as error:
        raise ServiceError(
            f"an aggregator says something that makes no sense: got {len(body)} bytes; expected "
            "messages as docs/wire.md describes them; check the URL, and that both sides are of "
            "one version"
        ) from error


SALT_BYTES = 16
"""Of what tells the sums of a run from those of all others; `kept_secret` keeps it."""


_LOOK_EVERY = 0.2  # seconds between two looks at the aggregators
_FIRST_WAIT, _LONGEST_WAIT = 0.02, 1.0  # seconds between looks at a sum that is added up


@dataclass(frozen=True)
class _Round:
    """The round that is under way."""

    layout: Layout
    parts: RunParts
    asked: tuple[int, ...]
    aggregation: SharedSum
    params: bytes
    facts: SumFacts
    name: NameOf


@dataclass(frozen=True)
class _Look:
    """What both aggregators said when they were asked last."""

    at: float = -inf
    devices: frozenset[str] = frozenset()
    is_closed: bool = False


class SumServices:
    """An inbox of two aggregators.

    The run's aggregation is a `SharedSum`: its rounding and its `min_clients` are those of the
    sums. What stands on the disks of the aggregators outlives this process: a run that goes on
    opens the same sums, and gets the same shares.

    Args:
        first: the aggregator that is party 0.
        second: party 1, run by other people.
        salt: 16 bytes that a run keeps as long as it goes on, and that no other run has: a name of
            a sum is used once.
        min_clients: below which no sum is released; 0 for what the run's aggregation declares, a
            share of the cohort.
        seconds: to wait for the aggregators once a round is closed, before giving up with an error;
            the round goes on when the run does.
        stop: once set, waiting ends with KeyboardInterrupt.
    """

    def __init__(
        self,
        first: AggregatorClient,
        second: AggregatorClient,
        *,
        salt: bytes,
        min_clients: int = 0,
        seconds: float = 600.0,
        stop: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if len(salt) != SALT_BYTES or (first.party, second.party) != (0, 1):
            raise InputError(
                f"two aggregators and a salt are needed: got parties {first.party} and "
                f"{second.party}, a salt of {len(salt)} bytes; expected parties 0 and 1, "
                f"{SALT_BYTES} bytes; name the aggregators in order; draw the salt with "
                "secrets.token_bytes"
            )
        self._both, self._salt = (first, second), salt
        self._seconds, self._clock, self._minimum = seconds, clock, min_clients
        self._stop = threading.Event() if stop is None else stop
        self._round: _Round | None = None
        self._look = _Look()
        self._was_away = False

    def __repr__(self) -> str:
        return f"SumServices({self._both[0]!r}, {self._both[1]!r})"

    def open(
        self,
        t: int,
        asked: Sequence[int],
        layout: Layout,
        parts: RunParts,
        name: NameOf = device_name,
        purpose: bytes = b"",
    ) -> Mapping[str, object]:
        """Makes the params of round t's sum, which devices are told."""
        ready, norm = _ready(layout, parts)
        about, cohorts = ready.about, parts.cohorts
        planned = about.min_clients or 0
        if parts.privacy is not None and self._minimum > planned:
            # That a sum is withheld tells something, which the account of a run has counted.
            raise InputError(
                "another min number of clients than privacy was accounted for: got "
                f"{self._minimum}; expected {planned}, as the run's aggregation has it; leave it "
                "out, or make the run with an aggregation of that min_clients"
            )
        goal = terms_of(cohorts, asked).goal
        minimum = self._minimum or about.min_clients_for(len(asked), goal)
        place = struct.pack("<2q", parts.trial, t)
        carried = parts.carried
        of_sum = SumRound(
            carried.layout(layout),
            parts.keys_per_client,
            sha256(b"keyhole-sum" + self._salt + place + purpose).digest()[:16],
            len(asked),
            with_counts=parts.over == "choosers",
            min_clients=max(minimum, cohorts.min_updates),
            norm=norm,
        )
        params, facts = prepare(ready, of_sum)
        self._round = _Round(layout, parts, tuple(asked), ready, params, facts, name)
        self._look, self._was_away = _Look(), False
        return sum_settings(params, carried.has_weights, carried.metrics)

    def begin(self, round_id: str) -> None:
        """Opens the sum at both aggregators, for updates of the model that was published; older
        ones of this trainer are forgotten there: runs that go on at the same time take tokens for
        different names."""
        now = self._now()
        facts = facts_of(now.aggregation, now.params, digest_of(round_id))
        self._round = replace(now, facts=facts)
        cohort = [now.name(client) for client in now.asked]
        for each in self._both:
            for older in each.rounds():
                if older != round_id:
                    each.forget(older)
            each.open(round_id, now.params, cohort)

    def devices(self, round_id: str) -> Iterable[str]:
        """Whose shares are at both. While one is away, whose were there before."""
        return self._looked(round_id).devices

    def refused(self, round_id: str) -> Iterable[str]:
        """Nobody's: aggregators see no update."""
        return ()

    def is_closed(self, round_id: str) -> bool:
        """Whether one of them takes no more."""
        return self._looked(round_id).is_closed

    def close(self, round_id: str) -> Iterable[str]:
        """Takes no more shares; returns whose are at both: the aggregators add them up."""
        self._look = self._read([each.close_sum(round_id) for each in self._both])
        return self._look.devices

    def add_up(self, round_id: str, outcomes: Mapping[int, Outcome], coding: Coding) -> Gathered:
        """Waits until both have added up, and combines their shares.

        Whose updates are in the sum, the aggregators say: everybody who reached both before it was
        closed, those that the round had stopped waiting for included.

        Raises:
            ServiceError: an aggregator is away for too long; the round goes on when the run does.
        """
        now, (summed, added) = self._now(), self._sum(round_id)
        results = []
        for client, outcome in outcomes.items():
            became: Outcome = outcome
            if summed.rows is not None and now.name(client) in added:
                became = "sent"
            elif summed.rows is not None and outcome == "sent":
                became = "lost_after"  # a share that reached one aggregator only
            results.append(ClientResult(client, became, {}, None))  # slices are its own affair
        arrived = [result.client for result in results if result.outcome in ("sent", "late")]
        up = dict.fromkeys(arrived, now.facts.upload_bytes)
        cost = Pregenerated(coding).cost(now.layout, {})
        incidents = ("an aggregator was away for a while",) * self._was_away
        return Gathered(results, cost, replace(summed, bytes_up=up), incidents)

    def _sum(self, round_id: str) -> tuple[SumResult, frozenset[str]]:
        """The sum, and whose updates are in it."""
        now = self._now()
        done = self._finished(round_id)
        failure = next((one.failure for one in done if one.failure is not None), None)
        if failure is not None:
            return SumResult(None, {}, seen_by=self._seen_by(), error=str(failure)), frozenset()
        receipt = self._receipt(round_id)
        shares = [each.share(round_id, now.facts) for each in self._both]
        if any(share.receipt != receipt.digest for share in shares):
            raise different("a share with another receipt", "the receipt that both gave out")
        of_run = now.parts
        divisor = shares[0].clients if of_run.privacy is None else of_run.cohorts.size
        sums = combine(now.aggregation, now.params, shares)
        rows = tuple(part.divided(of_run.divisor, divisor) for part in sums)
        added = frozenset(now.name(now.asked[place]) for place in receipt.places)
        own, reported = replace(of_run.carried, unit=now.facts.clip).split(now.layout, rows)
        total = SumResult(own, {}, dropped_rows=shares[0].dropped, seen_by=self._seen_by())
        return weighed(total, reported, of_run), added

    def _receipt(self, round_id: str) -> Receipt:
        """What both aggregators say that they added: the same, of this model and these params."""
        now = self._now()
        facts, asked = now.facts, len(now.asked)
        one, other = (each.receipt(round_id, facts, asked) for each in self._both)
        if one != other or one.model != facts.model or max(one.places, default=0) >= asked:
            got = f"receipts of {len(one.places)} and {len(other.places)} clients"
            raise different(got, "the same receipt of each, of the model that was published")
        return one

    def _finished(self, round_id: str) -> list[SumStatus]:
        """What both say once they are done, or one has given up."""
        until, wait = self._clock() + self._seconds, _FIRST_WAIT
        while True:
            try:
                found = [each.status(round_id) for each in self._both]
                phases = [one.phase for one in found]
                if "failed" in phases or phases == ["ready", "ready"]:
                    return found
                waiting = next((one.waiting for one in found if one.waiting), "not done yet")
            except ServiceError as error:
                waiting, self._was_away = f"{error.wrong}: {error.got}", True
            if self._clock() >= until:
                raise ServiceError(
                    f"the aggregators do not come to an end: got {waiting}; expected "
                    f"{self._seconds:g} s; check that both run and reach each other; the same "
                    "command goes on"
                )
            if self._stop.wait(wait):
                raise KeyboardInterrupt
            wait = min(_LONGEST_WAIT, 1.5 * wait)

    def _looked(self, round_id: str) -> _Look:
        """What both say; asked now and then, since every look is two requests."""
        if self._clock() - self._look.at >= _LOOK_EVERY:
            try:
                self._look = self._read([each.status(round_id) for each in self._both])
            except ServiceError:  # one is away: the deadline of the round goes on
                self._look, self._was_away = replace(self._look, at=self._clock()), True
        return self._look

    def _read(self, found: Sequence[SumStatus]) -> _Look:
        one, other = (frozenset(each.devices) for each in found)
        is_closed = any(each.phase != "open" for each in found)
        return _Look(self._clock(), one & other, is_closed)

    def _now(self) -> _Round:
        assert self._round is not None, "open comes first"
        return self._round

    def _seen_by(self) -> dict[str, str]:
        now = self._now()
        return seen_in_shares(about_of(now.parts.aggregate), with_counts=now.facts.with_counts)


def seen_in_shares(about: AggregationAbout, *, with_counts: bool) -> dict[str, str]:
    """Returns what each party learns of updates whose sum two aggregators open, the trainer among
    them."""
    minimum = about.min_per_key
    opened = f"the rows that {minimum} or more chose" if minimum else "all updates"
    trainer = Leak(updates=f"who takes part, and the sum of {opened}")
    about = replace(about, leaks={**about.leaks, "trainer": trainer})
    return about.seen_by(with_counts=with_counts)


def _ready(layout: Layout, parts: RunParts) -> tuple[SharedSum, float]:
    """How the run's updates are added up, and how much one may measure."""
    inner, privacy, about = parts.aggregate, parts.privacy, about_of(parts.aggregate)
    is_private = privacy is None or (about.noise == "by_parties" and privacy.kind == "all-rows")
    if not about.is_shared or not is_private:
        names = ", ".join(aggregation_names(lambda each: each.is_shared))
        kind = "" if privacy is None else f", {privacy.kind} noise"
        raise InputError(
            f"two aggregators cannot add up for this run: got {about.name}{kind}; expected {names} "
            "or your own sum of shares, without privacy or with noise on all rows by both parties; "
            f"choose --aggregation {names} and --dp-kind all-rows"
        )
    if privacy is None:
        return check_shared(inner), inf
    private = PrivateSum(inner, privacy, parts.cohorts)
    private.check(layout, parts.keys_per_client, parts.divisor)
    return check_shared(private.ready_inner()), privacy.clip
