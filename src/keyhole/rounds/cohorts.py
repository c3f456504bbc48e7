"""Says who takes part in a round: what a run asks for, and how cohorts and nonces are drawn.

A run in process draws from its seed, so that it can be repeated. A run over a service has a secret
of its own, 32 bytes of the system's generator in a file that its owner alone can read: a run that
was stopped goes on with the same cohorts. From the secret derive the cohorts, and for each round a
nonce, which devices are told in place of the seed: keys that a round draws and the order of a
client's examples come from it.

Hidden: who is drawn, in rounds before and to come, from everyone who has neither the secret nor
sees who takes part; a nonce tells nothing about other rounds or about cohorts (BLAKE2b under a
key). Not hidden: who takes part in a round, from the trainer, the slice service and aggregators.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
from msgspec import Meta

from keyhole.errors import InputError
from keyhole.rounds.fields import Count, CountOrNone, Positive, Record, said
from keyhole.sampling import Cohorts, Sampling, sample_cohort

if TYPE_CHECKING:
    from keyhole.crypto.prg import Prg

OF_CHECK_INS = "min_waiting", "rest", "min_memory_mb", "evaluators"
"""Fields that do nothing without devices that check in."""
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
            "With --devices: close a round after this many seconds with what has arrived, and let "
            "an evaluation wait for devices, and for their answers, as long. With "
            "--concurrency: wait this long for a device.",
            "--round-seconds",
        ),
    ] = None

    evaluators: Annotated[
        CountOrNone,
        said(
            "With --sampling check-in: evaluate on the examples of this many devices that wait, or "
            "of those that are there after --round-seconds (else 60 s); 0 evaluates on the "
            "trainer's data, where it has some.",
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
        idle = [each for each in OF_CHECK_INS if getattr(self, each)]
        if self.sampling != "check-in" and idle:
            raise InputError(
                f"settings of devices that check in do nothing without them: got {', '.join(idle)} "
                f"with {self.sampling} sampling; expected 0 of each; leave them out, or take "
                "check-in sampling"
            )


Drawn: TypeAlias = Literal["simulated", "named", "secret"]
"""How cohorts come about. simulated: from the seed, in one process. named: from the seed, over a
service; anyone who knows or guesses the seed names them beforehand. secret: from the run's secret.
"""

SECRET_BYTES = 32
"""Bytes of the secret of a run."""

_SEED_BYTES = 16


@dataclass(frozen=True)
class Draws:
    """Where a run takes cohorts and nonces from.

    Args:
        kind: how cohorts come about.
        secret: 32 bytes; none for a run in process, which needs no nonce.
    """

    kind: Drawn = "simulated"
    secret: bytes = field(default=b"", repr=False, compare=False)

    def cohort(self, cohorts: Cohorts, seed: int, trial: int, t: int) -> tuple[int, ...]:
        """Returns the clients asked in round t; the same ones when asked again."""
        if self.kind != "secret":
            return sample_cohort(cohorts, seed, trial, t)
        count, population = cohorts.asked, cohorts.population
        if cohorts.sampling == "cyclic":
            start = t % cohorts.separation * count
            order = self._prg(b"order", 0).permutation(population)
            return tuple(order[start : start + count].tolist())
        prg = self._prg(b"cohort", t)
        if cohorts.sampling == "fixed":
            return tuple(prg.permutation(population)[:count].tolist())
        words, below = prg.words(population), (count << 64) // population
        taken = np.ones(population, bool) if below >> 64 else words < np.uint64(below)
        return tuple(np.flatnonzero(taken).tolist())

    def among(
        self, waiting: Collection[str], count: int, t: int, purpose: bytes = b"check-in"
    ) -> list[str]:
        """Returns `count` of the devices that wait, each as likely as any other; who waits, this
        does not decide."""
        names = sorted(waiting)
        order = self._prg(purpose, t).permutation(len(names))
        return [names[place] for place in order[:count].tolist()]

    def nonce(self, t: int) -> str:
        """Returns 32 hex digits, from which devices draw in round t."""
        return self._seed(b"nonce", t).hex()

    def run(self) -> str:
        """Returns 32 hex digits that tell this run from all others."""
        return self._seed(b"run", 0).hex()

    def rounding(self) -> int:
        """Returns the seed of the rounding of slices, one for the whole run: rows that do not
        change keep their bytes."""
        return int.from_bytes(self._seed(b"rounding", 0)[:4])

    def _prg(self, purpose: bytes, t: int) -> Prg:
        from keyhole.crypto.prg import Prg  # loads Numba, which a command's options need not

        return Prg(self._seed(purpose, t))

    def _seed(self, purpose: bytes, t: int) -> bytes:
        if len(self.secret) != SECRET_BYTES:
            raise InputError(
                f"draws of a run without its secret: got {len(self.secret)} bytes; expected "
                f"{SECRET_BYTES}; let `Served` make the rounds, which keeps one"
            )
        place = purpose + t.to_bytes(8, "little")
        made = blake2b(place, key=self.secret, digest_size=_SEED_BYTES, person=b"keyhole draws")
        return made.digest()


SIMULATED = Draws()
"""Cohorts from the seed, in one process."""
