"""What a run's config says of its rounds: `[tool.flwr.app.config]` of the app's pyproject.toml.

    run = "/srv/keyhole/run"         where the server keeps the run: the same run config goes on
    rounds-directory = "..."         what `keyhole serve` serves
    service = "https://..."          the slice service, as devices reach it
    token-key = "/srv/keys"          signing keys of the service; leave out if it has none
    round-seconds = 300.0            a round closes after so long with what has arrived
    min-nodes = 1                    a round waits for this many nodes,
    node-seconds = 120.0             for so long
    delivery = "pregenerated"        or "pir": slices from two servers that do not collude
    second = "https://..."           the second of them
    aggregators = "URL URL"          two aggregators that do not collude add up updates in secret
    aggregator-tokens = "FILE FILE"  tokens of the trainer there, from their operators
    aggregator-ca = "/etc/ca.pem"    authorities to trust for them

Paths are those of the machine that the ServerApp runs on.

The tasks of keyhole on Flower: server and nodes read one run config, and train the same run.

    spec.version = 2                 fields of `RunSpec` by their dotted names
    spec.task = "emnist_2nn"
    spec.client.lr = 0.1             what is not named is the task's
    spec.keys.neuron.count = 50      "none" stands for none: every key

A node may name data of its own with --node-config.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from flwr.app import Context

from keyhole.data.cache import cache_root
from keyhole.data.federated import Dataset
from keyhole.data.open import make_synthetic, open_dataset
from keyhole.delivery import delivery_named
from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.device.take_part import DeviceSettings, Participant, PopulationClient
from keyhole.engines.flower.node_config import NodeConfig, fetched_names
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.named import task_named
from keyhole.experiments.specs import spec_for_device, spec_of
from keyhole.rounds.clients import Clients
from keyhole.rounds.cores import keep_compiled, use_one_thread
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.runspec import RunSpec, flatten
from keyhole.service.served import Served

_NUMBERS = {
    "round-seconds": (300.0, 0.0),
    "min-nodes": (1, 1),
    "node-seconds": (120.0, 0.0),
}
"""Name -> what it is by default, and the least that it may be; seconds are above."""


@dataclass(frozen=True)
class RoundsConfig:
    """How the rounds of a run are made, as the module describes it.

    Args:
        run: directory of the run.
        rounds: directory that the slice service serves.
        service: its URL.
        token_key: file of its signing keys.
        round_seconds: deadline of a round.
        min_nodes: that a round waits for.
        node_seconds: for how long.
        delivery: how slices are fetched.
        second: URL of the second slice server.
        aggregators: URLs of the two aggregators.
        aggregator_tokens: files of the trainer's tokens there.
        aggregator_ca: PEM file of the authorities to trust for them.
    """

    run: Path
    rounds: Path
    service: str
    token_key: Path | None = None
    round_seconds: float = 300.0
    min_nodes: int = 1
    node_seconds: float = 120.0
    delivery: str = DEFAULT_SERVED
    second: str = ""
    aggregators: tuple[str, ...] = ()
    aggregator_tokens: tuple[Path, ...] = ()
    aggregator_ca: Path | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> RoundsConfig:
        """Reads `Context.run_config`; names that are not ours are left to others.

        Raises:
            InputError: a value is missing or cannot be used.
        """
        run, rounds, service = (_text(config, n) for n in ("run", "rounds-directory", "service"))
        delivery, second = config.get("delivery", DEFAULT_SERVED), str(config.get("second", ""))
        if delivery not in fetched_names():
            raise _bad("delivery", repr(delivery), ", ".join(fetched_names()))
        if bool(delivery_named(delivery).about.connects_to) != bool(second):
            raise _bad("second", repr(second), "a URL where a delivery has two servers")
        aggregators, tokens = (
            tuple(str(config.get(name, "")).split())
            for name in ("aggregators", "aggregator-tokens")
        )
        if len(aggregators) not in (0, 2) or len(tokens) != len(aggregators):
            got = f"{len(aggregators)} URLs and {len(tokens)} files of tokens"
            raise _bad("aggregators", got, "two of each, with a space between, or none")
        keys, ca = str(config.get("token-key", "")), str(config.get("aggregator-ca", ""))
        numbers = {name: _number(config, name) for name in _NUMBERS}
        return RoundsConfig(
            run=Path(run),
            rounds=Path(rounds),
            service=service,
            token_key=Path(keys) if keys else None,
            delivery=delivery,
            second=second,
            aggregators=aggregators,
            aggregator_tokens=tuple(map(Path, tokens)),
            aggregator_ca=Path(ca) if ca else None,
            **{name.replace("-", "_"): value for name, value in numbers.items()},  # type: ignore[arg-type]
        )


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name, "")
    if not isinstance(value, str) or not value:
        raise _bad(name, repr(value), "a text")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    usual, minimum = _NUMBERS[name]
    value = config.get(name, usual)
    kind = int if isinstance(usual, int) else int | float
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    is_inside = is_number and minimum <= value < inf and (value > 0)
    if not is_inside:
        what = "a whole number" if isinstance(usual, int) else "a finite number"
        raise _bad(name, repr(value), f"{what} {f'from {minimum:g}' if minimum else 'above 0'}")
    return value if isinstance(usual, int) else float(value)


def _bad(name: str, got: str, allowed: str) -> InputError:
    return InputError(
        f"the run config has no {name} that can be used",
        got=got,
        allowed=allowed,
        fix="set it in pyproject.toml of the app, or with `flwr run -c`",
    )


_LOG = logging.getLogger("flwr.keyhole")
_SPEC = "spec."
_USUAL_WORDS = 10_000  # of synthetic posts, as `keyhole train` has it


def spec_config(spec: RunSpec) -> dict[str, Any]:
    """Returns the record of a run as the run config has it; `read_spec` gives it back.

    >>> spec = spec_of("emnist_2nn", rounds=3)
    >>> read_spec(spec_config(spec)) == spec
    True
    """
    return {f"{_SPEC}{name}": value for name, value in flatten(spec.describe()).items()}


def read_spec(config: Mapping[str, Any]) -> RunSpec:
    """Returns the record that a run config holds; what it does not name is the task's.

    Raises:
        InputError: there is no such task, field, size or key space, or it is of another version.
    """
    told = {
        name.removeprefix(_SPEC): value for name, value in config.items() if name.startswith(_SPEC)
    }
    return spec_of(str(told.pop("task", "")), {"version": None, **told})


def _load(source: str, spec: RunSpec) -> Dataset:
    """The data, as `keyhole train` finds or makes them."""
    if source != "synthetic":
        return open_dataset(source)
    words = spec.sizes.get("words", 0)
    sizes = {"words": max(words, _USUAL_WORDS)} if words else {}
    return make_synthetic(task_named(spec.task).kind, spec.seed, **sizes)


def _use_one_core() -> None:
    use_one_thread()
    keep_compiled(cache_root() / "compiled")


def train_task(rounds: Served, config: RoundsConfig, context: Context) -> None:
    """Trains the task of the run config; a `Train` of `make_server_app`."""
    _use_one_core()
    spec = read_spec(context.run_config)
    experiment = Experiment(spec, _load(spec.data, spec))
    experiment.check()
    result = experiment.run(spec.trial, config.run, kind=rounds, on_round=_tell)
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

    _made: dict[str, Clients] = field(default_factory=dict, repr=False)

    def __call__(self, client: int, context: Context) -> Participant:
        """What a client of the population does in a round."""
        spec = read_spec(context.run_config)
        data = NodeConfig.of(context.node_config).data or spec.data

        def population(told: DeviceSettings) -> Clients:
            mine = spec_for_device(told.run)
            name = json.dumps([data, told.spec], sort_keys=True)
            if name not in self._made:
                _use_one_core()
                self._made = {name: Experiment(mine, _load(data, mine)).clients}
            return self._made[name]

        return PopulationClient(client, population).participant()
