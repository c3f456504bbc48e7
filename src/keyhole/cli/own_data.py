"""Opens what a device trains on: examples of its own, or those of a client of a data set."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.screen import import_shown
from keyhole.cli.token import read_token
from keyhole.errors import InputError
from keyhole.sampling import UNCOUNTED
from keyhole.wire.assignment import name_in

if TYPE_CHECKING:
    from keyhole.data.federated import Dataset
    from keyhole.device.take_part import DeviceSettings
    from keyhole.experiments.task import TaskKind
    from keyhole.rounds.clients import Clients
    from keyhole.rounds.spec import RunSpec

_LARGEST = 1 << 25  # numbers of a model that is tried whole: 128 MiB
_FEW = 32  # examples that it is tried on


class OwnData:
    """The examples of one device, read when they are first asked for, and the client that has them.

    Args:
        options: of `keyhole device`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._task, self._source = str(options["task"]), options["data"]
        self._token, self._held_out = options["token_file"], options["hold_out"] or 0.0
        self._trusted = [self._task.partition(":")[0], *options["trust"]]
        if self._source is None:
            raise click.UsageError(
                "pass --data, the examples of this device, or --client N to be a client of the data"
            )

    @property
    def number(self) -> int:
        """By which the device tells its random numbers from those of others: a digest of the name
        in its token."""
        name = name_in(read_token(self._token)) if self._token else ""
        return int.from_bytes(sha256(name.encode()).digest()[:8], "little") % UNCOUNTED

    @cached_property
    def kind(self) -> TaskKind:
        """The task, whose data say what the columns mean."""
        from keyhole.experiments import task_named

        return task_named(self._task)

    @cached_property
    def data(self) -> Dataset:
        """The examples, as a dataset of one client."""
        from keyhole.data.at_devices import own_examples
        from keyhole.experiments.opening import own_dataset

        held = self.kind.holds.get("data")
        if held is None:
            raise InputError(
                f"task {self._task} numbers its keys by the data of all clients: got examples of "
                "one device; expected a kh.Task with data of kh.data.at_devices; pass --client N "
                "to be a client of a data set"
            )
        declared: Dataset = own_dataset(f"{self._task}.{held}", 0)
        found = own_examples(self._source, declared, self._held_out)
        self._check(found)
        return found

    def _check(self, found: Dataset) -> None:
        """Raises InputError where the task could not be trained on these examples: before a
        check-in, since a round would wait for this device."""
        from keyhole.experiments.experiment import Experiment
        from keyhole.experiments.specs import defaults_of
        from keyhole.models.model import Model
        from keyhole.rounds.cores import start_jax

        start_jax()
        model = Experiment(defaults_of(self._task), found).task.model
        if not isinstance(model, Model) or model.layout.server_size > _LARGEST:
            return
        own = found.splits["train"].client(0)
        few = {name: column[:_FEW] for name, column in own.items()}
        if (lacked := model.lacking(few)) is not None:
            raise InputError(
                f"the data of this device lack a column that the task reads: got {self._source} "
                f"with {', '.join(own)}; expected {lacked} as well; name the columns as the task "
                "does"
            )

    @property
    def examples(self) -> int:
        """How many there are."""
        return self.data.splits["train"].num_examples

    def clients(self, settings: DeviceSettings) -> Clients:
        """Returns the population as this device knows it: itself, whatever its number."""
        from keyhole.experiments.experiment import Experiment

        spec = for_any_number(_started(settings, self._task, self._trusted))
        clients = Experiment(spec, self.data).clients
        mine = clients.data(0)
        held = self.data.splits["test"]
        mine_only = replace(clients, count=UNCOUNTED, data=lambda client: mine)
        if not self._held_out:
            return mine_only
        if not len(held):  # it trains on its only example, and measures nothing
            return replace(mine_only, measure=None)
        kept = held.client(0)
        return replace(mine_only, held=lambda client: kept)


def for_any_number(spec: RunSpec) -> RunSpec:
    """Returns the record for a device with any number of examples: whether it has enough, it says
    at its check-in, if at all, and not by staying away."""
    return spec.changed({"client.min_examples": 1})


def client_of_data(options: Mapping[str, Any]) -> Callable[[DeviceSettings], Clients]:
    """Returns what makes the population of a data set as `keyhole train` does, once a round has
    told how the run trains.

    Args:
        options: of `keyhole device`.
    """
    from keyhole.experiments.specs import SYNTHETIC, defaults_of

    task, data, trusted, seed = (options[name] for name in ("task", "data", "trust", "seed"))
    defaults_of(task)

    def make(settings: DeviceSettings) -> Clients:
        from keyhole.experiments.experiment import Experiment
        from keyhole.experiments.opening import open_data

        spec = _started(settings, task, [task.partition(":")[0], *trusted])
        found = open_data(spec, data or SYNTHETIC, seed or 0, find=import_shown)
        return Experiment(spec, found).clients

    return make


def _started(settings: DeviceSettings, task: str, trusted: Sequence[str]) -> RunSpec:
    """The record of the run, which is of this task, with JAX started for it."""
    from keyhole.experiments.specs import spec_for_device
    from keyhole.rounds.cores import start_jax

    told = settings.run
    if told.task != task:
        raise InputError(
            f"the service runs another task: got --task {task}; expected {told.task}; pass --task "
            f"{told.task}"
        )
    start_jax()
    return spec_for_device(told, trusted)
