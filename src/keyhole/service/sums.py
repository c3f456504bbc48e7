"""Keeps the sums of one aggregator: opened and closed by a trainer, filled by devices, in files.

`AggregatorSettings` is what its operator allows, whatever a trainer asks for; `Sums` answers what
is asked. All that outlives a process is in `sum_files.py`.

A sum is closed once: by its trainer, who says when and not whose shares count, or when it has been
open for as long as the operator allows. Everybody whose share is at both aggregators is added. From
then on its name, and with it every share that was made for it, is of no use again.

Whatever is told to anyone is on the disk first. A process that is killed goes on with every sum
where it was: lists do not change once they are closed, and a share that was written is given out
again as the same bytes, with the same noise. A share that was not yet written was given to nobody.

What this aggregator sees: names of devices, one message of a length that the params fix from each,
and the names that the other aggregator has. What it stores of a device tells it no key and no
number, if the other one does not work with it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import msgspec

from keyhole.aggregation import shared_sum
from keyhole.aggregation.base import about_of
from keyhole.aggregation.exchange import SharedSum, facts_of, server_of
from keyhole.aggregation.privacy.ledger import UNBOUNDED, Budget, Charge, Ledger
from keyhole.aggregation.shares import SumFacts, open_share, read_receipt
from keyhole.aggregation.sum_server import SumServer
from keyhole.errors import (
    BusyError,
    ConflictError,
    InputError,
    KeyholeError,
    NotFoundError,
    TooLargeError,
    TooLateError,
)
from keyhole.service.access import check_device_name, not_admitted
from keyhole.service.sum_files import SumFiles, damaged, model_of
from keyhole.wire.messages import Failure, SumOpening, SumPhase, SumStatus, read_message


@dataclass(frozen=True)
class AggregatorSettings:
    """What an aggregator allows."""

    party: int
    aggregation: SharedSum = field(default_factory=shared_sum)  # how shares are added up
    # the operator's own: a sum whose params allow fewer is not opened; None for what the
    # aggregation declares, which is a share of the cohort unless noise hides each
    min_clients: int | None = None
    close_after: float = 86_400.0  # seconds after which an open sum closes by itself
    max_sums: int = 4  # open, being added up or not yet forgotten, of all trainers
    # bytes of a server's share of one sum. Adding up takes as much memory, and some 256 MB for the
    # messages of a batch; one sum is added up at a time
    max_table: int = 2 << 30
    max_upload: int = 64 << 20  # bytes of one device's body
    max_cohort: int = 1 << 20  # devices of one sum
    budget: Budget = UNBOUNDED  # what may be spent of a device's privacy, over all runs

    def __post_init__(self) -> None:
        minimum = 1 if self.min_clients is None else self.min_clients
        limits = minimum, self.max_sums, self.max_table, self.max_upload, self.max_cohort
        if self.party not in (0, 1) or min(limits) < 1 or not self.close_after > 0:
            raise InputError(
                f"settings of an aggregator that make no sense: got party {self.party}, least "
                f"number {min(limits)}, {self.close_after:g} s; expected party 0 or 1, limits from "
                "1, and seconds above 0; choose other numbers"
            )

    def check(self, opening: SumOpening, facts: SumFacts, live: int) -> None:
        """Refuses a sum that this aggregator will not take part in; `live` others are here."""
        if opening.party != self.party:
            raise ConflictError(
                f"this is the other aggregator: got a sum for party {opening.party}; expected "
                f"party {self.party}; name the aggregators in the order of their parties"
            )
        minimum = self._minimum(opening, facts)
        if facts.min_clients < minimum:
            raise InputError(
                f"a sum of too few clients could be released: got at least {facts.min_clients}; "
                f"expected at least {minimum} of {len(opening.cohort)}, says the operator of this "
                "aggregator; raise --min-clients or the noise of the trainer, or lower it here"
            )
        self._check_cohort(opening, facts)
        self._check_sizes(facts)
        if live >= self.max_sums:
            raise BusyError(
                f"too many sums are under way: got {live + 1}; expected {self.max_sums}; close and "
                "forget older ones"
            )

    def _minimum(self, opening: SumOpening, facts: SumFacts) -> int:
        """The min number of clients that a sum may be released with."""
        if self.min_clients is not None:
            return self.min_clients
        about = about_of(self.aggregation)
        share = 0.0 if facts.hides_each_client else about.min_share
        return replace(about, min_share=share).min_clients_for(len(opening.cohort))

    def _check_cohort(self, opening: SumOpening, facts: SumFacts) -> None:
        names = opening.cohort
        for name in names:
            check_device_name(name)
        limit = min(self.max_cohort, facts.max_clients)
        if len(names) > limit or len(set(names)) != len(names):
            raise TooLargeError(
                f"the cohort cannot be added up: got {len(names)} devices, {len(set(names))} of "
                f"them different; expected {limit} different ones; ask fewer, each once"
            )

    def _check_sizes(self, facts: SumFacts) -> None:
        upload = facts.body_bytes(self.party)
        if facts.share_bytes > self.max_table or upload > self.max_upload:
            raise TooLargeError(
                f"a sum that is too large for this aggregator: got {facts.share_bytes} bytes of "
                f"sums, {upload} of one upload; expected {self.max_table} and {self.max_upload} "
                "bytes; raise --max-table-mb or --max-body-mb there, or train a smaller model"
            )


class _Kept(msgspec.Struct, frozen=True):
    """The file `opening`: who opened the sum, and with what."""

    owner: str
    opening: SumOpening


@dataclass(frozen=True, repr=False)
class HeldSum:
    """A sum that is here; `checker` looks at messages and takes note of none."""

    round: str
    owner: str
    opening: SumOpening
    checker: SumServer

    @cached_property
    def members(self) -> frozenset[str]:
        """The cohort, for looking names up."""
        return frozenset(self.opening.cohort)


class Sums:
    """What an aggregator is asked, one method for each route. Threads may share it."""

    def __init__(self, files: SumFiles, settings: AggregatorSettings) -> None:
        self.files, self.settings = files, settings
        self.ledger = Ledger(files.ledger, settings.budget)
        self._here: dict[str, HeldSum] = {}
        self._lock = threading.Lock()

    def open(self, owner: str, round_id: str, body: bytes) -> Literal["opened", "known"]:
        """Opens a sum; doing it again with the same bytes changes nothing."""
        opening = read_message(body, SumOpening)
        facts = facts_of(self.settings.aggregation, opening.terms, model_of(round_id))
        kept = msgspec.json.encode(_Kept(owner, opening))
        with self._lock:
            live = [each for each in self.files.rounds() if each != round_id]
            self.settings.check(opening, facts, len(live))
            self.ledger.check(_entry(facts, owner, opening.cohort))
            is_new = self.files.open(round_id, facts.round, kept)
        return "opened" if is_new else "known"

    def held(self, round_id: str, owner: str | None = None) -> HeldSum:
        """A sum that is here, which `owner` must have opened, or anyone if None; raises
        NotFoundError where there is none."""
        found = self._here.get(round_id)
        if found is None or not self.files.has(round_id, "opening"):
            kept, settings = self.files.kept(round_id, "opening", _Kept), self.settings
            params, model = kept.opening.terms, model_of(round_id)
            try:
                checker = server_of(settings.aggregation, params, model, settings.party, ())
            except KeyholeError as error:  # they were checked when it was opened
                raise damaged("opening", "params that make no sense") from error
            found = self._here[round_id] = HeldSum(round_id, kept.owner, kept.opening, checker)
        if owner not in (None, found.owner):
            raise NotFoundError(
                "no such sum: got another round; expected a sum of one's own; open it"
            )
        return found

    def rounds(self, owner: str) -> list[str]:
        """The rounds of a trainer's sums that are here."""
        return [each for each in self.files.rounds() if self.held(each).owner == owner]

    def upload_bytes(self, round_id: str, device: str) -> int:
        """How long the body of a device of the cohort is."""
        spool = self.files.spool
        if not self.files.has(round_id, "opening") and spool.is_closed(round_id):
            raise _too_late()
        held = self.held(round_id)
        if device not in held.members:
            raise not_admitted("a device outside the cohort", "a device of this round's cohort")
        if spool.is_closed(round_id) and not spool.has(round_id, device):
            raise _too_late()
        return held.checker.facts.body_bytes(self.settings.party)

    def upload(
        self, round_id: str, device: str, token: str, body: bytes
    ) -> Literal["stored", "known"]:
        """Keeps what a device sealed with its token, durably; sending the same again changes
        nothing. While the sum is open, another share takes its place: of a device that was stopped
        between the two."""
        opened = open_share(self.files.key, round_id, device, token, body)
        self.held(round_id).checker.check(opened)
        return self.files.spool.store(round_id, device, opened, may_replace=True)

    def charge(self, round_id: str, devices: Sequence[str]) -> None:
        """Notes what a sum spends of those whose updates are in it, before it is added up; noting
        it again changes nothing. Raises BudgetError where it is beyond the budget."""
        held = self.held(round_id)
        self.ledger.charge(_entry(held.checker.facts, held.owner, devices))

    def close(self, owner: str, round_id: str) -> None:
        """Takes no more shares: those that are here are added, if they are at both. Closing again
        changes nothing."""
        self.held(round_id, owner)
        self.files.spool.close(round_id)

    def close_overdue(self, now: float) -> list[str]:
        """Closes the sums that have been open for too long, in unix seconds; returns them."""
        found = []
        for round_id in self.files.rounds():
            with suppress(NotFoundError):
                since = self.files.opened_at(round_id)
                if self.phase(round_id) == "open" and now - since >= self.settings.close_after:
                    self.files.spool.close(round_id)
                    found.append(round_id)
        return found

    def phase(self, round_id: str) -> SumPhase:
        """How far a sum is."""
        if self.files.has(round_id, "failed"):
            return "failed"
        if self.files.has(round_id, "share"):
            return "ready"
        return "closing" if self.files.spool.is_closed(round_id) else "open"

    def status(self, owner: str, round_id: str, waiting: str = "") -> SumStatus:
        """How a sum stands: names and counts, nothing of a share."""
        held, phase = self.held(round_id, owner), self.phase(round_id)
        if phase == "failed":
            failure = self.files.kept(round_id, "failed", Failure)
            return SumStatus(phase, [], failure=failure)
        if phase == "ready":
            facts, receipt = held.checker.facts, self.files.read(round_id, "receipt")
            try:
                places = read_receipt(facts, self.settings.party, receipt).places
                return SumStatus(phase, [held.opening.cohort[place] for place in places])
            except (IndexError, KeyholeError) as error:
                raise damaged("receipt", f"{len(receipt)} bytes of something else") from error
        waiting = waiting if phase == "closing" else ""
        return SumStatus(phase, self.files.spool.devices(round_id), waiting)

    def given_out(self, owner: str, round_id: str, name: Literal["share", "receipt"]) -> Path:
        """The file that is given out; asked again, the same bytes. Raises BusyError where it is
        not ready, TooLateError where nothing will be given out."""
        self.held(round_id, owner)
        phase = self.phase(round_id)
        if phase == "failed":
            raise _given_up()
        if phase != "ready":
            raise _not_yet(f"a sum that is {phase}")
        return self.files.path(round_id, name)

    def for_peer(self, round_id: str, name: Literal["list", "receipt", "counts"]) -> bytes:
        """What the other aggregator asks for; raises BusyError or TooLateError where it is not so
        far, or given up."""
        self.held(round_id)
        if self.files.has(round_id, name):
            return self.files.read(round_id, name)
        if self.phase(round_id) == "failed":
            raise _given_up()
        raise _not_yet("a sum that is not so far")

    def public_of(self, round_id: str, device: str) -> bytes:
        """The public message of a device, for the other aggregator: once the sum is closed."""
        held = self.held(round_id)
        if not self.files.has(round_id, "list"):
            raise _not_yet("a sum that is not so far")
        body = self.files.spool.read(round_id, device)
        return held.checker.facts.split_body(self.settings.party, body)[1]

    def forget(self, owner: str, round_id: str) -> None:
        """Removes all of a sum but its name; the trainer has what it wants, or gives it up.
        Forgetting again, or twice at once, changes nothing."""
        with self._lock:
            was_here = self.files.spool.is_closed(round_id)
            if was_here and not self.files.has(round_id, "opening"):
                return
            held = self.held(round_id, owner)
            self.files.forget(round_id, held.checker.facts.round)
            self._here.pop(round_id, None)


def _entry(facts: SumFacts, owner: str, devices: Sequence[str]) -> Charge:
    """What a sum costs whom: against those who know the noise of the other aggregator, too."""
    return Charge(facts.round.hex(), owner, facts.noise_multiplier, tuple(devices))


def _not_yet(got: str) -> BusyError:
    return BusyError(f"the sum is not so far: got {got}; expected a later one; ask again")


def _too_late() -> TooLateError:
    return TooLateError(
        "the sum takes no more shares: got a share after it was closed; expected shares while it "
        "is open; check in for the next round"
    )


def _given_up() -> TooLateError:
    return TooLateError(
        "nothing of this sum is given out: got a sum that was given up; expected sums that both "
        "aggregators agree on; look at its status, and go on with the next round"
    )
