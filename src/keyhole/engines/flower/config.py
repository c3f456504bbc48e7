"""Reads what operators say of a run on Flower, and writes the project of a task.

A run's config says of its rounds, `[tool.flwr.app.config]` of the app's pyproject.toml:

    run = "/srv/keyhole/run"         where the server keeps the run: the same run config goes on
    rounds-directory = "..."         what `keyhole serve` serves
    service = "https://..."          the slice service, as devices reach it
    token-key = "/srv/keys"          signing keys of the service; leave out if it has none
    round-seconds = 300.0            a round closes after so long with what has arrived
    min-nodes = 1                    a round waits for this many nodes,
    node-seconds = 120.0             for so long
    delivery = "pregenerated"        or "pir": slices from two servers that do not collude
    second = "https://..."           the second of them
    aggregators = "URL#KEY URL#KEY"  two aggregators that do not collude add up updates in secret
    aggregator-tokens = "FILE FILE"  tokens of the trainer there, from their operators
    aggregator-ca = "/etc/ca.pem"    authorities to trust for them
    signing-key = "FILE"             signs manifests, for nodes that pin its public half

Paths are those of the machine that the ServerApp runs on.

For the tasks of keyhole it holds the record of the run, too, which server and nodes read:

    spec.version = 6                 fields of `RunSpec` by their dotted names
    spec.task = "emnist_2nn"
    spec.client.lr = 0.1             what is not named is the task's
    spec.keys.neuron.count = 50      "none" stands for none: every key

The run config goes to every node, so it has no seed: the server trains with seed 0, and draws
cohorts from a secret that it keeps with the run.

    named-cohorts = true             rehearse: draw cohorts from seed 0, as a run in process does

What a node's own operator says, `flower-supernode --node-config "..."`:

    client=7                 the node is client 7 of the population; without, anyone who is asked
    data="/srv/posts"        the data on this node, where it is not where the run config says
    ca="/etc/ca.pem"         PEM file of the authorities to trust for https
    insecure=true            plain http may leave this machine
    cache="/var/slices"      keep slices here: those that have not changed are not sent again
    states="/var/states"     keep what clients remember between rounds here, a folder for each
    trainer-key="FILE"       take part only in rounds that this trainer signed
    trust-service=true       or take part in secure sums without that key
    seed=0                   rehearse: draw as a run in process of this seed does
    second-token="FILE"      the token of this node at the second slice server, from its operator
    aggregator-tokens="F F"  files of its tokens at the two aggregators; without, the round's token
    ledger="/var/ledger"     note here what secure sums spend of its clients' privacy; without, in
                             $XDG_STATE_HOME/keyhole/ledger, or ~/.local/state/keyhole/ledger
    max-epsilon=4.0          and take part in none beyond this, over all runs
    delivery="pir"           take part only where slices are fetched so
    second="https://..."     and only with this second slice server
    aggregators="URL#KEY URL#KEY"  and only with these two aggregators, and their keys

The last three are the node's own word against the server's. The code that reads them comes with
the app: anyone who does not trust the operator of the server also lets the node take only apps that
were signed by others (`--trusted-entities` of Flower).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_type_hints

from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.device.cache import SliceCache
from keyhole.device.device import Device
from keyhole.engines.flower.messages import RoundCall
from keyhole.errors import InputError, NotAdmittedError
from keyhole.files import storage_errors
from keyhole.rounds.fields import flatten
from keyhole.rounds.spec import RunSpec
from keyhole.wire.signing import TrainerKey

_NUMBERS = ("round_seconds", "min_nodes", "node_seconds")


@dataclass(frozen=True)
class RoundsConfig:
    """How the rounds of a run are made, as the module describes it."""

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
    signing_key: Path | None = None
    named_cohorts: bool = False

    @staticmethod
    def of(config: Mapping[str, Any]) -> RoundsConfig:
        """Reads `Context.run_config`; names that are not ours are left to others.

        Raises:
            InputError: a value is missing or cannot be used.
        """
        from keyhole.delivery import delivery_named  # all of them, which a node need not load
        from keyhole.device.sums import aggregator_of

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
        for each in aggregators:
            aggregator_of(each)  # nodes would say so much later
        keys, ca, signing = (
            str(config.get(name, "")) for name in ("token-key", "aggregator-ca", "signing-key")
        )
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
            signing_key=Path(signing) if signing else None,
            named_cohorts=bool(config.get("named-cohorts", False)),
            **{field: _number(config, field) for field in _NUMBERS},
        )


def _text(config: Mapping[str, Any], name: str) -> str:
    value = config.get(name, "")
    if not isinstance(value, str) or not value:
        raise _bad(name, repr(value), "a text")
    return value


def _number(config: Mapping[str, Any], field: str) -> Any:
    """A whole number where the field's default is one, else a number of seconds."""
    name, usual = field.replace("_", "-"), getattr(RoundsConfig, field)
    value, is_whole = config.get(name, usual), isinstance(usual, int)
    is_number = isinstance(value, int if is_whole else int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < inf:
        allowed = "a whole number from 1" if is_whole else "a finite number above 0"
        raise _bad(name, repr(value), allowed)
    return value if is_whole else float(value)


def _bad(name: str, got: str, allowed: str) -> InputError:
    return InputError(
        f"the run config has no {name} that can be used: got {got}; expected {allowed}; set it in "
        "pyproject.toml of the app, or with `flwr run -c`"
    )


def fetched_names() -> tuple[str, ...]:
    """Deliveries of a Flower run: a call names a second slice server, and no other party."""
    from keyhole.delivery import all_deliveries  # all of them, which a node need not load

    served = (each.about for each in all_deliveries() if each.about.is_served)
    return tuple(about.name for about in served if {*about.connects_to} <= {"second"})


_SPEC = "spec."


def spec_config(spec: RunSpec) -> dict[str, Any]:
    """Returns the record of a run as the run config has it, without its seed; `read_spec` gives it
    back.

    >>> from keyhole.experiments.specs import spec_of
    >>> spec = spec_of("emnist_2nn", rounds=3)
    >>> read_spec(spec_config(spec)) == spec
    True
    """
    told = flatten(spec.describe())
    return {f"{_SPEC}{name}": value for name, value in told.items() if name != "seed"}


def read_spec(config: Mapping[str, Any]) -> RunSpec:
    """Returns the record that a run config holds; what it does not name is the task's.

    Raises:
        InputError: there is no such task, field, size or key space, or it is of another version,
            or it has a seed.
    """
    from keyhole.experiments.specs import spec_of  # a node with clients of its own needs no task

    if f"{_SPEC}seed" in config:
        raise InputError(
            "the run config goes to every node: got spec.seed; expected no seed, which would tell "
            "nodes what the server draws; leave it out"
        )

    told = {
        name.removeprefix(_SPEC): value for name, value in config.items() if name.startswith(_SPEC)
    }
    return spec_of(str(told.pop("task", "")), {"version": None, **told})


_MAX_SECRET = 4096  # bytes of a file that holds one


def read_secret(path: Path) -> str:
    """Returns the token in a file; raises InputError where it holds none."""
    try:
        found = path.read_bytes()[:_MAX_SECRET].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    if not found or " " in found:
        raise InputError(
            f"no token can be read: got file {path}; expected a file with one token; ask the "
            "operator for one: `keyhole token` makes them"
        )
    return found


Connect: TypeAlias = Callable[[str, str | None], Device]
"""`(URL, token of the device there) -> a device`, closed when the round is over."""


@dataclass(frozen=True)
class NodeConfig:
    """The configuration of a node, as the module describes it."""

    client: int | None = None
    data: str | None = None
    ca: str | None = None
    insecure: bool = False
    cache: str | None = None
    states: str | None = None
    trainer_key: str | None = None
    trust_service: bool = False
    seed: int | None = None
    second_token: str | None = None
    aggregator_tokens: str | None = None
    ledger: str | None = None
    max_epsilon: float | None = None
    delivery: str | None = None
    second: str | None = None
    aggregators: str | None = None

    @staticmethod
    def of(config: Mapping[str, object]) -> NodeConfig:
        """Reads `Context.node_config`; names that are not ours are left to others. Raises
        InputError where a value of ours is of another kind."""
        found = {}
        for field, hint in get_type_hints(NodeConfig).items():
            name, kind = field.replace("_", "-"), (get_args(hint) or (hint,))[0]
            value = config.get(name)
            if value is None:
                continue
            is_bool = isinstance(value, bool)
            is_kind = is_bool if kind is bool else isinstance(value, kind) and not is_bool
            if not is_kind or (kind is int and isinstance(value, int) and value < 0):
                allowed = "a whole number from 0" if kind is int else f"a {kind.__name__}"
                raise InputError(
                    f"--node-config has an unusable {name}: got a "
                    f"{type(value).__name__}; expected {allowed}; start the SuperNode "
                    f"with another {name}"
                )
            found[field] = value
        return NodeConfig(**found)  # type: ignore[arg-type]  # kinds are checked above

    def check(self, call: RoundCall) -> None:
        """Raises NotAdmittedError for a call that this node is not there for, or that asks for
        another way."""
        if self.client is not None and set(call.clients) != {self.client}:
            raise _refused("another client than this node is", "its own client alone")
        pinned = {
            "delivery": (self.delivery, call.delivery),
            "second slice server": (self.second, call.second),
            "pair of aggregators": (self.aggregators, " ".join(call.aggregators)),
        }
        for what, (mine, asked) in pinned.items():
            if mine is not None and mine != asked:
                raise _refused(f"another {what} than this node allows", "what --node-config says")

    def connector(self, stack: ExitStack, stop: threading.Event) -> Connect:
        """Returns what makes devices of services, which `stack` closes and `stop` stops."""
        cache = None if self.cache is None else SliceCache(Path(self.cache))
        trainer = None if self.trainer_key is None else TrainerKey.load(Path(self.trainer_key))

        def connect(url: str, token: str | None) -> Device:
            made = Device(
                url,
                token=token,
                ca=self.ca,
                cache=cache,
                trainer_key=trainer,
                trust_service=self.trust_service,
                stop=stop,
                insecure=self.insecure,
            )
            return stack.enter_context(closing(made))

        return connect


def _refused(got: str, allowed: str) -> NotAdmittedError:
    return NotAdmittedError(
        f"this node does not take part in such a round: got {got}; expected {allowed}; change the "
        "run config of the app, or ask the operator of the node"
    )


_PACKAGE = "keyhole_app"

_PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "keyhole-app"
version = "1.0.0"
description = "A task of federated select, on devices"
license = "Apache-2.0"
dependencies = ["flwr==1.41.0", "keyhole"]

# Devices receive the package and nothing else: records and rounds name clients.
[tool.flwr.app]
publisher = "keyhole"
fab-include = ["{package}/**/*.py"]

[tool.flwr.app.components]
serverapp = "{package}.server:app"
clientapp = "{package}.client:app"

# What may stand here is told in keyhole.engines.flower.config.
[tool.flwr.app.config]
{config}
"""

_FILES = {
    "__init__.py": '"""A task of federated select, on devices."""\n',
    "server.py": '"""The server."""\n\nfrom keyhole.engines.flower.tasks import server_app\n\n'
    "app = server_app\n",
    "client.py": '"""The devices."""\n\nfrom keyhole.engines.flower.tasks import client_app\n\n'
    "app = client_app\n",
}


def write_project(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes a directory that `flwr run` takes, with the tasks of keyhole as its app.

    Args:
        config: the run config: texts, whole numbers, numbers and truth values by name.

    Raises:
        InputError: the directory holds a project already, or a value is of another kind.
        StorageError: it cannot be written.
    """
    path = directory / "pyproject.toml"
    if path.exists():
        raise InputError(
            f"{directory} holds a project already: got {path.name}; expected a directory without "
            "one; choose another directory, or edit the project that is there"
        )
    lines = [f"{name} = {_toml(name, value)}" for name, value in config.items()]
    with storage_errors(path, "write"):
        (directory / _PACKAGE).mkdir(parents=True, exist_ok=True)
        path.write_text(_PYPROJECT.format(package=_PACKAGE, config="\n".join(lines)))
        for name, text in _FILES.items():
            (directory / _PACKAGE / name).write_text(text)


def _toml(name: str, value: Any) -> str:
    """A value as TOML has it; JSON writes texts, finite numbers and truth values the same way."""
    if not isinstance(value, str | int | float):
        raise InputError(
            f"the run config has a {name} that TOML cannot hold: got {type(value).__name__}; "
            "expected a text, a number or a truth value; leave it out"
        )
    if isinstance(value, float) and not isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False)
