"""CohortSpec: who takes part in a round, and when the round closes; a part of `RunSpec`.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from keyhole.errors import InputError
from keyhole.rounds.fields import Count, CountOrNone, Positive, Record, said
from keyhole.sampling import Sampling

_OF_CHECK_INS = "min_waiting", "rest", "min_memory_mb", "evaluators"
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

    evaluators: Annotated[
        CountOrNone,
        said(
            "With --sampling check-in: evaluate on the examples of this many devices that wait; 0 "
            "evaluates on the trainer's data, where it has some.",
            "--evaluators",
        ),
    ] = 0

    def drawing(self) -> dict[str, Any]:
        """Returns what decides how a cohort is drawn: the fields of `Cohorts` but for its
        population."""
        told, others = self.values(), ("min_memory_mb", "seconds", "evaluators")
        return {name: told[name] for name in told if name not in others}

    def __post_init__(self) -> None:
        super().__post_init__()
        idle = [each for each in _OF_CHECK_INS if getattr(self, each)]
        if self.sampling != "check-in" and idle:
            raise InputError(
                f"settings of devices that check in do nothing without them: got {', '.join(idle)} "
                f"with {self.sampling} sampling; expected 0 of each; leave them out, or take "
                "check-in sampling"
            )
