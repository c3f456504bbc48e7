"""Describes a task: a model, the clients that train it, and how well it does.

Examples name words or movies of the whole model; `localize` gives their places among a client's
keys, at a cost that follows the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array, KeyArray, Tree
from keyhole.data.federated import Dataset
from keyhole.errors import InputError
from keyhole.experiments.specs import check_sizes
from keyhole.keys.choice import Choice, KeyCounts
from keyhole.keys.structured import always, choice_named, sampled_correction, with_negatives
from keyhole.models.client_update import TrainsItself
from keyhole.models.model import Model
from keyhole.primitives.keyspace import are_same_rising
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.spec import RunSpec
from keyhole.server.state import ServerState

Metrics = Callable[[ServerState], Mapping[str, float]]
"""`state -> {name: value}`, on one split."""

Predictions = Callable[[ServerState], tuple[Array, Any]]
"""`state -> (outputs, examples)`, on one split."""


@dataclass(frozen=True, eq=False)
class TaskParts:
    """What one experiment trains and measures, on one dataset.

    Args:
        model: with its cuts.
        clients: how many there are to train on.
        data: `client -> its data`.
        count_keys: `data -> {key space: what occurs}`.
        localize: `(data, keys) -> examples` in which keys are counted among the client's own.
        metrics: split -> metrics on it.
        always: key space -> keys that every client has first, whatever it chooses.
        outputs: the key space whose keys are the outputs of a softmax, if there is one.
        predictions: split -> what the model says of its examples, for metrics that are thought of
            after the run.
        check: is given the parameters that a run starts from, and raises InputError for what is
            found amiss only by computing.
        measured: names of the metrics that a device can measure on its own examples.
        measure: `(sub-model, examples as localize returns them) -> {name: value}` of these.
    """

    model: Model | TrainsItself
    clients: int
    data: Callable[[int], Any] = field(compare=False)
    count_keys: Callable[[Any], Mapping[str, KeyCounts]]
    localize: Callable[[Any, KeysBySpace], Any]
    metrics: Mapping[str, Metrics] = field(compare=False)  # as data: no part of an identity
    always: Mapping[str, KeyArray] = field(default_factory=dict)
    outputs: str | None = None
    predictions: Mapping[str, Predictions] = field(default_factory=dict, compare=False)
    check: Callable[[Tree], None] | None = field(default=None, compare=False)
    measured: tuple[str, ...] = ()
    measure: Callable[[Any, Any], Mapping[str, float]] | None = None

    def metrics_on(self, split: str) -> Metrics:
        """Returns the metrics on a split; none where its examples are at devices."""
        return self.metrics.get(split, lambda _: {})


@dataclass(frozen=True)
class TaskKind:
    """A task before it has data: what `keyhole train` knows by name.

    Args:
        name: such as "so_tag".
        about: one sentence.
        kind: of the dataset it needs: "writers", "posts", "ratings", or a word of your own.
        defaults: how it is trained unless told otherwise, with all sizes and key spaces.
        metric: the one that figures show.
        splits: those that are evaluated on.
        make: `(dataset, sizes, is_tuning) -> task`; tuning leaves the clients of the validation
            split out of training where the source has none of its own.
        holds: field of a run's record -> attribute of the task that is its default where the task
            is named by "module:NAME", such as {"data": "data"}.
    """

    name: str
    about: str
    kind: str
    defaults: RunSpec
    metric: str
    splits: tuple[str, ...]
    make: Callable[[Dataset, Mapping[str, int], bool], TaskParts]
    holds: Mapping[str, str] = field(default_factory=dict)

    def on(
        self, dataset: Dataset, sizes: Mapping[str, int] | None = None, is_tuning: bool = False
    ) -> TaskParts:
        """Returns the task on a dataset, in other sizes where they are given."""
        if dataset.kind != self.kind:
            raise InputError(
                f"task {self.name} cannot use dataset {dataset.name}: got a dataset of "
                f"{dataset.kind}; expected a dataset of {self.kind}; keyhole data list shows what "
                "there is"
            )
        for split in ("train", *self.splits):
            if split not in dataset.splits:
                raise InputError(
                    f"dataset {dataset.name} has no {split} split: got "
                    f"{', '.join(dataset.splits)}; expected train, and those that the task is "
                    "evaluated on; bring data of more clients"
                )
        check_sizes(self.defaults.sizes, sizes or {})
        return self.make(dataset, {**self.defaults.sizes, **(sizes or {})}, is_tuning)


def check_words(dataset: Dataset, words: int) -> None:
    """Raises InputError where the vocabulary is larger than the dataset's lexicon."""
    if words > len(dataset.names["words"]):
        raise InputError(
            f"the vocabulary is larger than what the data hold: got {words}; expected "
            f"1..{len(dataset.names['words'])} words in {dataset.name}; ask for fewer words or "
            "bring more data"
        )


