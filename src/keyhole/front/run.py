"""TrainedRun: what a run has come to, in memory or in a directory, to look at and to go on with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.trial import Result
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState


@dataclass(frozen=True, eq=False)
class TrainedTrial:
    """One repetition: its records, its result once it is finished, and where its model is."""

    records: Sequence[RoundRecord]
    result: Result | None
    state: Callable[[], ServerState]


class TrainedRun:
    """What `train` returns: the records, the model and the metrics of a run.

    Args:
        experiment: what was run.
        trials: one for each repetition.
        directory: where the run is kept; None where it is in memory only.
    """

    def __init__(
        self, experiment: Experiment, trials: Sequence[TrainedTrial], directory: Path | None
    ) -> None:
        self._experiment, self.trials, self.directory = experiment, list(trials), directory

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        place = "" if self.directory is None else f" in {self.directory}"
        return f"<run of {self.spec.task}: {self.rounds} rounds{place}; {found or 'no metrics'}>"

    @property
    def spec(self) -> RunSpec:
        """Everything that decides the run."""
        return self._experiment.spec

    @property
    def rounds(self) -> int:
        """How many rounds were made, in the trial that made fewest."""
        return min(len(trial.records) for trial in self.trials)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics on the test split in the end, means over trials."""
        results = [trial.result for trial in self.trials if trial.result is not None]
        names = results[0].metrics if results else {}
        return {name: float(np.mean([r.metrics[name] for r in results])) for name in names}

    def model(self, trial: int = 0) -> Tree:
        """Returns the trained parameters of a trial, named as the model's own."""
        return self._trial(trial).state().model()

    def evaluate(
        self, metrics: Mapping[str, Any] | None = None, split: str = "test", trial: int = 0
    ) -> dict[str, float]:
        """Returns metrics of the trained model on a split: the task's own, or others.

        Args:
            metrics: name -> `(outputs, examples) -> number`; None for those of the task.
        """
        found = self._experiment.task.metrics
        if split not in found:
            raise InputError(
                f"the data have no such split: got {split!r}; expected {', '.join(found)}; choose "
                "one of them"
            )
        del metrics
        return dict(found[split](self._trial(trial).state()))

    def curve(self, metric: str, against: str = "rounds") -> tuple[Array, Array]:
        """Returns where a metric was measured, and its values: (points,) and (trials, points).

        Args:
            against: "rounds", or "bytes" that a client has received and sent so far, on average.
        """
        at, values = [], []
        for trial in self.trials:
            spent = np.cumsum([np.mean(r.bytes_down) + np.mean(r.bytes_up) for r in trial.records])
            measured = [i for i, r in enumerate(trial.records) if metric in r.metrics]
            if not measured:
                known = sorted({name for r in trial.records for name in r.metrics})
                raise InputError(
                    f"the run has no such metric: got {metric!r}; expected "
                    f"{', '.join(known) or 'one that the task measures'}; choose one of them"
                )
            places = {"rounds": np.arange(1, len(trial.records) + 1), "bytes": spent}
            if against not in places:
                raise InputError(
                    f"a metric cannot be drawn against it: got {against!r}; expected rounds or "
                    "bytes; choose one of them"
                )
            at.append(places[against][measured])
            values.append([trial.records[i].metrics[metric] for i in measured])
        return np.mean(at, axis=0), np.array(values)

    def _trial(self, trial: int) -> TrainedTrial:
        if not 0 <= trial < len(self.trials):
            raise InputError(
                f"the run has no such trial: got {trial}; expected 0..{len(self.trials) - 1}; "
                "choose one of them"
            )
        return self.trials[trial]
