"""Opens runs that are kept in a directory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keyhole.data.federated import Dataset
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import SavedTrial, open_trials, read_asked
from keyhole.experiments.trial import find_result
from keyhole.front.run import TrainedRun, TrainedTrial
from keyhole.front.task import Task
from keyhole.rounds.record import read_records
from keyhole.rounds.spec import RunSpec


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
    folders = _trials_in(directory)
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


def _trials_in(directory: Path) -> list[Path]:
    """The directories of a run's trials, by number."""
    if (directory / "run.json").exists():
        return [directory]
    found = [path.parent for path in directory.glob("trial-*/run.json")]
    if not found:
        raise InputError(
            f"{directory} holds no run: got no trial-N/run.json; expected what train(out=...) or "
            "keyhole train writes; name such a directory"
        )
    return sorted(found, key=lambda path: read_asked(path)[0].trial)


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
