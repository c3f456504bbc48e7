"""Task: your model on your data, with how clients choose keys and what is measured.

Data name keys of the whole model. Their declaration, `inputs={"item": "item"}`, says which column
names keys of which key space; from it follow what occurs in a client's data and the places of its
keys in a sub-model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.data.federated import Dataset, FederatedData, Ragged, draw_pool
from keyhole.errors import InputError
from keyhole.experiments.task import Metrics, Predictions, TaskKind, TaskParts, places_of
from keyhole.front.undeclared import check_undeclared
from keyhole.identity import Ref
from keyhole.keys.choice import Choice, KeyCounts
from keyhole.keys.structured import OF_OWN_KEYS, choice_named, top
from keyhole.models.client_update import Batch, TrainsItself
from keyhole.models.model import Model
from keyhole.parts import near_miss
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import KeysBySpace
from keyhole.rounds.cohorts import CohortSpec
from keyhole.rounds.evaluate import predictor
from keyhole.rounds.loop import metric_number
from keyhole.rounds.spec import ClientSpec, KeySpec, RunSpec, ServerSpec

Metric: TypeAlias = Callable[[Array, Batch], float]
"""`(outputs of the model, examples) -> number`, on all examples of a split at once."""

Missing = Literal["drop", "unknown", "error"]

_EVALUATED = 100_000  # examples of a split, drawn once; all where there are fewer
_BATCH = 1024  # examples that a model of one's own predicts at once


@dataclass(frozen=True, eq=False, repr=False)
class Task:
    """What `train` trains: a model on data, with how clients choose keys and what is measured.

    Args:
        model: `kh.torch.Model` or `kh.jax.Model`, with its cuts.
        data: with a train and a test split, such as `kh.data.from_pandas(...).hold_out(0.1)`; or
            what devices hold, such as `kh.data.at_devices(inputs={"item": "item"})`.
        keys: how clients choose keys: a function of a `KeyContext`, or the name of one that the
            library has, such as "random-top"; one for all key spaces, or one for each by its name.
        metrics: name -> `(outputs, examples) -> number`, on the test split. The first is the one
            that figures show.
        missing: what becomes of a key in a client's data that the client did not select. "drop"
            leaves the whole example out; where rows are of unequal length it leaves out the entry,
            and the example only if no entry of it remains. "unknown" puts the key of `unknown` in
            its place; "error" ends the run.
        unknown: key space -> the key that stands for those not selected; every client has it.
        name: of the task, in figures and file names.

    Raises:
        InputError: a declaration does not fit the model or the data.
    """

    model: Model | TrainsItself
    data: Dataset = field(compare=False)
    keys: Choice | str | Mapping[str, Choice | str] = top
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    missing: Missing = "drop"
    unknown: Mapping[str, int] = field(default_factory=dict)
    name: str = "task"

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_unknown(self)
        for split in ("train", "test"):
            if split not in self.data.splits:
                raise InputError(
                    f"the data have no {split} split: got {', '.join(self.data.splits)}; expected "
                    "train and test; call .hold_out(0.1) on them"
                )
        self._check_data(self.data)

    def _check_data(self, data: Dataset) -> None:
        """Raises InputError where data are not what the task's are declared to be."""
        _check_inputs(self.spaces, data)
        if not isinstance(self.model, TrainsItself):
            _check_lengths(data)
        for column, space in data.inputs.items():
            for clients in data.splits.values():
                if len(clients):
                    _check_keys(column, self.spaces[space], clients)

    def __repr__(self) -> str:
        spaces = ", ".join(f"{name} of {s.num_keys:,} keys" for name, s in self.spaces.items())
        metrics = ", ".join(self.metrics) or "none"
        return f"<task {self.name}: {spaces}; metrics {metrics}; {self.data!r}>"

    @property
    def spaces(self) -> dict[str, KeySpace]:
        """The key spaces of the model, by name."""
        return {space.name: space for space in self.model.layout.spaces}

    @property
    def choices(self) -> dict[str, Choice]:
        """Key space -> how its keys are chosen."""
        if not isinstance(self.keys, Mapping):
            return dict.fromkeys(self.spaces, _choice_of(self.keys))
        for name in self.keys:
            if name not in self.spaces:
                raise InputError(
                    f"the model has no key space {name!r}: got keys for it; expected "
                    f"{', '.join(self.spaces)}; {near_miss(name, self.spaces)}"
                )
        return {name: _choice_of(self.keys.get(name, top)) for name in self.spaces}

    @property
    def kind(self) -> TaskKind:
        """The task as experiments, the command line, engines and devices take it."""
        return TaskKind(
            name=self.name,
            about="A task of your own.",
            kind=self.data.kind,
            defaults=self.defaults,
            metric=next(iter(self.metrics), "loss"),
            splits=("test",),
            make=self.make,
            holds={"data": "data"}
            | {f"keys.{s}.choice": f"choose.{s}" for s in self.spaces if s.isidentifier()},
        )

    @property
    def choose(self) -> SimpleNamespace:
        """The choice of each key space, as an attribute: what "module:TASK.choose.item" names."""
        return SimpleNamespace(**self.choices)

    @property
    def as_part(self) -> TaskKind:
        """What "module:NAME" of a task names: its `kind`."""
        return self.kind

    @property
    def defaults(self) -> RunSpec:
        """How it is trained unless `train` says otherwise."""
        return RunSpec(
            task=Ref(self.name),
            sizes={},
            rounds=100,
            cohort=CohortSpec(size=50),
            client=ClientSpec(algorithm="FedAvg", lr=0.1),
            keys={name: KeySpec(choice=Ref("all"), count=None) for name in self.spaces},
            server=ServerSpec(lr=1.0),
        )

    def make(self, dataset: Dataset, sizes: Mapping[str, int], is_tuning: bool) -> TaskParts:
        """Returns the task on a data set of the same columns."""
        if dataset is not self.data:
            self._check_data(dataset)
        train = dataset.splits["train"]
        held = {split: data for split, data in dataset.splits.items() if len(data)}
        predictions = {split: self._predictions(data) for split, data in held.items()}
        return TaskParts(
            model=self.model,
            clients=len(train),
            data=train.client,
            count_keys=self.count_keys,
            localize=self.localize,
            metrics={split: self._metrics_of(found) for split, found in predictions.items()},
            always={name: np.array([key], np.int64) for name, key in self.unknown.items()},
            predictions=predictions,
            check=partial(check_undeclared, self.model, self.spaces, dataset),
            measured=tuple(self.metrics),
            measure=self._measure_on(self._predict()),
        )

    def _predict(self) -> Callable[[Any, Batch], Array]:
        """What a model of any keys says of examples."""
        if isinstance(self.model, TrainsItself):
            return _in_batches(self.model)
        return predictor(self.model, lambda outputs: outputs)

    def _measure_on(
        self, predict: Callable[[Any, Batch], Array]
    ) -> Callable[[Any, Batch], Mapping[str, float]]:
        return lambda params, examples: measure(self.metrics, predict(params, examples), examples)

    def count_keys(self, own: Batch) -> dict[str, KeyCounts]:
        """Returns what occurs in a client's data, for each key space."""
        counts = {}
        for name, space in self.spaces.items():
            named = [_flat(own[c]) for c, target in self.data.inputs.items() if target == name]
            counts[name] = (
                KeyCounts.of(space, np.concatenate(named)) if named else KeyCounts.none(space)
            )
        return counts

    def localize(self, own: Batch, keys: KeysBySpace) -> Batch:
        """Returns a client's examples with keys counted among its own."""
        found, kept = dict(own), np.ones(_count(own), bool)
        for column, space in self.data.inputs.items():
            place = self._places(column, own[column], space, keys[space].array)
            found[column] = place
            if isinstance(place, Ragged):
                kept &= (place.lengths > 0) | (own[column].lengths == 0)
            else:
                kept &= (place >= 0).reshape(len(place), -1).all(axis=1)
        if kept.all():
            return found
        at = np.flatnonzero(kept)
        return {name: column[at] for name, column in found.items()}

    def _places(self, column: str, named: Any, space: str, keys: KeyArray) -> Any:
        """Where the keys of a column stand among the client's own."""
        place = places_of(_flat(named), keys).astype(np.int32)
        if (place < 0).any() and self.missing == "error":
            lost = int(_flat(named)[place < 0][0])
            raise InputError(
                f"a client's data name a key that it did not select: got {lost} in column "
                f"{column!r}; expected keys of {space!r} that it holds; choose more keys, or pass "
                'missing="drop"'
            )
        if self.missing == "unknown":
            place[place < 0] = int(np.flatnonzero(keys == self.unknown[space])[0])
        if not isinstance(named, Ragged):
            return place.reshape(np.shape(named))
        kept = place >= 0
        lengths = np.bincount(named.row_numbers[kept], minlength=len(named))
        return Ragged(place[kept], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))

    def _predictions(self, split: FederatedData) -> Predictions:
        """What the server's whole model says of a split, whose examples are drawn once."""
        drawn = cache(lambda: draw_pool(split, _EVALUATED, np.random.default_rng(0)))
        predict = self._predict()
        return lambda state: (predict(state.model(), drawn()), drawn())

    def _metrics_of(self, predictions: Predictions) -> Metrics:
        """The metrics of the task; nothing is predicted where it has none."""
        return lambda state: measure(self.metrics, *predictions(state)) if self.metrics else {}


