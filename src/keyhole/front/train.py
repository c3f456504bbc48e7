"""Trains a task, and opens what was trained before: both return a `TrainedRun`.

Keywords of `train` are the fields of a `RunSpec`, or parts of your own as objects.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Tree
from keyhole.data.federated import Dataset
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import SavedTrial, open_trials, read_asked, trials_in
from keyhole.experiments.trackers import Tracked, trackers_of
from keyhole.experiments.trial import Start, find_result
from keyhole.extras import check_installed
from keyhole.front.devices import Devices
from keyhole.front.run import TrainedRun, TrainedTrial, run_trial
from keyhole.front.task import Task, check_choice
from keyhole.identity import Ref, identity_of
from keyhole.parts import near_miss
from keyhole.rounds.fields import SpecField, spec_fields
from keyhole.rounds.loop import Rounds
from keyhole.rounds.record import RoundRecord, read_records
from keyhole.rounds.spec import RunSpec
from keyhole.sampling import check_count

FIELDS: dict[str, SpecField] = {
    field.flag.removeprefix("--").replace("-", "_"): field
    for field in spec_fields(RunSpec)
    if field.flag and field.flag != "--data"
}
"""Keyword of `train` -> the field that it sets: the options of `keyhole train`."""


def train(
    task: Task,
    *,
    rounds: int,
    m: int | str | Mapping[str, int | str] = "all",
    out: str | Path | None = None,
    trials: int = 1,
    start: TrainedRun | Tree | None = None,
    progress: bool | Callable[[int, RoundRecord], None] = True,
    tracker: Tracked | Sequence[Tracked] | None = None,
    devices: Devices | Path | str | None = None,
    **settings: Any,
) -> TrainedRun:
    """Trains a task for some rounds, or goes on where the same call stopped.

    Args:
        task: model, data, keys and metrics.
        rounds: of training.
        m: max keys per client; "all" sends every client the whole model; by the name of the key
            space where they differ.
        out: directory to keep the run in, one folder for each trial; None keeps it in memory.
        trials: repetitions with other seeds; figures and tables show intervals over them.
        start: a run whose models to start from, trial by trial, or parameters for every trial; None
            starts from new ones. The server's optimizer starts anew.
        progress: False prints nothing; a function is called with the trial and each record.
        tracker: one or several, of `kh.trackers` or your own, that are told every round; or names:
            "tensorboard", "mlflow", "wandb", which write beside `out`. It is no part of the run.
        devices: those of a slice service train in place of clients in this process: the directory
            that `keyhole serve` serves, or a `Devices` that says more. Their run is kept in `out`.
        settings: fields of a `RunSpec` by the names of the options of `keyhole train`, such as
            `cohort=50, client_lr=0.1, algorithm="FedAdam"`; delivery, aggregation, optimizer
            and engine may be objects of your own. How clients choose keys is the task's `keys`.

    Raises:
        InputError: a setting is unknown or out of range, or `out` holds another run.
    """
    check_count("trials", trials, 1)
    check_installed("train", "keyhole.train")
    spec, data, parts = _spec_and_parts(task, rounds, m, settings)
    experiment = Experiment(spec, data, parts, starts=_starts(start, trials))
    asked, clients = spec.cohort.size, experiment.task.clients
    is_counted = spec.cohort.sampling != "check-in"
    if progress is True and "cohort" in settings and asked > clients and is_counted:
        sys.stderr.write(f"cohort is {asked} of {clients} clients: every round asks all of them\n")
    folder = None if out is None else Path(out)
    trackers = trackers_of(tracker, Path("keyhole-runs") if folder is None else folder.parent)
    runs = []
    with _rounds_of(devices, spec, folder, trials) as kind_of:
        for trial in range(trials):
            directory = None if folder is None else folder / f"trial-{trial}"
            runs.append(run_trial(experiment, trial, directory, progress, trackers, kind_of))
    return TrainedRun(runs, folder, lambda: experiment)


@contextmanager
def _rounds_of(
    devices: Devices | Path | str | None, spec: RunSpec, folder: Path | None, trials: int
) -> Iterator[Callable[[threading.Event], Rounds | None]]:
    """What makes the rounds: this process, or devices."""
    if devices is None:
        yield lambda stop: None
        return
    if folder is None or trials > 1:
        raise InputError(
            f"devices train one trial, which is kept: got {trials} trials and out={folder}; "
            "expected 1 and a directory; pass out=DIRECTORY, so that a run that is stopped goes on"
        )
    reached = devices if isinstance(devices, Devices) else Devices(devices)
    with reached.rounds(spec, folder / "trial-0") as make:
        yield make


def _starts(start: TrainedRun | Tree | None, trials: int) -> dict[int, Start]:
    """What each trial starts from: the same trial of the run, or its only one."""
    if start is None:
        return {}
    if not isinstance(start, TrainedRun):
        return dict.fromkeys(range(trials), _start_from(start, "parameters"))
    count = len(start.trials)
    if count not in (1, trials) and count < trials:
        raise InputError(
            f"the run to start from has too few trials: got {count}; expected 1, or {trials} or "
            "more; ask for fewer trials"
        )
    found = [_start_from(start.model(t), start.label) for t in range(min(count, trials))]
    return {trial: found[trial if count > 1 else 0] for trial in range(trials)}


def _start_from(model: Tree, name: str) -> Start:
    """Parameters as a start, with an identity of their names and numbers."""
    given = {path: np.asarray(leaf) for path, leaf in tree.flatten(model).items()}
    return Start(identity_of(given), lambda: model, name)


def _spec_and_parts(
    task: Task, rounds: int, m: Any, settings: Mapping[str, Any]
) -> tuple[RunSpec, Any, dict[str, Any]]:
    """The record of the run, its data, and the parts that were given as objects."""
    changes: dict[str, Any] = {}
    parts: dict[str, Any] = {"task": task.kind}
    for name, given in {**settings, "rounds": rounds}.items():
        value = given.item() if isinstance(given, np.generic) else given
        if name not in FIELDS:
            is_of_task = name in Task.__dataclass_fields__
            fix = f"pass it to kh.Task({name}=...)" if is_of_task else near_miss(name, FIELDS)
            raise InputError(
                f"train has no such setting: got {name}; expected one of "
                f"{', '.join(sorted(FIELDS))}; {fix}"
            )
        path = FIELDS[name].path
        if FIELDS[name].type is Ref and not isinstance(value, str):
            parts[path] = value
        else:
            FIELDS[name].check(name, value)
            changes[path] = value
    for space, count in _counts(task, m).items():
        if count is None:
            continue
        check_choice(task, space)
        changes[f"keys.{space}.count"] = count
        parts[f"keys.{space}.choice"] = task.choices[space]
    return task.defaults.changed(changes), task.data, parts


def _counts(task: Task, m: Any) -> dict[str, int | None]:
    """Key space -> max keys per client, None for every key."""
    given = m if isinstance(m, Mapping) else dict.fromkeys(task.spaces, m)
    for name in given:
        if name not in task.spaces:
            raise InputError(
                f"the model has no key space {name!r}: got m for it; expected "
                f"{', '.join(task.spaces)}; {near_miss(name, task.spaces)}"
            )
    found: dict[str, int | None] = {}
    for name in task.spaces:
        count = given.get(name, "all")
        if count != "all" and not isinstance(count, int | np.integer):
            raise InputError(
                f'm of {name!r} is no number: got {count!r}; expected a whole number or "all"; '
                "choose one"
            )
        if count != "all":
            check_count(f"m of {name!r}", count, 1)
        found[name] = None if count == "all" else int(count)
    return found


def open_run(
    directory: Path | str,
    *,
    task: Task | None = None,
    data: Dataset | str | None = None,
    parts: Mapping[str, Any] | None = None,
) -> TrainedRun:
    """Opens a run that `train` or `keyhole train` has kept: a directory of trials, or one trial.

    Records, frame and plot need the directory alone. The model, metrics and further rounds need
    the task and its data: those that the run names, or those given here.

    Args:
        directory: such as `kept/top100`, or `keyhole-runs/so_tag-.../trial-0`.
        task: the one that `train` was given.
        data: a dataset, or what names one, in place of what the run names.
        parts: parts of your own that the run was given as objects, by their paths.

    Raises:
        InputError: the directory holds no run, or one of another task, other data or other code.
    """
    directory = Path(directory)
    folders = trials_in(directory)
    spec, _ = read_asked(folders[0])

    def open_experiment() -> Experiment:
        given = {**(parts or {})}
        if task is not None:
            given = {**_parts_of(task, spec), **given}
        elif spec.task.identity and ":" not in spec.task.name and "task" not in given:
            raise InputError(
                f"the run's task was an object, and is not found by its name: got {spec.task}; "
                "expected the same task; pass it as open_run(directory, task=task)"
            )
        dataset = data if data is not None or task is None else task.data
        return open_trials(folders, dataset, given)[0].experiment

    trials: list[TrainedTrial] = []
    run = TrainedRun(trials, directory, open_experiment)
    run.trials += [_open_trial(folder, run) for folder in folders]
    if task is not None or data is not None or parts is not None:
        _ = run.experiment  # refuses what the run was not made of
    return run


def _open_trial(folder: Path, run: TrainedRun) -> TrainedTrial:
    """One trial, whose state is read when it is asked for."""
    spec, asked = read_asked(folder)
    records = read_records(folder / "records.jsonl")
    result = find_result(folder)
    is_finished = result is not None and result.rounds >= len(records)
    return TrainedTrial(
        spec.trial,
        asked,
        records,
        result if is_finished else None,
        lambda: SavedTrial(folder, run.experiment).state(),
        lambda: SavedTrial(folder, run.experiment).best_state(),
    )


def _parts_of(task: Task, spec: RunSpec) -> dict[str, Any]:
    """What `train` takes from a task as objects: the task, and choices where keys are chosen."""
    chosen = {
        f"keys.{space}.choice": task.choices[space]
        for space, keys in spec.keys.items()
        if keys.count is not None and space in task.spaces
    }
    return {"task": task.kind, **chosen}
