"""Opens what a run is made of, and what it left: its data, and the directories of trials."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from keyhole.arrays import Tree
from keyhole.data.cache import load
from keyhole.data.federated import Dataset
from keyhole.data.open import SYNTHETIC_KINDS, import_dataset, make_synthetic
from keyhole.errors import InputError
from keyhole.experiments import task_named
from keyhole.experiments.experiment import DATASET, Experiment
from keyhole.experiments.specs import SYNTHETIC
from keyhole.experiments.trial import Start, read_result
from keyhole.identity import Ref
from keyhole.parts import resolve, running
from keyhole.rounds.best import load_best
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState
from keyhole.server.store import Recovered, holds_store, recover

_USUAL_WORDS = 10_000  # of synthetic posts

Find = Callable[[str], Path]
"""Returns the directory of an imported dataset."""


def open_data(
    spec: RunSpec,
    source: str | None = None,
    seed: int | None = None,
    *,
    sizes: Mapping[str, int] | None = None,
    find: Find = import_dataset,
) -> Dataset:
    """Returns the data of a run: a file or an imported dataset, synthetic data of the task's kind,
    or what "module:NAME" makes.

    Args:
        source: in place of the one that the record names.
        seed: in place of the record's.
        sizes: of synthetic data; None takes those that the record asks for.
        find: finds or imports a file.
    """
    source, seed = source or spec.data.name, spec.seed if seed is None else seed
    if Ref(source).is_own:
        return own_dataset(source, seed)
    if source != SYNTHETIC:
        return load(find(source))
    kind = task_named(spec.task.name).kind
    if kind not in SYNTHETIC_KINDS:
        raise InputError(
            f"there are no synthetic data of kind {kind}: got --data {SYNTHETIC}; expected data of "
            "that kind; give --data module:NAME (docs/own-data.md)"
        )
    return make_synthetic(kind, seed, **(synthetic_sizes([spec]) if sizes is None else sizes))


def synthetic_sizes(specs: Iterable[RunSpec]) -> dict[str, int]:
    """Sizes of synthetic data with enough words for all of these runs; the usual number or more."""
    words = max((spec.sizes.get("words", 0) for spec in specs), default=0)
    return {"words": max(words, _USUAL_WORDS)} if words else {}


def own_dataset(name: str, seed: int) -> Dataset:
    """Returns the data set that "module:NAME" makes for a seed."""
    make = resolve(name)
    with running(f"data {name}"):
        made = make(seed) if callable(make) else make
    DATASET.check(f"what {name} returns for a seed" if callable(make) else name, made)
    return cast("Dataset", made)


@dataclass(frozen=True, eq=False)
class SavedTrial:
    """A trial that `keyhole train` or `Experiment.run` keeps in a directory."""

    directory: Path
    experiment: Experiment = field(repr=False)

    def state(self) -> ServerState:
        """Returns what the server holds after the last round that was made."""
        found = self.recover()
        found.store.close()
        return found.state

    def best_state(self) -> ServerState:
        """Returns the state that was best by the run's metric."""
        task, algorithm = self.experiment.task, self.experiment.algorithm
        return load_best(self.directory, task.model.layout, algorithm.server)

    def recover(self, threads: int = 1) -> Recovered:
        """Opens the server's state; close its store. Nobody else may have the run open."""
        path = self.directory / "state"
        if not holds_store(path):
            raise InputError(
                f"{self.directory} has no model: got no folder state; expected one that keyhole "
                "train, or keyhole sweep --keep-state, has left; run it again and keep its state"
            )
        layout, optimizer = self.experiment.task.model.layout, self.experiment.algorithm.server
        return recover(path, layout, threads=threads, optimizer=optimizer)


def read_asked(directory: Path) -> tuple[RunSpec, dict[str, Any]]:
    """Returns what a trial's directory says that it was asked: its record, and all of `run.json`.

    Raises:
        InputError: the directory holds no trial.
    """
    path = directory / "run.json"
    try:
        told = json.loads(path.read_text())
        return RunSpec.read(told["spec"]), told
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"{directory} is not the directory of a trial: got {path.name}: {error}; expected what "
            "keyhole train writes: OUT/NAME/trial-N; name such a directory"
        ) from error


def trials_in(directory: Path) -> list[Path]:
    """Returns the directories of a run's trials by number, or the one trial that it is itself."""
    if (directory / "run.json").exists():
        return [directory]
    found = [path.parent for path in directory.glob("trial-*/run.json")]
    if not found:
        raise InputError(
            f"{directory} holds no run: got no trial-N/run.json; expected what train(out=...) or "
            "keyhole train writes; name such a directory"
        )
    return sorted(found, key=lambda path: read_asked(path)[0].trial)


def open_trials(
    directories: Iterable[Path],
    data: Dataset | str | None = None,
    parts: Mapping[str, Any] | None = None,
    *,
    find: Find = import_dataset,
) -> list[SavedTrial]:
    """Opens trials of one run, such as `keyhole-runs/so_tag-.../trial-0`.

    Args:
        directories: of the trials, one or more.
        data: a dataset, or what names one; None for what the run's record names.
        parts: parts of your own that `Experiment` was given as objects.
        find: finds or imports a file of data.

    Raises:
        InputError: a directory holds no trial, or one of other data or other code.
    """
    asked = {directory: read_asked(directory) for directory in directories}
    first, _ = next(iter(asked.values()))
    first = first.changed({"rounds": max(spec.rounds for spec, _ in asked.values())})
    dataset = data if isinstance(data, Dataset) else open_data(first, data, find=find)
    starts = {
        spec.trial: Start(told["start"], _not_stored, told["titles"]["start"])
        for spec, told in asked.values()
        if "start" in told
    }
    experiment = Experiment(first, dataset, parts or {}, starts=starts)
    for directory, (spec, _) in asked.items():
        read_result(directory, experiment.describe(spec.trial))  # refuses other data than the run's
    return [SavedTrial(directory, experiment) for directory in asked]


def _not_stored() -> Tree:
    raise InputError(
        "a run does not keep the model that it started from: got a trial without its state; "
        "expected one with a folder state; call train again with the same start"
    )
