"""Logs runs to the tools that people keep their runs in: TensorBoard, MLflow, Weights & Biases.

A tracker watches a run and is no part of it: a run is the same with another one or with none. What
a tracker raises is told once, and the run goes on without it.

Each time a trial is started, its tracker is told all rounds from the first, those made before
included. The trackers here keep one point for each round all the same: TensorBoard's files and
W&B's offline files of the trial are written anew, and MLflow is asked what it has.

No tracker here opens a connection, unless you name a server or set W&B's mode.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from keyhole.errors import InputError
from keyhole.experiments.specs import SYNTHETIC, name_of
from keyhole.experiments.trial import Result, digest_of
from keyhole.files import make_directory
from keyhole.identity import Ref
from keyhole.parts import PartKind, near_miss, resolve, words_for
from keyhole.rounds.fields import flatten
from keyhole.rounds.record import RoundRecord, read_records, scalars_of
from keyhole.rounds.spec import RunSpec

if TYPE_CHECKING:
    from keyhole.experiments.experiment import Experiment  # loads JAX, which help does not wait for


class Tracker(Protocol):
    """Is told what happens in a trial: `start`, `log` for each round, `finish`; then the next."""

    def start(self, spec: RunSpec, run: str) -> None:
        """Begins a trial, or goes on with it.

        Args:
            spec: everything that decides it, its number included (`spec.trial`); data that were
                given as an object go by their name.
            run: what tells the trial from all others; the same whenever it is resumed.
        """

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Takes numbers of a trial, by names such as "metrics/auc" or "cost/bytes_down".

        Args:
            round: how many rounds were done.
        """

    def finish(self) -> None:
        """Ends the trial, for now."""


TRACKER = PartKind("tracker", "runs", dict.fromkeys(("start", "log", "finish"), Callable))
Tracked: TypeAlias = Tracker | str
"""A tracker, its name, or module:NAME of one."""


class TensorBoard:
    """Writes event files for `tensorboard --logdir`; needs the extra `tensorboard`.

    Args:
        directory: gets a folder for each run, and in it one for each trial.
    """

    def __init__(self, directory: Path | str) -> None:
        _require("tensorboardX", "tensorboard")
        self.directory = Path(directory)
        self._writer: Any = None

    def start(self, spec: RunSpec, run: str) -> None:
        """Writes the trial's files anew."""
        from tensorboardX import SummaryWriter

        folder = self.directory / f"{name_of(spec)}-{run[:8]}" / f"trial-{spec.trial}"
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=10)

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Adds a scalar for each number."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, round)

    def finish(self) -> None:
        """Closes the files."""
        self._writer.close()


