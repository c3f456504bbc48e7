"""The errors of a secure sum: they name places and counts, and nothing that a client holds."""

from __future__ import annotations

from collections.abc import Sequence

from keyhole.errors import (
    MalformedError,
    MismatchError,
    ReplayError,
    StaleError,
    ThresholdError,
    ViolationError,
)

__all__ = [
    "closed",
    "not_invited",
    "not_now",
    "other_list",
    "other_secret",
    "out_of_turn",
    "too_few",
    "violation",
]


def out_of_turn(steps: Sequence[str], step: str, current: str) -> ReplayError | StaleError:
    """A step before or after its turn: one that is over is a replay."""
    kind = ReplayError if steps.index(step) < steps.index(current) else StaleError
    return kind(
        "a step of a secure sum out of its turn",
        got=f"{step} during {current}",
        allowed="every step once, in order",
        fix="take part in a new round",
    )


def not_now(step: str, current: str) -> StaleError:
    """A message before its step, or after it is closed."""
    return StaleError(
        "a message of a secure sum that comes too early or too late",
        got=f"one of {step} during {current}",
        allowed=f"one of {current}",
        fix="wait for the list of the step before, or take part in a new round",
    )


def too_few(members: int, needed: int) -> ThresholdError:
    """Clients have left, and the sum cannot be opened any more."""
    return ThresholdError(
        "too few clients are left for a secure sum",
        got=members,
        allowed=f"{needed} or more",
        fix="start a new round with clients that stay; nothing of this one is released",
    )


def not_invited(place: int) -> StaleError:
    """A client that was not there at the step before."""
    return StaleError(
        "a client that is no longer part of this sum",
        got=f"place {place}",
        allowed="clients that have taken every step so far",
        fix="take part in a new round",
    )


def violation(got: str, allowed: str = "one kind of share of each client") -> ViolationError:
    """The server asks for what is forbidden."""
    return ViolationError(
        "the server of a secure sum asks for what would open an input",
        got=got,
        allowed=allowed,
        fix="do not trust this server; the client has forgotten its secrets",
    )


def closed(place: int) -> MalformedError:
    """Sealed shares that do not open."""
    return MalformedError(
        f"the shares of client {place} do not open",
        got="a wrong tag",
        allowed="shares sealed for this client in this round",
        fix="leave this client out of the next round",
    )


def other_list(place: int) -> MismatchError:
    """A confirmation of another list of survivors, or of none."""
    return MismatchError(
        f"client {place} has not confirmed the same survivors",
        got="a signature over something else",
        allowed="one list of survivors for everyone",
        fix="do not trust this server; no share has been given out",
    )


def other_secret(place: int) -> MismatchError:
    """A secret that was rebuilt and is not the one that was advertised."""
    return MismatchError(
        f"the shares of client {place} do not give the secret that it advertised",
        got="a false share, or a false secret",
        allowed="shares of the secret behind its keys",
        fix="start a new round without this client; nothing of this one is released",
    )
