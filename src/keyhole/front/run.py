"""TrainedRun: what a run has come to, in memory or in a directory, to look at and to go on with."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from keyhole.arrays import Array, Tree
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import SavedTrial
from keyhole.experiments.report.results import broadcast_bytes
from keyhole.experiments.statistics import Spread, spread_of, spreads_of
from keyhole.experiments.trackers import Tracked, Tracker, run_tracked, trackers_of
from keyhole.experiments.trial import Result, rounds_kept
from keyhole.front.export import export_model
from keyhole.front.task import Metric, measure
from keyhole.parts import near_miss
from keyhole.rounds.best import BestModel, Goal
from keyhole.rounds.cores import Cores
from keyhole.rounds.loop import Rounds, Run
from keyhole.rounds.record import RoundRecord, read_records
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState
from keyhole.signals import stop_on_signals

if TYPE_CHECKING:
    from keyhole.experiments.report.comparison import Drawing, PlacedCurve

Against: TypeAlias = Literal["rounds", "bytes"]
OnRound: TypeAlias = Callable[[int, RoundRecord], None]


@dataclass(frozen=True, eq=False)
class TrainedTrial:
    """One repetition.

    Args:
        number: which one; arms of one seed meet the same clients in trials of one number.
        asked: what `run.json` says.
        records: of the rounds that were made.
        result: None while it is unfinished.
        state: what the server holds after the last round.
        best_state: what it held when it was best, where the run keeps that.
    """

    number: int
    asked: Mapping[str, Any]
    records: Sequence[RoundRecord]
    result: Result | None
    state: Callable[[], ServerState]
    best_state: Callable[[], ServerState]

    def held(self, best: bool) -> ServerState:
        """Returns the last state, or the best."""
        return self.best_state() if best else self.state()

    @property
    def bytes_per_round(self) -> Array:
        """What a client received and sent in each round, on average over its clients."""
        moved = [
            (sum(r.bytes_down) + sum(r.bytes_up)) / max(1, len(r.bytes_down)) for r in self.records
        ]
        return np.array(moved, np.float64)

    @property
    def broadcast_bytes(self) -> int:
        """What a client would receive and send in a round of the whole model."""
        return broadcast_bytes(int(self.asked["size"]["server"]))


class TrainedRun:
    """A run: its records, its models and its metrics. `train` returns one, `open_run` opens one.

    Args:
        trials: one for each repetition.
        directory: where the run is kept; None where it is in memory only.
        open_experiment: finds the task and its data, once something needs them.
    """

    def __init__(
        self,
        trials: Sequence[TrainedTrial],
        directory: Path | None,
        open_experiment: Callable[[], Experiment],
    ) -> None:
        self.trials, self.directory = list(trials), directory
        self._open_experiment = open_experiment

    def __repr__(self) -> str:
        found = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        place = "" if self.directory is None else f" in {self.directory}"
        place += f" from {self.start}" if self.start else ""
        return f"<run of {self.spec.task}: {self.rounds} rounds{place}; {found or 'no metrics'}>"

    @property
    def label(self) -> str:
        """What tables call it: the name of its directory, or its keys per client."""
        if self.directory is not None:
            place = self.directory.resolve()
            return place.parent.name if (place / "run.json").exists() else place.name
        counts = {space: keys.count for space, keys in self.spec.keys.items()}
        if len(counts) == 1:
            (m,) = counts.values()
            return "all keys" if m is None else f"m = {m}"
        return ", ".join(f"{space} {'all' if m is None else m}" for space, m in counts.items())

    @property
    def start(self) -> str:
        """What its model started from: the label of another run, "parameters", or nothing."""
        return str(self.trials[0].asked["titles"].get("start", ""))

    @cached_property
    def experiment(self) -> Experiment:
        """The task, its data and its parts; found when they are first asked for."""
        return self._open_experiment()

    @property
    def spec(self) -> RunSpec:
        """Everything that decides the run."""
        return RunSpec.read(self.trials[0].asked["spec"])

    @property
    def rounds(self) -> int:
        """How many rounds were made, in the trial that made fewest."""
        return min(len(trial.records) for trial in self.trials)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics on the test split in the end, means over finished trials."""
        return {name: spread.mean for name, spread in self.spreads.items()}

    @property
    def spreads(self) -> dict[str, Spread]:
        """The same, with deviation and 95 % interval over trials."""
        results = [trial.result for trial in self.trials if trial.result is not None]
        return spreads_of([result.metrics for result in results])

    def records(self, trial: int = 0) -> list[RoundRecord]:
        """Returns what happened in each round that a trial has made."""
        return list(self._trial(trial).records)

    def model(self, trial: int = 0, *, best: bool = False) -> Tree:
        """Returns the trained parameters of a trial, named as the model's own: those after the last
        round, or the best by the metric of a run with `best_metric` or `patience`."""
        return self._trial(trial).held(best).model()

    def export(self, path: Path | str, trial: int = 0, *, best: bool = False) -> str:
        """Writes the parameters that `model` returns to a .npz, .safetensors or .onnx file, with
        the run's record; returns their digest."""
        found = self._trial(trial).held(best)
        return export_model(found, Path(path), self.spec, self.experiment.task)

    def evaluate(
        self,
        metrics: Mapping[str, Metric] | None = None,
        split: str = "test",
        *,
        best: bool = False,
    ) -> dict[str, float]:
        """Returns metrics of the trained model on a split, means over trials; see
        `evaluate_spreads`."""
        found = self.evaluate_spreads(metrics, split, best=best)
        return {name: spread.mean for name, spread in found.items()}

    def evaluate_spreads(
        self,
        metrics: Mapping[str, Metric] | None = None,
        split: str = "test",
        trials: Sequence[int] | None = None,
        *,
        best: bool = False,
    ) -> dict[str, Spread]:
        """Returns metrics of the trained models on a split, with deviation and 95 % interval over
        trials.

        Args:
            metrics: name -> `(outputs, examples) -> number`, of a `Task`; None for the task's own.
            split: of the data, such as "train", "validation" or "test".
            trials: whose models are measured; None for all.
            best: measures the best models, as `model` returns them.

        Raises:
            InputError: there is no such split or trial, or a metric returns no number.
        """
        numbers = range(len(self.trials)) if trials is None else trials
        told = [self._evaluate(metrics, split, self._trial(n).held(best)) for n in numbers]
        return spreads_of(told)

    def _evaluate(
        self, metrics: Mapping[str, Metric] | None, split: str, state: ServerState
    ) -> dict[str, float]:
        """Metrics of one model."""
        task = self.experiment.task
        found: Mapping[str, Any] = task.metrics if metrics is None else task.predictions
        if metrics is not None and not found:
            raise InputError(
                f"task {self.spec.task} tells no outputs: got metrics of your own; expected a run "
                "of a kh.Task; leave metrics out, or name a function with --metrics"
            )
        if split not in found:
            raise InputError(
                f"the data have no such split: got {split!r}; expected {', '.join(found)}; "
                f"{near_miss(split, found)}"
            )
        if metrics is None:
            return dict(found[split](state))
        return measure(metrics, *found[split](state))

    def frame(self) -> Any:
        """Returns a pandas frame with a row for each trial and round: metrics, means of what
        clients reported as `client_NAME`, bytes of a client on average, clients asked and added.

        Raises:
            InputError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InputError(
                "records cannot become a frame: got no pandas; expected the extra 'data'; pip "
                "install 'keyhole[data]'"
            ) from None
        return pandas.DataFrame(
            [_row(trial.number, record) for trial in self.trials for record in trial.records]
        )

    def curve(self, metric: str, against: Against = "rounds") -> tuple[Array, Array]:
        """Returns where a metric was measured, and its values: (points,) and (trials, points).

        Args:
            against: "rounds", or "bytes" that a client has received and sent so far if it took
                part in every round: the mean over the clients of a round, added up.

        Raises:
            InputError: no round has such a metric.
        """
        if against not in ("rounds", "bytes"):
            raise InputError(
                f"a metric cannot be drawn against it: got {against!r}; expected rounds or "
                "bytes; choose one of them"
            )
        measured = [
            [i for i, r in enumerate(trial.records) if metric in r.numbers] for trial in self.trials
        ]
        common = sorted(set(measured[0]).intersection(*measured[1:]))
        if not common:
            known = sorted({n for t in self.trials for r in t.records for n in r.numbers})
            if metric in self.spreads:
                raise InputError(
                    f"{metric!r} was measured after the last round alone: got {self.rounds} rounds "
                    f"and evaluate_every={self.spec.evaluate_every}; expected a round that is "
                    "evaluated; train with a smaller evaluate_every"
                )
            raise InputError(
                f"the run has no such metric: got {metric!r}; expected "
                f"{', '.join(known) or 'one that was measured, see evaluate_every'}; "
                f"{near_miss(metric, known)}"
            )
        values = [[trial.records[i].numbers[metric] for i in common] for trial in self.trials]
        if against == "rounds":
            return np.array(common, np.float64) + 1, np.array(values)
        spent = [np.cumsum(trial.bytes_per_round)[common] for trial in self.trials]
        return np.mean(spent, axis=0), np.array(values)

    def plot(
        self, metric: str, against: Against = "rounds", path: str | Path | None = None
    ) -> Drawing:
        """Draws a metric with its 95 % interval over trials; returns matplotlib's figure.

        Args:
            metric: one that was measured while the run trained, or `client_NAME` for the mean of
                what clients reported.
            against: "rounds", or "bytes" as in `curve`.
            path: where to write it, as .png, .svg or .pdf; None writes nothing.
        """
        from keyhole.experiments.report.comparison import draw_comparison, write_figure

        count = len(self.trials)
        label = f"mean over {count} trials" if count > 1 else ""
        figure = draw_comparison({label: placed_curve(self, metric, against)}, metric, against)
        if path is not None:
            write_figure(figure, path)
        return figure

    def resume(
        self,
        rounds: int | None = None,
        progress: bool | OnRound = False,
        tracker: Tracked | Sequence[Tracked] | None = None,
    ) -> TrainedRun:
        """Goes on with every trial until it has this many rounds; returns the run with them.

        Args:
            rounds: in all, those made before included; None for those that were asked for.
            progress: a function is called with the trial and each record; True prints.
            tracker: as of `train`; one that logged the run before has each round once.

        Raises:
            InputError: the run is in memory only, or its task was an object and is not given.
        """
        if self.directory is None:
            raise InputError(
                "a run that is in memory only cannot go on: got no directory; expected one; train "
                "with out=DIRECTORY"
            )
        asked = self.experiment.spec.rounds if rounds is None else rounds
        spec = self.experiment.spec.changed({"rounds": asked})
        experiment = replace(self.experiment, spec=spec)
        trackers = trackers_of(tracker, self.directory.parent)
        trials = [
            run_trial(experiment, trial.number, folder, progress, trackers)
            for trial in self.trials
            for folder in [trial_directory(self.directory, trial.number)]
        ]
        return TrainedRun(trials, self.directory, lambda: experiment)

    def _trial(self, trial: int) -> TrainedTrial:
        if not 0 <= trial < len(self.trials):
            raise InputError(
                f"the run has no such trial: got {trial}; expected 0..{len(self.trials) - 1}; "
                "choose one of them"
            )
        return self.trials[trial]


def _row(trial: int, record: RoundRecord) -> dict[str, float]:
    """A round as a row of a frame."""
    clients = max(1, len(record.bytes_down))
    return {
        "trial": trial,
        "round": record.round + 1,
        "step": record.step,
        "clients": len(record.clients),
        "added": len(record.staleness),
        "bytes_down": sum(record.bytes_down) / clients,
        "bytes_up": sum(record.bytes_up) / clients,
        "distinct_keys": record.distinct_keys,
        **({} if record.total_weight is None else {"total_weight": record.total_weight}),
        **record.numbers,
    }


def placed_curve(run: TrainedRun, metric: str, against: Against) -> PlacedCurve:
    """Returns a metric of a run with its spread over trials, as figures draw it."""
    from keyhole.experiments.report.comparison import PlacedCurve

    at, values = run.curve(metric, against)
    spreads = (spread_of(column.tolist()) for column in values.T)
    return PlacedCurve(tuple(at.tolist()), tuple(s for s in spreads if s is not None))


def trial_directory(directory: Path, number: int) -> Path:
    """Where a trial of a run is kept: below the run's directory, or that itself."""
    is_trial = (directory / "run.json").exists()
    return directory if is_trial else directory / f"trial-{number}"


