"""Keeps the best model of a run by a metric, and ends a run that no longer gets better.

Which round is the best, and whether the run is over, follow from the records of its rounds alone,
so a run that was killed decides as one that was not. A better model is on the disk before the
record of its round is.

This module imports neither JAX nor Numba: a command reads its options before it loads either.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from keyhole.errors import InputError
from keyhole.parts import near_miss
from keyhole.rounds.fields import Count, NotNegative, Record, said

if TYPE_CHECKING:
    from keyhole.primitives.layout import Layout
    from keyhole.rounds.record import RoundRecord
    from keyhole.server.optimizers import Optimizer
    from keyhole.server.state import ServerState

BEST = "best.khs"
"""The file of a run's directory that holds its best model."""
_SMALLER_IS_BETTER = "loss", "error", "mse", "mae", "rmse", "perplexity"


class BestSpec(Record, frozen=True, kw_only=True):
    """Which model is kept beside the last one, and when a run ends before its rounds are made."""

    metric: Annotated[
        str | None,
        said(
            "Keep the model with the best value of this metric, too; result.json says after how "
            "many rounds that was.",
            "--best-metric",
        ),
    ] = None
    mode: Annotated[
        Literal["auto", "max", "min"],
        said(
            "Whether the largest or the smallest value is best; auto takes min for names that end "
            f"in {', '.join(_SMALLER_IS_BETTER)}, and max for others.",
            "--best-mode",
        ),
    ] = "auto"
    patience: Annotated[
        Count | None,
        said(
            "End the run after this many evaluations in a row without improvement; implies "
            "--best-metric with the task's metric.",
            "--patience",
        ),
    ] = None
    min_delta: Annotated[
        NotNegative,
        said(
            "With --patience: a change of the metric by no more than this is no improvement.",
            "--min-delta",
        ),
    ] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_delta and self.patience is None:
            raise InputError(
                f"min_delta does nothing alone: got {self.min_delta:g} without patience; expected "
                "a number of evaluations to wait for; pass --patience, or leave --min-delta out"
            )


@dataclass(frozen=True)
class Progress:
    """How far a run has come by a metric.

    Args:
        rounds: how many were made when the metric was best; None before it was measured.
        value: that it had then.
        waited: evaluations since the last improvement.
    """

    rounds: int | None = None
    value: float | None = None
    waited: int = 0


@dataclass(frozen=True)
class Goal:
    """What is best, by one metric.

    Args:
        metric: its name.
        is_max: whether larger is better.
        patience: evaluations without improvement after which the run ends; None for no end.
        min_delta: a change by no more than this is no improvement.
    """

    metric: str
    is_max: bool = True
    patience: int | None = None
    min_delta: float = 0.0

    @staticmethod
    def of(spec: BestSpec | None, usual: str) -> Goal | None:
        """Returns what a run asks for, None where that is nothing; `usual` is the task's metric."""
        if spec is None or (spec.metric is None and spec.patience is None):
            return None
        name = spec.metric or usual
        is_max = not name.lower().endswith(_SMALLER_IS_BETTER)
        is_max = is_max if spec.mode == "auto" else spec.mode == "max"
        return Goal(name, is_max, spec.patience, spec.min_delta)

    def progress(self, records: Sequence[RoundRecord]) -> Progress:
        """Returns how far a run has come; the first of equal values is the best.

        Raises:
            InputError: the run measures other metrics alone.
        """
        best, value, reference, waited = None, None, None, 0
        for record in records:
            if (found := self._of(record)) is None:
                continue
            if self._is_better(found, value):
                best, value = record.round + 1, found
            if self._is_better(found, reference, self.min_delta):
                reference, waited = found, 0
            else:
                waited += 1
        return Progress(best, value, waited)

    def is_over(self, records: Sequence[RoundRecord]) -> bool:
        """Returns whether the run has waited for long enough."""
        return self.patience is not None and self.progress(records).waited >= self.patience

    def why(self, records: Sequence[RoundRecord]) -> str | None:
        """Returns why a run ended before its rounds were made; None where it did not."""
        if not self.is_over(records):
            return None
        progress = self.progress(records)
        best = "never measured" if progress.value is None else f"{progress.value:.4g}"
        margin = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return (
            f"no better {self.metric}{margin} in {progress.waited} evaluations; best {best}"
            f"{'' if progress.rounds is None else f' after {progress.rounds} rounds'}"
        )

    def _of(self, record: RoundRecord) -> float | None:
        """The metric of a round that was evaluated."""
        if record.metrics and self.metric not in record.metrics:
            raise InputError(
                f"the run does not measure what it is to be best by: got {self.metric!r}; expected "
                f"{', '.join(record.metrics)}; {near_miss(self.metric, record.metrics)}"
            )
        return record.metrics.get(self.metric)

    def _is_better(self, value: float, than: float | None, by: float = 0.0) -> bool:
        if not isfinite(value):
            return False
        if than is None:
            return True
        return value - than > by if self.is_max else than - value > by


class BestModel:
    """The best model of a run so far.

    Args:
        goal: what is best.
        directory: of the run; None keeps the model in memory.
    """

    def __init__(self, goal: Goal, directory: Path | None) -> None:
        self.goal, self._directory = goal, directory
        self._state: ServerState | None = None

    def offer(self, state: ServerState, records: Sequence[RoundRecord]) -> bool:
        """Keeps the state if the last round is the best; returns whether it is."""
        progress = self.goal.progress(records)
        if progress.rounds != records[-1].round + 1:
            return False
        if self._directory is None:
            self._state = _copy(state)
        else:
            from keyhole.server.snapshots import Snapshot, save_snapshot

            told = {"rounds": progress.rounds, "metric": self.goal.metric, "value": progress.value}
            save_snapshot(self._directory / BEST, Snapshot(state, json.dumps(told).encode()))
        return True

    def state(self, layout: Layout, optimizer: Optimizer) -> ServerState:
        """Returns the best state."""
        if self._directory is not None:
            return load_best(self._directory, layout, optimizer)
        if self._state is None:
            raise _no_best("the run in memory")
        return self._state


def load_best(directory: Path, layout: Layout, optimizer: Optimizer) -> ServerState:
    """Returns the best state of the run in a directory.

    Raises:
        InputError: the run has kept none.
        StorageError: its file is damaged.
    """
    from keyhole.server.snapshots import load_snapshot

    path = directory / BEST
    if not path.exists():
        raise _no_best(str(directory))
    return load_snapshot(path, layout, optimizer=optimizer).state


def _copy(state: ServerState) -> ServerState:
    """The model of a state, apart from it; its optimizer starts anew."""
    from keyhole.server.state import ServerState

    found = ServerState.dense(state.layout, state.model(), state.optimizer)
    found.steps = state.steps
    return found


def _no_best(what: str) -> InputError:
    return InputError(
        f"{what} has kept no best model: got no {BEST}; expected a run with --best-metric or "
        "--patience, and an evaluation of it; train with one of them, or take the last model"
    )