def measure(metrics: Mapping[str, Metric], outputs: Array, examples: Batch) -> dict[str, float]:
    """Returns metrics of what a model says of examples.

    Raises:
        InputError: a metric is no function, or has returned something else than a number.
    """
    for name, of in metrics.items():
        if not callable(of):
            raise InputError(
                f"metric {name!r} is no function: got a {type(of).__name__}; expected "
                "(outputs, examples) -> number; pass a function"
            )
    return {name: metric_number(name, of(outputs, examples)) for name, of in metrics.items()}


def _in_batches(model: Any) -> Callable[[Any, Batch], Array]:
    def predict(params: Any, examples: Batch) -> Array:
        starts = range(0, _count(examples), _BATCH)
        parts = [
            np.asarray(
                model.predict(params, {name: c[at : at + _BATCH] for name, c in examples.items()})
            )
            for at in starts
        ]
        return np.concatenate(parts)

    return predict


def _choice_of(given: Choice | str) -> Choice:
    return choice_named(given) if isinstance(given, str) else given


def _flat(column: Any) -> Array:
    return column.flat if isinstance(column, Ragged) else np.asarray(column).reshape(-1)


def _count(examples: Batch) -> int:
    return min(map(len, examples.values()))


def _check_kinds(task: Task) -> None:
    """Raises InputError where data or metrics are of another kind."""
    if not isinstance(task.data, Dataset):
        raise InputError(
            f"the data of a task are no data set: got a {type(task.data).__name__}; expected a "
            "Dataset, which says whose each example is; make one with kh.data.from_arrays, "
            "kh.data.from_pandas or another function of kh.data"
        )
    if not isinstance(task.metrics, Mapping):
        raise InputError(
            f"the metrics of a task have no names: got a {type(task.metrics).__name__}; expected a "
            'dict of name and (outputs, examples) -> number; pass metrics={"mse": mse}, say'
        )