class MLflow:
    """Logs to MLflow; needs the extra `mlflow`.

    Args:
        to: a directory, which gets a database `mlflow.db` (`mlflow ui --backend-store-uri
            sqlite:///DIRECTORY/mlflow.db` shows it), or the address of a tracking server.
        experiment: that MLflow is to file the runs under.
    """

    def __init__(self, to: Path | str, experiment: str = "keyhole") -> None:
        _require("mlflow", "mlflow")
        self.to, self.experiment = to, experiment
        self._client: Any = None
        self._run = ""
        self._last: dict[str, int] = {}

    def start(self, spec: RunSpec, run: str) -> None:
        """Finds the trial by the tag that holds its identity, or creates it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # before the import: no network
        from mlflow import MlflowClient

        uri, place = str(self.to), None
        if "://" not in uri:
            folder = Path(uri).resolve()
            make_directory(folder)
            uri, place = f"sqlite:///{folder}/mlflow.db", (folder / "artifacts").as_uri()
        self._client = client = MlflowClient(tracking_uri=uri)
        known = client.get_experiment_by_name(self.experiment)
        found = known.experiment_id if known else client.create_experiment(self.experiment, place)
        earlier = client.search_runs([found], f"tags.keyhole_run = '{run}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            client.update_run(self._run, status="RUNNING")
        else:
            name = f"{name_of(spec)}-trial-{spec.trial}"
            self._run = client.create_run(
                found, run_name=name, tags={"keyhole_run": run}
            ).info.run_id
            for field, value in flatten(spec.describe()).items():
                client.log_param(self._run, field, value)
        self._last = {
            each: max(point.step for point in client.get_metric_history(self._run, each))
            for each in (earlier[0].data.metrics if earlier else ())
        }

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers that MLflow does not have of this round."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        named = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers.items()}
        points = [
            Metric(name, value, now, round)
            for name, value in named.items()
            if round > self._last.get(name, -1)
        ]
        if points:
            self._client.log_batch(self._run, metrics=points)

    def finish(self) -> None:
        """Tells MLflow that nobody is at work on the trial."""
        self._client.set_terminated(self._run)


class WandB:
    """Logs to Weights & Biases, offline unless you say otherwise; needs the extra `wandb`.

    Args:
        directory: gets W&B's folder `wandb`; `wandb sync` sends it, when you want that.
        project: that W&B is to file the runs under.
        mode: "offline" or "online"; None for the environment's `WANDB_MODE`, or else offline.
    """

    def __init__(
        self, directory: Path | str, project: str = "keyhole", mode: str | None = None
    ) -> None:
        _require("wandb", "wandb")
        self.directory, self.project = Path(directory), project
        self.mode: Any = mode or os.environ.get("WANDB_MODE") or "offline"
        self._run: Any = None

    def start(self, spec: RunSpec, run: str) -> None:
        """Begins the trial under its identity; offline, its earlier files are written anew."""
        if self.mode == "offline":  # before the import: no network
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        make_directory(self.directory)
        if self.mode == "offline":
            for old in self.directory.glob(f"wandb/offline-run-*-{run}"):
                shutil.rmtree(old)
        self._run = wandb.init(
            project=self.project,
            id=run,
            name=f"{name_of(spec)}-trial-{spec.trial}",
            group=name_of(spec),
            config=flatten(spec.describe()),
            dir=str(self.directory),
            mode=self.mode,
            resume="allow" if self.mode == "online" else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True
            ),
        )

    def log(self, round: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers at the round."""
        self._run.log(dict(numbers), step=round)

    def finish(self) -> None:
        """Closes W&B's files."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[Path], Tracker]] = {
    "tensorboard": lambda place: TensorBoard(place / "tensorboard"),
    "mlflow": MLflow,
    "wandb": WandB,
}
"""Name -> tracker that writes below a directory."""


def trackers_of(given: Tracked | Iterable[Tracked] | None, place: Path) -> list[Tracker]:
    """Returns the trackers that were asked for.

    Args:
        given: one or several: trackers, their names, or module:NAME of your own; a class is called.
        place: where those write that are given by name.

    Raises:
        InputError: there is none of a name, its package is missing, or your own is no tracker.
    """
    if given is None:
        return []
    if isinstance(given, str) or not isinstance(given, Iterable):
        return [_tracker(given, place)]
    return [_tracker(each, place) for each in given]


def _tracker(given: Tracked, place: Path) -> Tracker:
    found: Any = given
    if isinstance(given, str) and Ref(given).is_own:
        found = resolve(given)
        found = found() if isinstance(found, type) else found
    elif isinstance(given, str):
        if given.lower() not in TRACKERS:
            raise InputError(
                f"no such tracker: got {given!r}; expected {words_for(TRACKERS)}; "
                f"{near_miss(given, TRACKERS)}"
            )
        found = TRACKERS[given.lower()](place)
    TRACKER.check(given if isinstance(given, str) else "tracker", found)
    tracker: Tracker = found
    return tracker


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise InputError(
            f"rounds cannot be logged there: got no {module}; expected the extra '{extra}'; pip "
            f"install 'keyhole[{extra}]'"
        )


OnRecord: TypeAlias = Callable[[RoundRecord], None]


def run_tracked(
    experiment: Experiment,
    trackers: Sequence[Tracker],
    trial: int,
    directory: Path | None,
    *,
    on_round: OnRecord = lambda _: None,
    on_failure: Callable[[str], None],
    **rest: Any,
) -> Result | None:
    """Runs a trial as `Experiment.run` does, and tells trackers of its rounds and its result; of
    those of a trial that is finished already, too.

    Args:
        on_failure: called once with a sentence on each tracker that has failed.
        rest: of `Experiment.run`.
    """
    if not trackers:
        return experiment.run(trial, directory, on_round=on_round, **rest)
    seen = 0
    with _told(experiment, trackers, trial, on_failure) as log:

        def note(record: RoundRecord) -> None:
            nonlocal seen
            seen += 1
            log(record.round + 1, scalars_of(record))
            on_round(record)

        result = experiment.run(trial, directory, on_round=note, **rest)
        if result is not None:
            if not seen and directory is not None:  # it was finished before
                for record in read_records(directory / "records.jsonl"):
                    log(record.round + 1, scalars_of(record))
            log(result.rounds, {f"test/{name}": value for name, value in result.metrics.items()})
    return result


@contextmanager
def _told(
    experiment: Experiment,
    trackers: Sequence[Tracker],
    trial: int,
    on_failure: Callable[[str], None],
) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """What tells trackers of a round, until the trial ends; one that fails is told nothing more."""
    well = list(trackers)

    def tell(what: str, *values: Any) -> None:
        for tracker in list(well):
            try:
                getattr(tracker, what)(*values)
            except Exception as error:  # noqa: BLE001 - a run does not end for its tracker
                well.remove(tracker)
                on_failure(
                    f"tracker {type(tracker).__name__} has failed in {what} and gets no more of "
                    f"trial {trial}, which goes on: {type(error).__name__}: {error}"
                )

    spec, run = experiment.spec.with_trial(trial), digest_of(experiment.describe(trial))
    if spec.data == SYNTHETIC:  # as the record of data that were given as an object says, too
        spec = spec.changed({"data": {"name": experiment.dataset.name}})
    tell("start", spec, run)
    try:
        yield lambda round, numbers: tell("log", round, numbers)
    finally:
        tell("finish")
