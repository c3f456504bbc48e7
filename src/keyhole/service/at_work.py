"""Records of asynchronous rounds with devices: who is at work, on what, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from keyhole.rounds.asynchronous import AsyncRound
from keyhole.rounds.clients import Clients
from keyhole.rounds.machine import StreamMachine
from keyhole.sampling import ClientStream, Outcome


@dataclass(frozen=True)
class Version:
    """A published round: its number, and how many steps the server had made."""

    number: int
    step: int


@dataclass(frozen=True)
class AtWork:
    """A device at work."""

    client: int
    number: int  # of the round in which it began; updates of earlier ones are not of this time
    called: int  # number of the round that it was last called to
    until: float = inf  # when it is no longer waited for


@dataclass(frozen=True)
class End:
    """What became of a device, and the round that its update is of, if one came."""

    outcome: Outcome
    round: str = ""


@dataclass(frozen=True)
class StreamRound:
    """The round under way."""

    t: int
    machine: StreamMachine
    stream: ClientStream
    clients: Clients
    async_round: AsyncRound = field(default_factory=lambda: AsyncRound(is_of_devices=True))
    # who may begin with its slices: anyone who was at work at any moment of it. A device that
    # has just ended may have been told so before that was known
    cohort: dict[str, None] = field(default_factory=dict)
