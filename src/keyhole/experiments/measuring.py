"""Measures the states of a trial, on the data of its splits or on devices; and says its result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import nan

from keyhole.errors import InputError
from keyhole.experiments.task import Metrics, TaskParts
from keyhole.experiments.trial import Best, Result
from keyhole.rounds.best import BestModel
from keyhole.rounds.loop import Evaluation, Rounds, Run
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState
from keyhole.wire.settings import HELD_OUT_SHARE

BESIDE = "held_out_"
"""What names of metrics of the trainer's own examples begin with, beside those of devices."""


def measured_on(spec: RunSpec, metrics: Mapping[str, float], split: str) -> str:
    """Returns on what the metrics of a model were measured, as a word before a metric's name: on a
    split where the trainer measures; on what devices hold out, or train on, where they do, as far
    as all of them say one of these.

    Args:
        metrics: the last that were measured.
        split: that the trainer measures on.

    >>> from keyhole.experiments.specs import spec_of
    >>> by_devices = spec_of("so_tag", {"cohort.sampling": "check-in", "cohort.evaluators": 4})
    >>> measured_on(by_devices, {"recall_at_5": 0.5, "held_out_share": 1.0}, "test")
    'held-out'
    >>> measured_on(by_devices, {"recall_at_5": 0.5, "held_out_share": 0.0}, "test")
    'training'
    """
    if not spec.cohort.evaluators:
        return split
    words = {1.0: "held-out", 0.0: "training"}
    return words.get(metrics.get(HELD_OUT_SHARE, nan), "devices'")


@dataclass(frozen=True, eq=False)
class Measuring:
    """How the states of a trial are measured.

    Args:
        spec: of the run.
        task: on its data.
        own: metrics of your own beside the task's.
    """

    spec: RunSpec
    task: TaskParts
    own: Evaluation | None

    def training(self, split: str, kind: Rounds | None, run: Run) -> Metrics:
        """Returns the metrics of a state while its run trains: on a split, or of devices where they
        measure it. Those of held-out examples beside them have `held_out_` before their names."""
        cohort = self.spec.cohort
        if not cohort.evaluators:
            return self.on(split)
        from keyhole.service.evaluating import evaluation_by

        of_devices = evaluation_by(kind, run, self.task.measured, cohort)
        if self.spec.held_out is None:
            return of_devices
        here = self.on(split)

        def together(state: ServerState) -> dict[str, float]:
            held = {f"{BESIDE}{name}": value for name, value in here(state).items()}
            return {**of_devices(state), **held}

        return together

    def on(self, split: str) -> Metrics:
        """Returns the task's metrics on a split, and your own."""
        usual, own = self.task.metrics_on(split), self.own
        if own is None:
            return usual

        def together(state: ServerState) -> dict[str, float]:
            known, more = dict(usual(state)), own.of(state)
            if twice := known.keys() & more:
                raise InputError(
                    f"{self.spec.metrics} names a metric as the task does: got "
                    f"{', '.join(sorted(twice))}; expected other names; rename it"
                )
            return known | more

        return together

    def result(
        self, run: Run, kind: Rounds | None, seconds: float, notes: Iterable[str], asked: str
    ) -> Result:
        """Returns what a trial has reached whose last round is made.

        Args:
            kind: what made its rounds.
            asked: digest of what was asked.
        """
        last = run.records[-1].metrics if self.spec.cohort.evaluators else {}
        found = last or Evaluation(self.training("test", kind, run)).of(run.state)
        result = Result.of(run.records, found, seconds, notes, asked)
        if run.best is None:
            return result
        is_early = result.rounds < self.spec.rounds
        why = run.best.goal.why(run.records) if is_early else None
        return replace(result, best=self._best(run, run.best), stopped=why)

    def _best(self, run: Run, kept: BestModel) -> Best | None:
        """The best model of a trial and what it reaches; None where none was measured."""
        found = kept.goal.progress(run.records)
        if found.rounds is None or found.value is None:
            return None
        if self.spec.cohort.evaluators:
            then = next(r.metrics for r in run.records if r.round + 1 == found.rounds)
        else:
            state = kept.state(run.state.layout, run.state.optimizer)
            then = Evaluation(self.on("test")).of(state)
        return Best(found.rounds, kept.goal.metric, found.value, dict(then))
