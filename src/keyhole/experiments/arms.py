"""Describes an arm, one line of a figure: all that decides a run but its data and trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from keyhole.aggregation.plain import PLAIN
from keyhole.crypto.ring import RingBits
from keyhole.delivery.base import DeliveryName
from keyhole.errors import InputError
from keyhole.experiments.named import task_named
from keyhole.experiments.task import Settings, Task, TaskKind, check_sizes
from keyhole.keys.choice import Choice
from keyhole.keys.combined import always, choice_named, sampled_correction, with_negatives
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import ClientKeys
from keyhole.server.row_sums import Over

_NEWER = (
    "delivery",
    "aggregation",
    "value_clip",
    "ring_bits",
    "is_signed",
    "sampling",
    "privacy",
    "concurrency",
    "max_staleness",
)


@dataclass(frozen=True)
class Arm:
    """One way to train a task.

    Args:
        task: its name.
        sizes: of the model, all of them.
        settings: how it is trained.
        keys: key space -> name of a choice of keys.
        keys_per_client: key space -> m; None for every key.
        shared_keys: whether all clients of a round draw the same random keys.
        over: what sums are divided by.
        negatives: share of the keys of a softmax that are drawn at random, with the correction of a
            sampled softmax; 0 for none.
        delivery: how slices travel; None sends them on demand, or everything where clients take
            every key.
        aggregation: how updates are added up.
        value_clip: numbers of an update beyond it are clipped by secure sums.
        ring_bits: of the ring in which secure sums add.
        is_signed: whether clients of a secure sum with one server sign who is left.
        sampling: how cohorts are drawn.
        privacy: fields of `Privacy`; None promises nothing.
        concurrency: clients at work at any time, of asynchronous rounds whose steps wait for as
            many updates as a cohort has; None for synchronous rounds.
        max_staleness: an update older than this many steps is left out.
        is_tuning: whether validation clients are kept out of training.
        seed: of everything random.
    """

    task: str
    sizes: Mapping[str, int]
    settings: Settings
    keys: Mapping[str, str]
    keys_per_client: Mapping[str, int | None]
    shared_keys: bool = False
    over: Over = "cohort"
    negatives: float = 0.0
    delivery: DeliveryName | None = None
    aggregation: str = PLAIN.about.name
    value_clip: float = 16.0
    ring_bits: RingBits = 32
    is_signed: bool = False
    sampling: Literal["fixed", "poisson", "cyclic"] = "fixed"
    privacy: Mapping[str, Any] | None = None
    concurrency: int | None = None
    max_staleness: int = 20
    is_tuning: bool = False
    seed: int = 0

    @property
    def name(self) -> str:
        """What tells it from other arms of its task, as the name of a directory."""
        kind = task_named(self.task)
        words = [self.task]
        words += [f"{size}{n}" for size, n in self.sizes.items() if n != kind.sizes[size]]
        words += [_keys_word(self.keys[s], s, m) for s, m in self.keys_per_client.items()]
        words += ["fixed"] * self.shared_keys + ["per-key"] * (self.over == "choosers")
        if self.negatives:
            words.append(f"negatives{self.negatives:g}")
        words += [self.delivery] if self.delivery else []
        words += [self.aggregation] if self.aggregation != PLAIN.about.name else []
        words += ["ring16"] * (self.ring_bits == 16) + ["signed"] * self.is_signed
        words += [self.sampling] if self.sampling != "fixed" else []
        if self.privacy:
            words.append(f"noise{self.privacy['noise']:g}-clip{self.privacy['clip']:g}")
            words += [k for k in [self.privacy.get("kind")] if k not in (None, "all-rows")]
        if self.concurrency is not None:
            words.append(f"async{self.concurrency}")
            words += [f"stale{s}" for s in [self.max_staleness] if s != Arm.max_staleness]
        if self.is_tuning:
            words.append(f"client{self.settings.client_lr:g}-server{self.settings.server_lr:g}")
        return "-".join(words)

    def describe(self) -> dict[str, Any]:
        """All of it, as it is written into a run's directory; what was left as it is by default is
        left out where earlier versions did not know it."""
        told = asdict(self)
        for each in fields(self):
            if each.name in _NEWER and told[each.name] == each.default:
                del told[each.name]
        return {**told, "arm": self.name}


def _keys_word(choice: str, space: str, m: int | None) -> str:
    return f"all-{space}s" if m is None else f"{choice}{m}-{space}s"


def arm_of(
    task: str,
    *,
    sizes: Mapping[str, int] | None = None,
    keys: Mapping[str, str] | None = None,
    keys_per_client: Mapping[str, int | None] | None = None,
    settings: Settings | None = None,
    changes: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Arm:
    """Returns an arm of a task: the task's defaults, but for what is given.

    Args:
        task: its name.
        sizes: those that differ.
        keys: key space -> name of the choice, where it differs.
        keys_per_client: key space -> m, where it differs.
        settings: in place of the task's.
        changes: fields of the settings that differ.
        rest: further fields of `Arm`.

    Raises:
        InputError: there is no such task, size or key space.

    >>> arm_of("emnist_2nn", keys_per_client={"neuron": 50}).name
    'emnist_2nn-independent50-neurons'
    """
    kind = task_named(task)
    check_sizes(kind.sizes, sizes or {})
    for given in (keys or {}, keys_per_client or {}):
        _check_spaces(kind, given)
    counts = {**kind.keys_per_client, **(keys_per_client or {})}
    chosen = {**kind.keys, **(keys or {})}
    return Arm(
        task=task,
        sizes={**kind.sizes, **(sizes or {})},
        settings=replace(settings or kind.settings, **(changes or {})),
        keys={space: "all" if counts[space] is None else chosen[space] for space in chosen},
        keys_per_client=counts,
        **rest,
    )


def _check_spaces(kind: TaskKind, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in kind.keys:
            raise InputError(
                f"task {kind.name} has no such key space",
                got=name,
                allowed=", ".join(kind.keys),
                fix="name one of them",
            )


STRUCTURED = ("top", "random", "random-top")  # as many of a client's own keys as it may hold


def choices_of(arm: Arm, task: Task, own: Mapping[str, Choice]) -> dict[str, Choice]:
    """Returns the choice of each key space: what everybody has, what the arm names, what is drawn.

    Args:
        arm: names choices.
        task: says what everybody has.
        own: key space -> a choice in place of the one that the arm names.

    Raises:
        InputError: there is no such choice, a client could not hold what everybody has, or the arm
            draws words where there is no softmax or no own words to tell them from.
    """
    _check_negatives(arm, task)
    _check_always(arm, task)
    return {space: _choice(arm, task, space, own.get(space)) for space in arm.keys}


def localize_of(arm: Arm, task: Task) -> Callable[[Any, ClientKeys], Any]:
    """Returns the task's `localize`, with the correction of a sampled softmax where words are
    drawn."""
    if not arm.negatives:
        return task.localize
    assert task.outputs is not None
    name = task.outputs

    def localize(data: Any, keys: ClientKeys) -> Any:
        examples = task.localize(data, keys)
        (words,) = [z for z in ([keys] if isinstance(keys, Keys) else keys) if z.space.name == name]
        first = task.always.get(name, np.empty(0, np.int64)).tolist()
        own, correction = sampled_correction(
            words, task.count_keys(data)[name], arm.negatives, first
        )
        count = len(next(iter(examples.values())))
        return {
            **examples,
            "own": np.full(count, own, np.int32),
            "correction": np.full(count, correction, np.float32),
        }

    return localize


def _choice(arm: Arm, task: Task, space: str, own: Choice | None) -> Choice:
    choice, is_all = own or choice_named(arm.keys[space]), arm.keys[space] == "all"
    if space in task.always and not is_all:
        choice = always(task.always[space].tolist(), choice)
    if arm.negatives and space == task.outputs and not is_all:
        choice = with_negatives(choice, arm.negatives)
    return choice


def _check_negatives(arm: Arm, task: Task) -> None:
    if not arm.negatives:
        return
    if task.outputs is None:
        raise InputError(
            f"task {arm.task} has no softmax that is cut",
            got=f"negatives {arm.negatives}",
            allowed="0",
            fix="leave negatives out; so_word has them",
        )
    if arm.keys[task.outputs] not in STRUCTURED:
        raise InputError(
            f"negatives need own keys of {task.outputs!r} to tell them from",
            got=arm.keys[task.outputs],
            allowed=", ".join(STRUCTURED),
            fix="choose one of them, or leave negatives out",
        )


def _check_always(arm: Arm, task: Task) -> None:
    for space, first in task.always.items():
        m = arm.keys_per_client[space]
        if m is not None and m < len(first):
            raise InputError(
                f"a client cannot hold the keys of {space!r} that everybody has",
                got=f"{m} keys",
                allowed=f"{len(first)} or more",
                fix="raise keys per client",
            )