def run_trial(
    experiment: Experiment,
    trial: int,
    directory: Path | None,
    progress: bool | OnRound,
    trackers: Sequence[Tracker] = (),
    kind_of: Callable[[threading.Event], Rounds | None] = lambda stop: None,
) -> TrainedTrial:
    """Runs one trial, whose rounds are made by what `kind_of` returns for the event that stops
    them, or in this process. Ctrl-C ends it after the round under way, which is kept."""
    ended: list[Run] = []
    records: list[RoundRecord] = []
    made = 0 if directory is None else rounds_kept(directory)
    shown = progress if callable(progress) else printed(experiment.spec.rounds, progress, made)

    def note(record: RoundRecord) -> None:
        records.append(record)
        shown(trial, record)

    result = None
    with stop_on_signals() as stop, suppress(KeyboardInterrupt):  # a second one, in a round
        result = run_tracked(
            experiment,
            trackers,
            trial,
            directory,
            on_round=note,
            on_failure=lambda said: warnings.warn(said, RuntimeWarning, stacklevel=1),
            execute=experiment.engine or Cores(),
            stop=stop,
            kind=kind_of(stop),
            on_end=ended.append,
        )
    if result is None:
        raise KeyboardInterrupt(_interrupted(directory))
    if result.told and progress is True:
        sys.stderr.write(f"trial {trial}: {result.told}\n")
    asked = experiment.describe(trial)
    if directory is None:
        (run,) = ended
        best = run.best or BestModel(Goal(""), None)
        kept = partial(best.state, run.state.layout, run.state.optimizer)
        return TrainedTrial(trial, asked, records, result, lambda: run.state, kept)
    saved, made_all = SavedTrial(directory, experiment), read_records(directory / "records.jsonl")
    return TrainedTrial(trial, asked, made_all, result, saved.state, saved.best_state)


def _interrupted(directory: Path | None) -> str:
    """What is left of a trial that was interrupted."""
    if directory is None:
        return "the run was in memory only and is lost; with out=DIRECTORY the same call resumes it"
    return f"{directory} keeps {rounds_kept(directory)} finished rounds; the same call resumes it"


def printed(rounds: int, is_shown: bool, made: int = 0) -> OnRound:
    """Returns what prints a line for each evaluation, for the last round, and for a round whose
    updates could not be used; of those made before, one line for all."""

    def show(trial: int, record: RoundRecord) -> None:
        if record.round < made:
            if is_shown and record.round + 1 == made:
                sys.stderr.write(f"trial {trial}: resumed after round {made}/{rounds}\n")
            return
        is_lost = record.is_skipped and record.trouble
        if is_shown and (record.metrics or is_lost or record.round + 1 == rounds):
            told = [f"{name} {value:.4g}" for name, value in record.numbers.items()]
            found = ", ".join([*told, *filter(None, [record.trouble])])
            sys.stderr.write(f"trial {trial}, round {record.round + 1}/{rounds}: {found}\n")

    return show
