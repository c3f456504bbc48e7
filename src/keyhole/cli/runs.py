"""Finds runs of `keyhole train` for other commands: what was asked, and with what data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from keyhole.cli.options import SYNTHETIC
from keyhole.delivery.records import CodingKind
from keyhole.errors import InputError
from keyhole.identity import Ref
from keyhole.rounds.spec import RunSpec

if TYPE_CHECKING:
    from keyhole.data.federated import Dataset
    from keyhole.experiments.experiment import Experiment
    from keyhole.server.store import Recovered


_Command = TypeVar("_Command", bound=Callable[..., Any])


def coding_option(command: _Command) -> _Command:
    """`--coding`."""
    return click.option(
        "--coding",
        type=click.Choice(get_args(CodingKind)),
        default="plain",
        show_default=True,
        help="How the numbers of slices are stored: as they are, in 16, 8 or 4 bits.",
    )(command)


def read_run(run: Path, data: str) -> Experiment:
    """Returns the experiment that a directory says it holds, on the data it was trained with."""
    from keyhole.experiments.experiment import Experiment
    from keyhole.experiments.named import task_named
    from keyhole.experiments.trial import read_result

    spec = read_spec(run)
    source = spec.data.name if data == SYNTHETIC else data
    sizes = synthetic_sizes(source, [spec])
    dataset = load_data(source, task_named(spec.task.name).kind, spec.seed, **sizes)
    experiment = Experiment(spec, dataset)
    read_result(run, experiment.describe(spec.trial))  # refuses other data than the run's
    return experiment


def recover_run(run: Path, experiment: Experiment, threads: int = 1) -> Recovered:
    """Opens the state of a run; close its store."""
    from keyhole.server.store import recover

    layout, optimizer = experiment.task.model.layout, experiment.algorithm.server
    return recover(run / "state", layout, threads=threads, optimizer=optimizer)


def read_spec(run: Path) -> RunSpec:
    """Returns what the directory of a trial says was asked."""
    path = run / "run.json"
    try:
        return RunSpec.read(json.loads(path.read_text())["spec"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{run} is not the directory of a trial: got {path.name}: {error}; expected what "
            "keyhole train writes: OUT/NAME/trial-N; name such a directory"
        ) from error


def run_settings(experiment: Experiment) -> dict[str, Any]:
    """What devices are told about a run whose state is given out."""
    spec = experiment.spec
    return {
        "seed": spec.seed,
        "trial": spec.trial,
        "keys_per_client": experiment.keys_per_client,
        "shared_keys": spec.shared_keys,
        "spec": spec.for_devices(),
    }


USUAL_WORDS = 10_000


def load_data(source: str, kind: str, seed: int, **sizes: int) -> Dataset:
    """Opens a dataset, importing it first where that has not been done; shows how far it is.

    Args:
        source: as `--data` takes it.
        kind: what a synthetic dataset is to hold.
        sizes: of a synthetic dataset, where they differ from its defaults.
    """
    from keyhole.cli.screen import import_shown
    from keyhole.data.cache import load
    from keyhole.data.open import make_synthetic

    if Ref(source).is_own:
        from keyhole.experiments.experiment import own_dataset

        return own_dataset(source, seed)
    if source == SYNTHETIC:
        return make_synthetic(kind, seed, **sizes)
    return load(import_shown(source))


def synthetic_sizes(source: str, specs: Iterable[RunSpec]) -> dict[str, int]:
    """Sizes of synthetic data that has as many words as runs ask for, or the usual number."""
    words = max((spec.sizes.get("words", 0) for spec in specs), default=0)
    return {"words": max(words, USUAL_WORDS)} if source == SYNTHETIC and words else {}


def start_jax() -> None:
    """One thread for each client that trains, and compiled code kept between runs."""
    # Starting JAX takes a second: commands that do not train go without.
    from keyhole.data.cache import cache_root
    from keyhole.rounds.cores import keep_compiled, use_one_thread

    use_one_thread()
    keep_compiled(cache_root() / "compiled")
