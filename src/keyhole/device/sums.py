"""Sends an update to two aggregators: rounded, shared, and to neither in the clear.

The params of the sum stand in the manifest, which the trainer has published. Where the aggregators
are, and which authorities vouch for them, the device knows from its own operator: a trainer that
could name both would name two of its own. Both aggregators refuse messages under other params than
those they were told, so a trainer cannot tell devices one minimum and aggregators another. Every
message holds the digest of the manifest that the device trained by, and both aggregators refuse
what was made from another model than the one that the sum was opened for. That all devices were
given the same round only the trainer's signature says: a device that does not pin its key takes no
part, unless its operator would rather trust the service.

What goes to each aggregator is sealed to its key, which the operator names with its address: TLS
may end at a load balancer, and one who runs both balancers would read the update. The device's name
is sealed with it: sent on under another one, it does not open, and nobody else is charged. So is
its token, of which requests show a digest: one who runs both balancers could else send shares of
its own in the name of all others, and what is left of the sum is this device's update.

Hidden from each aggregator: keys and numbers of the update, if the two do not work together.
Hidden from what stands before the aggregators: the same, without that. Hidden from the trainer: all
but the sum. Not hidden: that the device takes part.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from keyhole.aggregation import shared_sum
from keyhole.aggregation.exchange import SharedSum, client_of
from keyhole.aggregation.privacy.ledger import Charge, Ledger
from keyhole.aggregation.shares import SumFacts, seal_share
from keyhole.arrays import Tree
from keyhole.crypto.hpke import PUBLIC_BYTES
from keyhole.device.device import Assignment, Device, DeviceKeys
from keyhole.device.fetch import KnownRound
from keyhole.errors import (
    AccessError,
    InputError,
    NotAdmittedError,
    NotFoundError,
    UntimelyError,
    ViolationError,
)
from keyhole.primitives.layout import Layout
from keyhole.primitives.report import Report
from keyhole.wire.assignment import name_in, shown
from keyhole.wire.http import OCTETS
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import SharePlace, read_message
from keyhole.wire.settings import SUM_SETTING, carried_in

_MAX_MESSAGE = 1 << 16  # bytes of an answer
_KEY_DIGITS = 2 * PUBLIC_BYTES


def params_in(known: KnownRound) -> bytes:
    """The params of the sum of a round; nothing if they are no text of bytes."""
    text = known.manifest.settings.get(SUM_SETTING)
    if not isinstance(text, str):
        raise InputError(
            f"round {known.id} has no secure sum: got settings without params of a sum; expected a "
            "round that the trainer has published with --aggregators; nothing is sent in another "
            "way: ask the operator"
        )
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""


def _check_bound(known: KnownRound) -> None:
    """Raises ViolationError for a model that the manifest does not bind: everybody could have been
    given another one under this name, and the sum would be one device's update."""
    loose = sum(not table.root for table in known.manifest.tables)
    if loose:
        raise ViolationError(
            f"round {known.id} does not bind its model: got {loose} tables without a root; "
            "expected a root of every table in a round with a secure sum; nothing was sent; ask "
            "the trainer to publish tables in place of slices on demand"
        )


def aggregator_of(text: str) -> tuple[str, bytes]:
    """The URL and the key of an aggregator, from `URL#KEY`: 64 hex digits, or a file of them.

    >>> aggregator_of("https://sums.example#" + "ab" * 32)[0]
    'https://sums.example'
    """
    url, _, key = text.partition("#")
    try:
        found = key if len(key) == _KEY_DIGITS else Path(key).read_text()[: _KEY_DIGITS + 1]
        public = bytes.fromhex(found)
    except (OSError, ValueError):
        public = b""
    if len(public) != PUBLIC_BYTES:
        raise InputError(
            f"an aggregator without its key: got {text!r}; expected URL#KEY, {_KEY_DIGITS} hex "
            "digits or a file that holds them; take it from seal.pub of the aggregator, or from "
            "what it prints when it starts"
        )
    return url, public