def _check_inputs(spaces: Mapping[str, KeySpace], data: Dataset) -> None:
    """Raises InputError where a declaration names what is not there, or is missing."""
    columns = data.splits["train"].columns
    for column, space in data.inputs.items():
        if column not in columns and not data.is_at_devices:
            raise InputError(
                f"inputs name a column that the data do not have: got {column!r}; expected "
                f"{', '.join(columns)}; {near_miss(column, columns)}"
            )
        if space not in spaces:
            raise InputError(
                f"inputs name a key space that the model does not have: got {space!r} for column "
                f"{column!r}; expected {', '.join(spaces) or 'a model that is cut'}; "
                f"{near_miss(space, spaces) if spaces else 'pass the model cuts=[kh.Cut(...)]'}"
            )
    for name in spaces:
        if name in columns and name not in data.inputs:
            raise InputError(
                f"column {name!r} has the name of a key space and is not declared: got inputs "
                f"{dict(data.inputs)}; expected the column among them, so that its keys are "
                f"renumbered; pass inputs={{{name!r}: {name!r}}}, or rename the column"
            )


def _check_lengths(data: Dataset) -> None:
    """Raises InputError where rows are of unequal length: padding of -1 is no error in JAX, which
    counts it from the end, and so takes it for the last key."""
    for column, rows in data.splits["train"].columns.items():
        if isinstance(rows, Ragged):
            lengths = rows.lengths
            raise InputError(
                f"column {column!r} has rows of unequal length, and a JAX model takes arrays: got "
                f"{min(lengths, default=0)} to {max(lengths, default=0)} entries; expected one "
                "length; pad them where data are made, or use a PyTorch model, which takes them "
                "padded with -1"
            )


def _check_keys(column: str, space: KeySpace, split: FederatedData) -> None:
    """Raises InputError where a client's data name keys beyond the key space."""
    if _flat(split.columns[column]).max(initial=0) < space.num_keys:
        return
    for number, client in enumerate(split.client_ids):
        named = _flat(split.client(number)[column])
        if named.max(initial=0) >= space.num_keys:
            raise InputError(
                f"column {column!r} of client {client!r} names a key beyond key space "
                f"{space.name!r}: got {named.max()}; expected 0..{space.num_keys - 1}; raise its "
                "number of keys, and the rows of the parameters that it cuts, or mend the data"
            )


def check_choice(task: Task, space: str) -> None:
    """Raises InputError where clients would choose among their own keys and no data name any."""
    if space not in task.data.inputs.values() and task.choices[space] in OF_OWN_KEYS:
        columns = task.data.splits["train"].columns
        raise InputError(
            f"no column is declared to name keys of {space!r}, so clients have none of their own "
            f"to choose: got inputs {dict(task.data.inputs)} of columns {', '.join(columns)}; "
            f"expected a column for it; pass inputs={{COLUMN: {space!r}}} where data are made, or "
            "choose among all keys with keys=kh.keys.independent"
        )


def _check_unknown(task: Task) -> None:
    """Raises InputError where keys that were not selected have no key in their place."""
    needed = set(task.data.inputs.values()) if task.missing == "unknown" else set()
    if task.missing not in ("drop", "unknown", "error"):
        raise InputError(
            f"missing is not known: got {task.missing!r}; expected drop, unknown or error; choose "
            "one of them"
        )
    for name in sorted(needed - task.unknown.keys()):
        raise InputError(
            f"no key stands for those of {name!r} that are not selected: got unknown "
            f"{dict(task.unknown)}; expected one; pass unknown={{{name!r}: KEY}}"
        )
    for name, key in task.unknown.items():
        if name not in task.spaces or not 0 <= key < task.spaces[name].num_keys:
            raise InputError(
                f"unknown names no key: got {key} of {name!r}; expected a key of "
                f"{', '.join(task.spaces)}; choose another"
            )
