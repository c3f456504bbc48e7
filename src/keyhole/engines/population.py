"""The population of an arm, built again in each worker of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from keyhole.data.cache import cache_root, load
from keyhole.data.synthetic import make_synthetic
from keyhole.errors import InputError
from keyhole.tasks.arms import Arm
from keyhole.tasks.experiment import Experiment
from keyhole.tasks.named import task_named
from keyhole.training.clients import Clients
from keyhole.training.cores import keep_compiled

__all__ = ["Population"]


@dataclass(frozen=True)
class Population:
    """Makes the clients of an arm: a factory that can be sent to other machines.

    Args:
        arm: how they train.
        directory: of an imported dataset, at the same path on every machine; None makes synthetic
            data, with the arm's seed.
        sizes: of synthetic data, where they differ from its defaults.
    """

    arm: Arm
    directory: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __call__(self) -> Clients:
        """Opens the data and returns the population; what JAX compiles is kept on the machine.

        Raises:
            InputError: the data are not on this machine.
        """
        keep_compiled(cache_root() / "compiled")
        if self.directory is None:
            kind = task_named(self.arm.task).kind
            data = make_synthetic(kind, self.arm.seed, **self.sizes)
        elif self.directory.is_dir():
            data = load(self.directory)
        else:
            raise InputError(
                "a worker does not find the data",
                got=f"no directory {self.directory}",
                allowed="the imported dataset at the same path on every machine",
                fix="let KEYHOLE_CACHE be a folder that all machines share, or copy it to them",
            )
        return Experiment(self.arm, data).clients