@dataclass(frozen=True)
class SumPolicy:
    """Which params a device accepts, whatever a trainer would like.

    Args:
        min_clients: a sum that may be released with fewer is refused.
        max_clients: a sum of more is refused: the more may be added, the coarser the rounding.
        max_clip: to which a number of an update may count.
        min_noise: what each aggregator adds at least, over the norm to which updates are
            shortened; 0 takes part without noise.
        max_upload: bytes.
        min_per_key: a sum that opens rows which fewer clients sent is refused; 0 takes part in
            sums that open all.
    """

    min_clients: int = 2
    max_clients: int = 1 << 24
    max_clip: float = inf
    min_noise: float = 0.0
    max_upload: int = 256 << 20
    min_per_key: int = 0

    def check(self, facts: SumFacts) -> None:
        """Raises ViolationError where the params are not accepted; nothing is sent before."""
        upload = facts.upload_bytes
        has_noise = self.min_noise == 0 or facts.noise >= self.min_noise * facts.norm
        checks = [
            (facts.min_clients >= self.min_clients, f"sums of {facts.min_clients} clients"),
            (facts.max_clients <= self.max_clients, f"up to {facts.max_clients} clients"),
            (facts.clip <= self.max_clip, f"numbers up to {facts.clip:g}"),
            (has_noise, f"noise {facts.noise:g} for a norm of {facts.norm:g}"),
            (upload <= self.max_upload, f"{upload} bytes"),
            (facts.min_per_key >= self.min_per_key, f"rows of {facts.min_per_key} clients"),
        ]
        refused = [words for is_fine, words in checks if not is_fine]
        if refused:
            raise ViolationError(
                f"params of a sum that this device does not accept: got {', '.join(refused)}; "
                f"expected {self}; nothing was sent; ask the trainer for other params"
            )

    def __str__(self) -> str:
        """Says it in words, for people."""
        return (
            f"sums of at least {self.min_clients} and at most {self.max_clients} clients, numbers "
            f"up to {self.max_clip:g}, noise of at least {self.min_noise:g} times the norm, at "
            f"most {self.max_upload} bytes, rows of at least {self.min_per_key} clients"
        )


def _with_report(
    known: KnownRound, report: Report, keys: DeviceKeys, unit: float
) -> tuple[Layout, Tree]:
    """What is sent and its layout: the update, with what the sum of the round asks for of its
    report; or what a round that measures asks for."""
    from keyhole.rounds.carried import Carried

    carried, (layout, _) = Carried(*carried_in(known.manifest.settings), unit), known.sent_as(keys)
    who = f"this device in round {known.manifest.number}"
    return carried.layout(layout), carried.put(report.update, report, who)


@dataclass(frozen=True)
class SumSend:
    """A `Send` of `Participant`: shares of the update to both aggregators.

    Args:
        first: the aggregator that is party 0, as its operator gave the address; with a token of
            this device there, or none to show the round's token for that aggregator instead, which
            counts at no other.
        second: party 1, likewise.
        keys: of each aggregator, 32 bytes, as `keyhole aggregator` shows them to its operator.
        policy: what the device accepts.
        aggregation: how the update is shared; the sum that comes with keyhole if left out.
        ledger: where the device notes what its sums spend, over all runs, and what it refuses
            beyond; None keeps none.
        name: of the device in the ledger, which several may share.
    """

    first: Device
    second: Device
    keys: tuple[bytes, bytes]
    policy: SumPolicy = field(default_factory=SumPolicy)
    aggregation: SharedSum = field(default_factory=shared_sum)
    ledger: Ledger | None = None
    name: str = "device"

    def __call__(self, device: Device, round: Assignment, update: Any, keys: DeviceKeys) -> int:
        """Sends the update of a round, or of a report; its weight and metrics are in the sum where
        the round asks for them, and are not sent otherwise.

        Raises:
            ViolationError: the device does not accept the params, or pins no key of the trainer.
            BudgetError: the sum would spend more than the device's own budget.
            MalformedError, StaleError: they are of another sum, or do not fit the model.
            InputError: the round has no secure sum, and nothing is sent in the clear instead; or an
                aggregator is the other party, or does not admit the device.
            NotFiniteError: NaN or infinity in the update.
            TooLateError, ConflictError: the sum is closed, without or with another share of this
                device.
            ServiceError: no usable answer. Where one aggregator has its share already, that is
                left out when the two compare, unless the device sends again before: while a sum is
                open, new shares take the place of its old ones.
        """
        device.refuse_unpinned()
        known = device.known(round)
        params = params_in(known)
        _check_bound(known)
        facts = self.aggregation.facts(params)
        self.policy.check(facts)
        layout, sent = _with_report(known, Report.of(update), keys, facts.clip)
        client = client_of(self.aggregation, params, digest_of(known.id), layout)
        made = client.shard(sent, known.sent_as(keys)[1])
        lines = [
            _Line(party, to, known.id, token)
            for party, (to, token) in enumerate(
                zip((self.first, self.second), round.sum_tokens or (None, None), strict=True)
            )
        ]
        bodies = [
            seal_share(key, known.id, line.name_of(device), line.token, body)
            for key, line, body in zip(self.keys, lines, made.bodies, strict=True)
        ]
        entry = Charge(round.round, device.client.place, facts.noise_multiplier, (self.name,))
        if self.ledger is not None:
            self.ledger.check(entry)
        for line in lines:  # nothing is sent, and nothing spent, that one of them would refuse
            line.ask()
        lines[0].post(bodies[0])
        # One share alone is random numbers: what can be read from a sum leaves with the
        # second. Its cost is on the disk before, and a round that is sent again costs once.
        if self.ledger is not None:
            self.ledger.charge(entry)
        lines[1].post(bodies[1])
        return sum(map(len, bodies))


