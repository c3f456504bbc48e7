"""Describes a served round, and decides which device takes part and when it begins to fetch.

Functions without sockets and clock; `keyhole.rounds.machine` decides when a round closes.
"""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from typing import Any, Literal, Protocol, TypeAlias

import msgspec
import numpy as np

from keyhole.arrays import KeyArray
from keyhole.crypto.merkle import HASH_BYTES, HashArray, Tree
from keyhole.delivery.records import RecordArray
from keyhole.errors import InputError, MalformedError
from keyhole.wire.manifest import Manifest, TableInfo

Phase: TypeAlias = Literal["open", "closed"]
"""Whether the current round takes updates."""

NO_ROUND = "no such round"
"""What is wrong where a service has no such round, or not yet; devices tell by it whether a second
server lags behind or is set up wrongly."""

SHOWN = "kh2s."
"""How what is shown of a token begins."""


@dataclass(frozen=True)
class Fetched:
    """Records, and their leaves where the table has no tree that begins with them."""

    # (m, record_bytes), C-contiguous; this request's own, nobody else writes to it
    records: RecordArray
    # (m, 32), made when the records were
    leaves: HashArray = field(default_factory=lambda: np.empty((0, HASH_BYTES), np.uint8))


class SliceTable(Protocol):
    """One table of a round."""

    @property
    def info(self) -> TableInfo:
        """As the manifest has it."""
        ...

    @property
    def tree(self) -> Tree | None:
        """What binds its records; None where slices are computed on demand."""
        ...

    async def fetch(self, keys: KeyArray, out: RecordArray | None = None) -> Fetched:
        """Returns the records of keys that have been checked; order and repeats are kept.

        Args:
            out: (m, record_bytes), C-contiguous, where the records go.
        """
        ...

    def segment(self, place: int) -> memoryview:
        """Returns the records of one segment, read-only.

        Raises:
            NotFoundError: there is no such segment; slices on demand have none.
        """
        ...


@dataclass(frozen=True)
class OpenRound:
    """A round that can be served as long as it is held."""

    id: str
    manifest: Manifest
    encoded: bytes
    tables: tuple[SliceTable, ...]
    signature: bytes | None = None  # the trainer's, of the manifest


@dataclass(frozen=True)
class Current:
    """The newest round."""

    round: str
    number: int  # t
    phase: Phase
    # device -> its place; those that take part. None lets every device
    cohort: Mapping[str, int] | None = None
    # rounds that nobody starts in any more, while updates of those who did are still taken.
    # All are of one layout, that of the newest round
    trailing: tuple[str, ...] = ()


class RoundSource(Protocol):
    """The rounds of a service."""

    def current(self, newest: bool = False) -> Current | None:
        """Returns the newest round; None before the first. It may have been read a moment ago,
        unless `newest` asks to look again: who is let in, and whose update is taken, hangs on
        that."""
        ...

    def hold(self, round_id: str) -> AbstractContextManager[OpenRound]:
        """Keeps a round from being removed while it is used.

        Raises:
            NotFoundError: there never was such a round, as far as can be told.
            TooLateError: the round has been removed.
        """
        ...


_POWERS = {1 << place for place in range(41)}


class CheckIn(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a device says when it checks in, if it likes: powers of two, each for all numbers from
    there up to the next."""

    memory_mb: int | None = None  # that it has for a model
    examples: int | None = None

    def __post_init__(self) -> None:
        if not {self.memory_mb, self.examples} <= _POWERS | {None}:
            raise ValueError("a number that is no power of two up to 2^40")

    @staticmethod
    def of(memory_mb: int | None = None, examples: int | None = None) -> CheckIn:
        """Returns what is said of such numbers; nothing of 0."""
        return CheckIn(*(1 << n.bit_length() - 1 if n else None for n in (memory_mb, examples)))

    @staticmethod
    def read(body: bytes | bytearray) -> CheckIn:
        """Returns what the body of a check-in says, empty for nothing."""
        try:
            return msgspec.json.decode(body, type=CheckIn) if body else CheckIn()
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedError(
                f"what a device says at its check-in cannot be read: got {len(body)} bytes; "
                "expected nothing, or JSON of memory_mb and examples, powers of two; send it as "
                "docs/wire.md describes it"
            ) from error


@dataclass(frozen=True)
class Admission:
    """A device takes part in a round."""

    round: str
    number: int
    fetch_after: float  # seconds to wait before the first request, so that not all come at once


@dataclass(frozen=True)
class Wait:
    """A device comes back in this many seconds."""

    seconds: float


@dataclass(frozen=True)
class Pace:
    """How devices are spread over time."""

    spread: float = 0.0  # seconds over which the devices of a round begin to fetch
    again: float = 5.0  # seconds, on average, until a device without a round asks again

    def __post_init__(self) -> None:
        if not (0 <= self.spread < inf and 0 < self.again < inf):
            raise InputError(
                f"the pace of devices is out of range: got spread {self.spread} s, again "
                f"{self.again} s; expected a spread from 0, and again above 0; choose other seconds"
            )


Note: TypeAlias = Callable[[str, CheckIn, float], None]
"""`(device, what it says, seconds until it comes again)`: takes note of one that waits."""

Admit: TypeAlias = Callable[[str, Current | None, bool], Admission | Wait]
"""`(device, current round, whether it has sent its update) -> what it is told`."""


def admit(
    device: str,
    current: Current | None,
    has_sent: bool,
    pace: Pace,
    uniform: Callable[[], float],
) -> Admission | Wait:
    """Tells a device that checks in whether it takes part."""
    if (
        current is not None
        and current.phase == "open"
        and not has_sent
        and (current.cohort is None or device in current.cohort)
    ):
        return Admission(current.round, current.number, pace.spread * uniform())
    return Wait(pace.again * (0.5 + uniform()))


NameOf: TypeAlias = Callable[[int], str]
"""What a client is called at the service, by its number in the run."""


def device_name(client: int) -> str:
    """Returns what client number n of the population is called at the service.

    >>> device_name(7)
    'device-7'
    """
    return f"device-{client}"


def shown(token: str) -> str:
    """Returns what of a token may be seen on the way: what it says, and a digest of all of it, by
    which the service that signed it knows it. Who has seen that cannot make what the whole is for.

    A text that is no token comes back as it is.
    """
    version, _, rest = token.partition(".")
    payload, _, signature = rest.rpartition(".")
    if version != "kh2" or not payload or not signature:
        return token
    digest = urlsafe_b64encode(sha256(b"keyhole shown token\0" + token.encode()).digest())
    return f"{SHOWN}{payload}.{digest.decode().rstrip('=')}"


def claims_in(token: str) -> dict[str, Any]:
    """Returns what a token says; nothing where it is of another kind. The service checks it."""
    try:
        payload = token.split(".")[1]
        told = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return {"id": str(told["id"]), "device": str(told["device"]), **told}
    except (IndexError, KeyError, RecursionError, TypeError, ValueError):
        return {}


def is_timely(token: str | None, now: float) -> bool:
    """Returns whether a token is good at `now`, in unix seconds, as far as it tells. Where it is,
    a service that calls it untimely may have a wrong clock."""
    told = claims_in(token or "")
    try:
        return bool(told["issued"] <= now < told["expires"])
    except (KeyError, TypeError):
        return False  # not a token that one can read


def name_in(token: str | None) -> str:
    """Returns the name of the device in a token; nothing where it tells none."""
    return str(claims_in(token or "").get("device", ""))
