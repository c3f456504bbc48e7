"""The tasks of keyhole on Flower: server and nodes read one run config, and train the same arm.

task = "emnist_2nn"                     as for `keyhole train`
data = "synthetic"                      likewise; a node may name its own with --node-config
seed = 0
trial = 0
settings.rounds = 3                     what differs from the task's settings, likewise
sizes.neurons = 100                     sizes.*, keys.* and keys-per-client.* (0: every key)
keys.neuron = "independent"
keys-per-client.neuron = 50
shared-keys, over, negatives, sampling  as `Arm` has them
concurrency = 20                        asynchronous rounds; most-staleness as `Arm` has it
aggregation = "secure-sparse"           with two aggregators; value-clip and ring-bits of their sums
privacy.noise = 1.0                     privacy.*: noise that they add, as `Privacy` has it
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from flwr.app import Context

from keyhole.data.cache import cache_root
from keyhole.data.federated import Dataset
from keyhole.data.open import open_dataset
from keyhole.data.synthetic import make_synthetic
from keyhole.engines.flower.node_config import NodeConfig
from keyhole.engines.flower.run_config import RoundsConfig
from keyhole.errors import InputError
from keyhole.serving.device.participation import Participant
from keyhole.serving.device.population import PopulationClient, RunSettings
from keyhole.serving.served import Served
from keyhole.tasks.arms import Arm, arm_of
from keyhole.tasks.experiment import Experiment
from keyhole.tasks.named import task_named
from keyhole.tasks.task import Settings
from keyhole.training.clients import Clients
from keyhole.training.cores import keep_compiled, use_one_thread
from keyhole.training.privacy import Privacy
from keyhole.training.record import RoundRecord

__all__ = ["TaskClients", "arm_config", "read_arm", "train_task"]

_LOG = logging.getLogger("flwr.keyhole")
_FURTHER = (
    "shared_keys",
    "over",
    "negatives",
    "aggregation",
    "value_clip",
    "ring_bits",
    "is_signed",
    "sampling",
    "concurrency",
    "most_staleness",
    "seed",
)
_TABLES = ("settings", "sizes", "keys", "keys-per-client", "privacy")
_USUAL_WORDS = 10_000  # of synthetic posts, as `keyhole train` has it


def arm_config(arm: Arm) -> dict[str, Any]:
    """An arm as the run config has it; `read_arm` gives it back.

    >>> arm = arm_of("emnist_2nn", changes={"rounds": 3})
    >>> read_arm(arm_config(arm)) == arm
    True
    """
    settings = {f.name: getattr(arm.settings, f.name) or 0 for f in fields(Settings)}
    counts = {space: 0 if m is None else m for space, m in arm.keys_per_client.items()}
    told: dict[str, Any] = {"task": arm.task}
    further = {name.replace("_", "-"): getattr(arm, name) for name in _FURTHER}
    told |= {name: value for name, value in further.items() if value is not None}
    privacy = {name: value for name, value in (arm.privacy or {}).items() if value is not None}
    tables = (settings, arm.sizes, arm.keys, counts, privacy)
    for table, values in zip(_TABLES, tables, strict=True):
        told |= {f"{table}.{name}": value for name, value in values.items()}
    return told


def read_arm(config: Mapping[str, Any]) -> Arm:
    """The arm that a run config describes; what it does not name is the task's.

    Raises:
        InputError: there is no such task, setting, size or key space.
    """
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for name, value in config.items():
        table, _, entry = name.partition(".")
        if entry and table in tables:
            tables[table][entry] = value
    for table, kind in (("settings", Settings), ("privacy", Privacy)):
        _check_names(table, tables[table], {f.name for f in fields(kind)})
    most = tables["settings"].get("max_examples")
    changes = tables["settings"] | ({"max_examples": None} if most == 0 else {})
    further = {name: config[name.replace("_", "-")] for name in _FURTHER if _has(config, name)}
    return arm_of(
        str(config.get("task", "")),
        sizes=tables["sizes"],
        keys=tables["keys"],
        keys_per_client={space: m or None for space, m in tables["keys-per-client"].items()},
        changes=changes,
        privacy=tables["privacy"] or None,
        **further,
    )


def _check_names(table: str, given: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(given.keys() - known)
    if unknown:
        raise InputError(
            f"the run config has {table} that no task has",
            got=", ".join(unknown),
            allowed=", ".join(sorted(known)),
            fix="check how they are spelled",
        )


def _has(config: Mapping[str, Any], name: str) -> bool:
    return name.replace("_", "-") in config


def _load(source: str, arm: Arm) -> Dataset:
    """The data, as `keyhole train` finds or makes them."""
    if source != "synthetic":
        return open_dataset(source)
    words = arm.sizes.get("words", 0)
    sizes = {"words": max(words, _USUAL_WORDS)} if words else {}
    return make_synthetic(task_named(arm.task).kind, arm.seed, **sizes)


def _use_one_core() -> None:
    use_one_thread()
    keep_compiled(cache_root() / "compiled")


def train_task(rounds: Served, config: RoundsConfig, context: Context) -> None:
    """Trains the task of the run config; a `Train` of `make_server_app`."""
    _use_one_core()
    told = context.run_config
    arm, trial = read_arm(told), int(told.get("trial", 0))
    experiment = Experiment(
        arm,
        _load(str(told.get("data", "synthetic")), arm),
        over_selection=config.over_selection,
        least=config.least_updates,
    )
    experiment.check()
    result = experiment.run(trial, config.run, kind=rounds, on_round=_tell)
    if result is not None:
        _LOG.info("done: %s", ", ".join(f"{k} {v:.4f}" for k, v in result.metrics.items()))


def _tell(record: RoundRecord) -> None:
    sent = len(record.staleness)
    _LOG.info("round %d: %d of %d updates counted", record.round, sent, len(record.clients))


@dataclass
class TaskClients:
    """Clients of the task of the run config; a `ParticipantOf` of `make_client_app`.

    One that lives as long as its process: clients of one node share the data and what is compiled.
    """

    _made: dict[tuple[Any, ...], Clients] = field(default_factory=dict, repr=False)

    def __call__(self, client: int, context: Context) -> Participant:
        """What a client of the population does in a round."""
        told = context.run_config
        data = NodeConfig.of(context.node_config).data or str(told.get("data", "synthetic"))
        arm = read_arm(told)

        def population(settings: RunSettings) -> Clients:
            counts = settings.keys_per_client
            name = (data, settings.seed, *sorted(counts.items()))
            if name not in self._made:
                _use_one_core()
                mine = replace(arm, keys_per_client=counts, seed=settings.seed)
                self._made = {name: Experiment(mine, _load(data, mine)).clients}
            return self._made[name]

        return PopulationClient(client, population).participant()