@dataclass(frozen=True)
class _Line:
    """What a device says to one aggregator in a round.

    Args:
        told: the token of the round for that aggregator; one of the device's own goes before it.
    """

    party: int
    aggregator: Device
    round: str
    told: str | None

    def ask(self) -> None:
        """Raises an error where the aggregator would not take a share of this device now; where the
        trainer has not opened the sum yet, it asks again and again."""
        path, client = f"/v1/sums/{self.round}/shares", self.aggregator.client
        attempts = client.attempts(f"GET {path}")
        while True:
            try:
                with self._refusals():
                    got = client.get(path, token=self._shown, limit=_MAX_MESSAGE)
                    self._check_party(read_message(got.body, SharePlace).party)
                    return
            except NotFoundError:
                attempts.failed("the sum is not open yet")

    def name_of(self, device: Device) -> str:
        """The name by which the aggregator counts this device. The operator's tokens go before that
        of the round, which the service could have made out to another device."""
        own = self.aggregator.token_for(self.round), device.token_for(self.round), self.told
        return next((name for name in map(name_in, own) if name), "")

    def _check_party(self, said: int) -> None:
        if said != self.party:
            raise InputError(
                f"the aggregators are in another order: got party {said} at "
                f"{self.aggregator.client.place}, which was named as party {self.party}; expected "
                "party 0 first; change the order of --aggregators, each URL with its key, and of "
                "--aggregator-tokens"
            )

    def post(self, body: bytes) -> None:
        """Sends a body."""
        path, client = f"/v1/sums/{self.round}/shares", self.aggregator.client
        with self._refusals():
            client.send(path, body, token=self._shown, limit=_MAX_MESSAGE, content_type=OCTETS)

    @property
    def token(self) -> str:
        """The token that lets the device in; nothing where it has none."""
        own = self.aggregator.token_for(self.round)
        return (self.told if own is None else own) or ""

    @property
    def _shown(self) -> str | None:
        """What of it travels in the head of a request."""
        return shown(self.token) or None

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Tells a token that will never do, which ends a device, from one that came too late."""
        own = self.aggregator.token_for(self.round)
        try:
            yield
        except (AccessError, NotAdmittedError) as error:
            is_timely = own is None or self.aggregator.has_timely_token()
            if isinstance(error, UntimelyError) and is_timely:
                raise
            shown = "the token of the round" if own is None else "the token of --aggregator-tokens"
            raise InputError(
                f"aggregator {self.party} does not take {shown}: got {error.wrong} "
                f"({error.got}) from {self.aggregator.client.place}; expected a token of this "
                f"device that counts at party {self.party}; check the order of --aggregators and "
                "--aggregator-tokens, party 0 first, or ask the operator of that aggregator"
            ) from error
