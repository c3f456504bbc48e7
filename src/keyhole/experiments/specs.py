"""Describes the run of each task: its defaults, and what differs from them.

Imports neither JAX nor Numba: the command line checks what it was given before it loads either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import signature
from types import FunctionType
from typing import Any

from keyhole.errors import InputError
from keyhole.identity import Ref, identity_of
from keyhole.parts import PartKind, pick, resolve
from keyhole.rounds.fields import nest
from keyhole.rounds.spec import (
    AsyncSpec,
    ClientSpec,
    CohortSpec,
    DeviceSpec,
    KeySpec,
    RunSpec,
    ServerSpec,
)

_COHORT = CohortSpec(size=50)
_ROUNDS = 1500


def _fed_avg(lr: float) -> ClientSpec:
    return ClientSpec(algorithm="FedAvg", lr=lr, batch_size=20)


DEFAULTS: dict[str, RunSpec] = {
    spec.task.name: spec
    for spec in (
        RunSpec(
            task=Ref("so_tag"),
            sizes={"words": 10_000, "tags": 500},
            rounds=_ROUNDS,
            cohort=_COHORT,
            client=ClientSpec(algorithm="FedAdagrad", lr=10.0, batch_size=100, max_examples=1000),
            keys={"word": KeySpec(choice=Ref("top"), count=1000)},
            server=ServerSpec(lr=1.0),
        ),
        RunSpec(
            task=Ref("emnist_cnn"),
            sizes={"filters": 64, "hidden": 512, "ink": 0},
            rounds=_ROUNDS,
            cohort=_COHORT,
            client=_fed_avg(0.1),
            keys={"filter": KeySpec(choice=Ref("independent"), count=16)},
            server=ServerSpec(lr=1.0),
        ),
        RunSpec(
            task=Ref("emnist_2nn"),
            sizes={"neurons": 200, "hidden": 200, "ink": 0},
            rounds=_ROUNDS,
            cohort=_COHORT,
            client=_fed_avg(0.1),
            keys={"neuron": KeySpec(choice=Ref("independent"), count=100)},
            server=ServerSpec(lr=1.0),
        ),
        RunSpec(
            task=Ref("so_word"),
            sizes={"words": 10_000, "embedding": 96, "width": 512, "heads": 8, "neurons": 2048},
            rounds=3000,
            cohort=_COHORT,
            client=ClientSpec(algorithm="FedAdam", lr=0.1, batch_size=16, max_examples=64),
            keys={
                "word": KeySpec(choice=Ref("top"), count=1004),
                "neuron": KeySpec(choice=Ref("independent"), count=None),
            },
            server=ServerSpec(lr=0.03),
        ),
        RunSpec(
            task=Ref("experts"),
            sizes={"experts": 8, "features": 32, "hidden": 128, "ink": 1},
            rounds=_ROUNDS,
            cohort=_COHORT,
            client=_fed_avg(0.3),
            keys={"expert": KeySpec(choice=Ref("top"), count=2)},
            server=ServerSpec(lr=1.0),
        ),
        RunSpec(
            task=Ref("movies"),
            sizes={"factors": 8},
            rounds=300,
            cohort=_COHORT,
            # All of a client's ratings in one step: m or more.
            client=ClientSpec(algorithm="FedAvg", lr=0.3, batch_size=1024, max_examples=1024),
            keys={"movie": KeySpec(choice=Ref("random"), count=500)},
            server=ServerSpec(lr=1.0),
        ),
    )
}
"""Task -> its defaults, which are the paper's where the task is the paper's. A choice of keys holds
for the counts that a caller gives; a count of None takes every key."""


TASK = PartKind("task", "own-model", {"defaults": RunSpec, "make": Callable, "on": Callable})


def defaults_of(task: str) -> RunSpec:
    """Returns the defaults of a task, by its name or by "module:NAME"."""
    found: Any = pick(TASK, task, DEFAULTS)
    spec: RunSpec = found.defaults.changed({"task": task}) if Ref(task).is_own else found
    return spec


def spec_of(task: str, changes: Mapping[str, Any] | None = None, **more: Any) -> RunSpec:
    """Returns the record of a run: the task's defaults, but for what is given.

    Args:
        task: its name, or "module:NAME" of your own.
        changes: fields that differ, nested or with dotted names.
        more: the same, as keywords.

    >>> name_of(spec_of("emnist_2nn", {"keys.neuron.count": 50}))
    'emnist_2nn-independent50-neurons'
    >>> name_of(spec_of("emnist_2nn", keys={"neuron": {"count": 50}}, cohort={"size": 5}))
    'emnist_2nn-independent50-neurons'
    """
    defaults = defaults_of(task)
    given = nest({**(changes or {}), **more})
    _check_spaces(defaults, given.get("keys", {}))
    made = defaults.changed(given)
    check_sizes(defaults.sizes, made.sizes)
    return made.changed({"keys": {space: _normal(each) for space, each in made.keys.items()}})


def identified(spec: RunSpec, parts: Mapping[str, Any]) -> RunSpec:
    """Returns the record with the identity of each part that is not the library's.

    Args:
        parts: dotted path of a field -> an object in place of what the field names.

    Raises:
        InputError: a part has no identity, or another one than the record says, or is of another
            kind than its place.
    """
    _check_kinds(parts)
    found = {path: Ref(_label(part), identity_of(part)) for path, part in parts.items()}
    for path, ref in spec.parts():
        if ref.is_own and path not in found:
            found[path] = Ref(ref.name, identity_of(resolve(ref.name)))
        if path in found and ref.identity not in ("", found[path].identity):
            raise InputError(
                f"the code or fields of {ref.name} ({path}) are not those that the run was started "
                f"with: got {found[path].identity}; expected {ref.identity}; restore them, or "
                "start a new run"
            )
    return spec.changed(found) if found else spec


_MEMBERS = {  # path of a part -> what is called of it, and the docs/ page about it
    "aggregation.name": ("add", "own-sum"),
    "delivery": ("for_run", "own-delivery"),
    "engine": ("__call__", "own-engine"),
    "metrics": ("__call__", "own-metric"),
    "server.optimizer": ("__call__", "own-optimizer"),
    "task": ("on", "own-model"),
}
_ARGUMENTS = {"engine": 2, "metrics": 1}  # of functions, which have no member to be told by


def _check_kinds(parts: Mapping[str, Any]) -> None:
    """Raises InputError where a part cannot do what its place asks for."""
    if "data" in parts:
        raise InputError(
            "data are no part of an experiment: got one at data; expected none; pass the data set "
            "as `dataset`"
        )
    for path in parts.keys() & _MEMBERS.keys():
        member, page = _MEMBERS[path]
        if not callable(getattr(parts[path], member, None)) or not _takes(parts[path], path):
            raise InputError(
                f"the part is of another kind than its place: got {_label(parts[path])} at {path}; "
                f"expected an object with {member}; see docs/{page}.md"
            )


def _takes(part: Any, path: str) -> bool:
    """Whether a function takes as many arguments as its place passes."""
    if not isinstance(part, FunctionType) or path not in _ARGUMENTS:
        return True
    try:
        signature(part).bind(*[None] * _ARGUMENTS[path])
    except TypeError:
        return False
    return True


def _label(part: Any) -> str:
    named = part if hasattr(part, "__qualname__") else type(part)
    return f"{named.__module__}:{named.__qualname__}"


def spec_for_device(told: DeviceSpec, trusted: Collection[str] = ()) -> RunSpec:
    """Returns the record with which a device trains: what its round tells it, and nothing else that
    would matter to a client.

    Args:
        trusted: modules that the round may name parts of. What a round names would be imported, so
            the device's operator says which.
    """
    for path, ref in told.parts():
        if ref.is_own and ref.name.partition(":")[0] not in trusted:
            raise InputError(
                f"the round names code that this device was not told to trust, as {path}: got "
                f"{ref.name}; expected a part of {', '.join(trusted) or 'the library'}; pass "
                "--trust with the module if you know it"
            )
    given = told.describe()
    return spec_of(told.task.name, {**given, "task": given["task"]})


def _normal(keys: KeySpec) -> dict[str, Any]:
    """Anyone who takes every key chooses none."""
    is_all = keys.count is None or keys.choice.name == "all"
    return {"choice": "all", "count": None} if is_all else {}


def check_sizes(known: Mapping[str, int], given: Mapping[str, int]) -> None:
    """Raises InputError where a size has no such name or is below 1, or 0 where that is known."""
    for name, value in given.items():
        if name not in known:
            raise InputError(
                f"no such size: got {name}; expected {', '.join(sorted(known)) or 'none'}; choose "
                "one of them"
            )
        minimum = min(known[name], 1)
        if value < minimum:
            raise InputError(
                f"{name} is out of range: got {value}; expected {minimum} or more; raise it"
            )


def _check_spaces(defaults: RunSpec, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in defaults.keys:
            raise InputError(
                f"task {defaults.task} has no such key space: got {name}; expected "
                f"{', '.join(defaults.keys)}; name one of them"
            )


def name_of(spec: RunSpec) -> str:
    """Returns what tells a run from others of its task, as the name of a directory."""
    try:
        usual = defaults_of(spec.task.name).sizes
    except InputError:  # a task that was passed as an object is not found by its name
        usual = {}
    words = [spec.task.name]
    words += [f"{size}{n}" for size, n in spec.sizes.items() if n != usual.get(size)]
    words += [_keys_word(space, each) for space, each in spec.keys.items()]
    words += ["fixed"] * spec.shared_keys + ["per-key"] * (spec.mean_over == "choosers")
    if spec.client.negatives:
        words.append(f"negatives{spec.client.negatives:g}")
    sums = spec.aggregation
    words += [part.name for part in (spec.server.optimizer, spec.delivery, sums.name) if part]
    words += ["ring16"] * (sums.ring_bits == 16) + ["signed"] * sums.signed
    words += [spec.cohort.sampling] if spec.cohort.sampling != "fixed" else []
    words += [*_privacy_words(spec), *_async_words(spec)]
    if spec.tuning:
        words.append(f"client{spec.client.lr:g}-server{spec.server.lr:g}")
    return "-".join(words).replace(":", ".")


def _keys_word(space: str, keys: KeySpec) -> str:
    return f"all-{space}s" if keys.count is None else f"{keys.choice.name}{keys.count}-{space}s"


def _privacy_words(spec: RunSpec) -> list[str]:
    private = spec.privacy
    if private is None:
        return []
    kind = [private.kind] if private.kind != "all-rows" else []
    return [f"noise{private.noise:g}-clip{private.clip:g}", *kind]


def _async_words(spec: RunSpec) -> list[str]:
    stream = spec.asynchronous
    if stream is None:
        return []
    usual = AsyncSpec(concurrency=1).max_staleness
    stale = [f"stale{stream.max_staleness}"] if stream.max_staleness != usual else []
    return [f"async{stream.concurrency}", *stale]
