"""Describes the run of each task: its defaults, and what differs from them.

Imports neither JAX nor Numba: the command line checks what it was given before it loads either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from keyhole.errors import InputError
from keyhole.identity import Ref
from keyhole.parts import PartKind, near_miss, pick
from keyhole.rounds.cohorts import CohortSpec
from keyhole.rounds.fields import NONE, flatten, nest, spec_fields
from keyhole.rounds.spec import ClientSpec, DeviceSpec, KeySpec, RunSpec, ServerSpec
from keyhole.rounds.sum_spec import AsyncSpec

SYNTHETIC = "synthetic"
"""The name of data that are made from a seed."""


def _defaults(
    task: str,
    sizes: dict[str, int],
    client: ClientSpec,
    keys: Mapping[str, tuple[str, int | None]],
    rounds: int = 1500,
    server_lr: float = 1.0,
) -> RunSpec:
    """What differs between tasks; `keys` has the choice and count of each key space."""
    return RunSpec(
        task=Ref(task),
        sizes=sizes,
        rounds=rounds,
        cohort=CohortSpec(size=50),
        client=client,
        keys={space: KeySpec(choice=Ref(name), count=m) for space, (name, m) in keys.items()},
        server=ServerSpec(lr=server_lr),
    )


DEFAULTS: dict[str, RunSpec] = {
    spec.task.name: spec
    for spec in (
        _defaults(
            "so_tag",
            {"words": 10_000, "tags": 500},
            ClientSpec(algorithm="FedAdagrad", lr=10.0, batch_size=100, max_examples=1000),
            {"word": ("top", 1000)},
        ),
        _defaults(
            "emnist_cnn",
            {"filters": 64, "hidden": 512, "ink": 0},
            ClientSpec(algorithm="FedAvg", lr=0.1, batch_size=20),
            {"filter": ("independent", 16)},
        ),
        _defaults(
            "emnist_2nn",
            {"neurons": 200, "hidden": 200, "ink": 0},
            ClientSpec(algorithm="FedAvg", lr=0.1, batch_size=20),
            {"neuron": ("independent", 100)},
        ),
        _defaults(
            "so_word",
            {"words": 10_000, "embedding": 96, "width": 512, "heads": 8, "neurons": 2048},
            ClientSpec(algorithm="FedAdam", lr=0.1, batch_size=16, max_examples=64),
            {"word": ("top", 1004), "neuron": ("independent", None)},
            rounds=3000,
            server_lr=0.03,
        ),
        _defaults(
            "experts",
            {"experts": 8, "features": 32, "hidden": 128, "ink": 1},
            ClientSpec(algorithm="FedAvg", lr=0.3, batch_size=20),
            {"expert": ("top", 2)},
        ),
        _defaults(
            "movies",
            {"factors": 8},
            # All of a client's ratings in one step: m or more.
            ClientSpec(algorithm="FedAvg", lr=0.3, batch_size=1024, max_examples=1024),
            {"movie": ("random", 500)},
            rounds=300,
        ),
    )
}
"""Task -> its defaults, which are the paper's where the task is the paper's. A choice of keys holds
for the counts that a caller gives; a count of None takes every key."""


TASK = PartKind("task", "own-task", {"defaults": RunSpec, "make": Callable, "on": Callable})


def defaults_of(task: str) -> RunSpec:
    """Returns the defaults of a task, by its name or by "module:NAME"."""
    found: Any = pick(TASK, task, DEFAULTS)
    if not Ref(task).is_own:
        return cast("RunSpec", found)
    held = {path: f"{task}.{at}" for path, at in getattr(found, "holds", {}).items()}
    return cast("RunSpec", found.defaults.changed({"task": task, **held}))


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
    for name in given.get("keys", {}):
        if name not in defaults.keys:
            raise InputError(
                f"task {defaults.task} has no such key space: got {name}; expected "
                f"{', '.join(defaults.keys)}; name one of them"
            )
    made = defaults.changed(given)
    check_sizes(defaults.sizes, made.sizes)
    for name, told in given.get("keys", {}).items():
        is_idle = made.keys[name].choice.name == "all" and "choice" not in told
        if is_idle and told.get("count") is not None:
            raise InputError(
                f"task {defaults.task} takes every key of {name!r} and chooses none: got a count "
                f"of {told['count']}; expected a choice as well; pass --keys, such as --keys top"
            )
    whole = [s for s, k in made.keys.items() if k.count is None or k.choice.name == "all"]
    # Anyone who takes every key chooses none.
    return made.changed({"keys": {space: {"choice": "all", "count": None} for space in whole}})


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


def fields_of(where: str, told: Mapping[str, Any], *, varied: bool = False) -> dict[str, Any]:
    """Returns the fields of a run that a file tells, nested.

    A part that has a name may be told by that alone: aggregation = "secure-sparse".

    Args:
        where: what to call the file.
        told: nested, or with dotted names.
        varied: whether a field may have a list of values, each of which it could have.

    Raises:
        InputError: a field is none of a run, or cannot have its value.
    """
    fields, nested = {field.path: field for field in spec_fields(RunSpec)}, nest(told)
    for name, value in nested.items():
        if f"{name}.name" in fields and isinstance(value, str | list):
            nested[name] = {"name": value}
    spaces = nested.get("keys")
    for space in spaces if isinstance(spaces, Mapping) else ():  # which the task names
        fields |= {f"keys.{space}.{field.path}": field for field in spec_fields(KeySpec)}
    for name, value in flatten(nested).items():
        _check_name(where, name, value, fields)
        if (field := fields.get(name)) is not None:
            for each in value if varied and isinstance(value, list) else [value]:
                field.check(f"{name} of {where}", None if each == NONE else each)
    return nested


def _check_name(where: str, name: str, value: Any, fields: Collection[str]) -> None:
    """Raises InputError where no run has a field of a name, or it is a table of fields."""
    known = list(fields)
    if any(each.startswith(f"{name}.") for each in known):
        if value == NONE:
            return
        raise InputError(
            f"{name} of {where} is a table: got one value; expected fields of it; write "
            f"{next(each for each in known if each.startswith(f'{name}.'))}"
        )
    if name.startswith("keys."):  # of a key space, which the task names
        space, _, _ = name.removeprefix("keys.").partition(".")
        known += [f"keys.{space}.{field.path}" for field in spec_fields(KeySpec)]
    elif any(name.startswith(f"{each}.") for each in known):
        return
    if name not in known:
        raise InputError(
            f"{where} has a field that no run has: got {name}; expected a field of run.json; "
            f"{near_miss(name, known)}"
        )


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


def name_of(spec: RunSpec) -> str:
    """Returns what tells a run from others of its task, as the name of a directory."""
    try:
        usual = defaults_of(spec.task.name).sizes
    except InputError:  # a task that was passed as an object is not found by its name
        usual = {}
    words = [spec.task.name]
    words += [f"{size}{n}" for size, n in spec.sizes.items() if n != usual.get(size)]
    for space, keys in spec.keys.items():
        is_all = keys.count is None
        words.append(f"all-{space}s" if is_all else f"{keys.choice.name}{keys.count}-{space}s")
    words += ["fixed"] * spec.shared_keys
    words += {"choosers": ["per-key"], "examples": ["weighted"]}.get(spec.mean_over, [])
    if spec.client.negatives:
        words.append(f"negatives{spec.client.negatives:g}")
    sums = spec.aggregation
    words += [part.name for part in (spec.server.optimizer, spec.delivery, sums.name) if part]
    words += ["ring16"] * (sums.ring_bits == 16) + ["signed"] * sums.signed
    words += [] if sums.trim is None else [f"trim{sums.trim:g}"]
    words += [sums.untouched] if sums.untouched == "zeros" else []
    words += [] if sums.norm_alarm is None else [f"alarm{sums.norm_alarm:g}"]
    words += ["metrics"] * bool(sums.metrics)
    if sums.min_clients_per_key:
        words += [f"perkey{sums.min_clients_per_key}"]
        words += [f"counts{sums.count_noise:g}"] * (sums.count_noise > 0)
    if sums.max_update_norm is not None:
        words += [f"norm{sums.max_update_norm:g}"] + ["clip"] * (sums.above_norm == "clip")
    words += [spec.cohort.sampling] if spec.cohort.sampling != "fixed" else []
    if (private := spec.privacy) is not None:
        words.append(f"noise{private.noise:g}-clip{private.clip:g}")
        words += [private.kind] if private.kind != "all-rows" else []
    if (stream := spec.asynchronous) is not None:
        words.append(f"async{stream.concurrency}")
        if stream.max_staleness != AsyncSpec(concurrency=1).max_staleness:
            words.append(f"stale{stream.max_staleness}")
    if spec.tuning:
        words.append(f"client{spec.client.lr:g}-server{spec.server.lr:g}")
    return "-".join(words).replace(":", ".")
