"""Arms: one line of a figure, all that decides the numbers of a run but data and trial."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from keyhole.delivery.names import DeliveryName
from keyhole.errors import InputError
from keyhole.private.secure_sum.fixed_point import RingBits
from keyhole.server.aggregation import Over
from keyhole.tasks.named import task_named
from keyhole.tasks.task import Settings, TaskKind, check_sizes
from keyhole.training.aggregation.named import AggregationName

__all__ = ["Arm", "arm_of"]

_NEWER = (
    "delivery",
    "aggregation",
    "value_clip",
    "ring_bits",
    "is_signed",
    "sampling",
    "privacy",
    "concurrency",
    "most_staleness",
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
        most_staleness: an update older than this many steps is left out.
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
    aggregation: AggregationName = "plain"
    value_clip: float = 16.0
    ring_bits: RingBits = 32
    is_signed: bool = False
    sampling: Literal["fixed", "poisson", "cyclic"] = "fixed"
    privacy: Mapping[str, Any] | None = None
    concurrency: int | None = None
    most_staleness: int = 20
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
        words += [self.aggregation] if self.aggregation != "plain" else []
        words += ["ring16"] * (self.ring_bits == 16) + ["signed"] * self.is_signed
        words += [self.sampling] if self.sampling != "fixed" else []
        if self.privacy:
            words.append(f"noise{self.privacy['noise']:g}-clip{self.privacy['clip']:g}")
            words += [k for k in [self.privacy.get("kind")] if k not in (None, "all-rows")]
        if self.concurrency is not None:
            words.append(f"async{self.concurrency}")
            words += [f"stale{s}" for s in [self.most_staleness] if s != Arm.most_staleness]
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
