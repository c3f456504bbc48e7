"""Summons: how devices learn of a round, besides asking the service for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from keyhole.training.round_machine import Event

__all__ = ["CheckIns", "Summons"]


class Summons(Protocol):
    """Tells devices of a round, and hears what becomes of them."""

    def call(
        self,
        round_id: str,
        t: int,
        asked: Sequence[int],
        seconds: float,
        *,
        may_miss: bool = False,
    ) -> None:
        """Tells clients of a round that has been published; of an asynchronous one more than once,
        each time others.

        Args:
            round_id: of the round, as the service has it.
            t: its number.
            asked: clients by their number in the population.
            seconds: after which it closes, or these are given up; infinity if it waits.
            may_miss: whether others begin in place of those who cannot be told.
        """
        ...

    def news(self, now: float) -> Sequence[tuple[str, Event]]:
        """What has become known of clients since this was last asked, each with the round that they
        were called to; updates show in the inbox."""
        ...

    def over(self) -> None:
        """The round has closed: whatever is under way for it is in vain, unless it trails."""
        ...

    def incidents(self) -> list[str]:
        """What went wrong since this was last asked: sentences with counts, and without keys."""
        ...


class CheckIns:
    """Devices ask by themselves, and the service tells them; see `keyhole.serving.coordinator`."""

    def call(
        self,
        round_id: str,
        t: int,
        asked: Sequence[int],
        seconds: float,
        *,
        may_miss: bool = False,
    ) -> None:
        """The published round says who takes part."""

    def news(self, now: float) -> Sequence[tuple[str, Event]]:
        """A device that stays away says nothing."""
        return ()

    def over(self) -> None:
        """The service refuses what comes later."""

    def incidents(self) -> list[str]:
        """A device that fails does so unheard."""
        return []
