"""CohortSpec: who takes part in a round, and when the round closes; a part of `RunSpec`.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from keyhole.errors import InputError
from keyhole.rounds.fields import Count, CountOrNone, Positive, Record, said
from keyhole.sampling import Sampling

Share = Annotated[float, Meta(ge=0, lt=1)]


class CohortSpec(Record, frozen=True, kw_only=True):
    """Client sampling and simulated dropout."""

    size: Annotated[Count, said("Clients per round.", "--cohort")]
    sampling: Annotated[
        Sampling,
        said(
            "Client sampling: fixed-size without replacement, Poisson, or cyclic, among clients of "
            "the data; or, with --devices, among the devices that have checked in.",
            "--sampling",
        ),
    ] = "fixed"
    over_selection: Annotated[
        Annotated[float, Meta(ge=1)],
        said(
            "Over-selection: clients asked per update that a round waits for.", "--over-selection"
        ),
    ] = 1.0
    min_updates: Annotated[
        CountOrNone, said("Min updates with which a round makes a server step.", "--min-updates")
    ] = 0
    lost_before: Annotated[
        Share, said("Share of clients that drop out before they receive slices.")
    ] = 0.0
    lost_after: Annotated[
        Share, said("Share of clients that drop out before they send an update.")
    ] = 0.0
    min_waiting: Annotated[
        CountOrNone,
        said(
            "With --sampling check-in: min devices that wait before a round is drawn from them; 0 "
            "for as many as are asked.",
            "--min-waiting",
        ),
    ] = 0
    rest: Annotated[
        CountOrNone,
        said(
            "With --sampling check-in: rounds that a device sits out after each that it was drawn "
            "for.",
            "--rest",
        ),
    ] = 0
    min_memory_mb: Annotated[
        CountOrNone,
        said(
            "With --sampling check-in: draw devices that say they have so much memory; 0 for all.",
            "--min-memory-mb",
        ),
    ] = 0
    seconds: Annotated[
        Positive | None,
        said(
            "With --devices: close a round after this many seconds with what has arrived. With "
            "--concurrency: wait this long for a device.",
            "--round-seconds",
        ),
    ] = None

    def drawing(self) -> dict[str, Any]:
        """Returns what decides how a cohort is drawn: the fields of `Cohorts` but for its
        population."""
        told = self.values()
        return {name: told[name] for name in told if name not in ("min_memory_mb", "seconds")}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling != "check-in" and (self.min_waiting or self.rest or self.min_memory_mb):
            raise InputError(
                "settings of devices that check in do nothing without them: got "
                f"{self.sampling} sampling with min_waiting {self.min_waiting}, rest {self.rest}, "
                f"min_memory_mb {self.min_memory_mb}; expected 0 of each; leave them out, or take "
                "check-in sampling"
            )