_LISTED = 1 << 14  # keys whose places are looked up in a list of all, whatever is asked


def places_of(names: Array, keys: KeyArray) -> Array:
    """Returns where each name stands among the keys, int64; -1 where it does not.

    Args:
        names: any shape, of the key space.
        keys: (m,), each once.

    >>> places_of(np.array([7, 3, 5]), np.array([5, 7])).tolist()
    [1, -1, 0]
    """
    if not len(keys) or not np.size(names):
        return np.full(np.shape(names), -1, np.int64)
    size = 1 + max(int(np.max(names)), int(keys.max()))
    if size <= _LISTED + 8 * np.size(names) and np.min(names) >= 0:
        place = np.full(size, -1, np.int64)
        place[keys] = np.arange(len(keys))
        return place[names]
    if are_same_rising([keys]):  # as where a client takes every key
        at = np.minimum(np.searchsorted(keys, names), len(keys) - 1)
        return np.where(keys[at] == names, at, -1)
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys, names, sorter=order), len(keys) - 1)
    return np.where(keys[order[at]] == names, order[at], -1)


def pad_rows(row: Array, value: Array, rows: int) -> Array:
    """Values side by side in the row they belong to, int32 (rows, most), -1 after the last.

    Args:
        row: (n,), rising.
        value: (n,).
        rows: how many there are.

    >>> pad_rows(np.array([0, 0, 2]), np.array([4, 5, 6]), 3).tolist()
    [[4, 5], [-1, -1], [6, -1]]
    """
    counts = np.bincount(row, minlength=rows)
    within = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    padded = np.full((rows, max(1, counts.max(initial=0))), -1, np.int32)
    padded[row, within] = value
    return padded


STRUCTURED = ("top", "random", "random-top", "importance", "tf-idf")
"""Choices of as many of a client's own keys as it may hold."""


def choices_of(spec: RunSpec, task: TaskParts, own: Mapping[str, Choice]) -> dict[str, Choice]:
    """Returns the choice of each key space: what everybody has, what is named, what is drawn.
    `own` has choices in place of those that the record names."""
    _check_keys(spec, task)
    choices = {}
    for space, keys in spec.keys.items():
        choice = own.get(space) or choice_named(keys.choice.name)
        if space in task.always and keys.choice.name != "all":
            choice = always(task.always[space].tolist(), choice)
        if spec.client.negatives and space == task.outputs and keys.choice.name != "all":
            choice = with_negatives(choice, spec.client.negatives)
        choices[space] = choice
    return choices


def localize_of(spec: RunSpec, task: TaskParts) -> Callable[[Any, KeysBySpace], Any]:
    """Returns the task's `localize`, with the correction of a sampled softmax where words are
    drawn."""
    if not spec.client.negatives:
        return task.localize
    assert task.outputs is not None
    name = task.outputs

    def localize(data: Any, keys: KeysBySpace) -> Any:
        examples = task.localize(data, keys)
        first = task.always.get(name, np.empty(0, np.int64)).tolist()
        own, correction = sampled_correction(
            keys[name], task.count_keys(data)[name], spec.client.negatives, first
        )
        count = len(next(iter(examples.values())))
        return {
            **examples,
            "own": np.full(count, own, np.int32),
            "correction": np.full(count, correction, np.float32),
        }

    return localize


def _check_keys(spec: RunSpec, task: TaskParts) -> None:
    """Raises InputError where a client could not hold what everybody has, or words are drawn where
    there is no softmax or no own words to tell them from."""
    negatives, outputs = spec.client.negatives, task.outputs
    if negatives and outputs is None:
        raise InputError(
            f"task {spec.task} has no softmax that is cut: got negatives {negatives}; expected 0; "
            "leave negatives out; so_word has them"
        )
    if negatives and outputs and spec.keys[outputs].choice.name not in STRUCTURED:
        raise InputError(
            f"negatives need own keys of {outputs!r} to tell them from: got "
            f"{spec.keys[outputs].choice}; expected {', '.join(STRUCTURED)}; choose one of them, "
            "or leave negatives out"
        )
    for space, first in task.always.items():
        m = spec.keys[space].count
        if m is not None and m < len(first):
            raise InputError(
                f"a client cannot hold the keys of {space!r} that everybody has: got {m} keys; "
                f"expected {len(first)} or more; raise --m"
            )
