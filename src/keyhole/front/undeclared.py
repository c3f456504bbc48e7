"""Finds columns that name keys and are not declared: a client's model would read other rows.

One step of the whole model on a few examples moves the rows that these examples read. If it moves
rows that no declared column names, and others where another column is changed, namely those that it
then names, that column names keys. A softmax over all keys moves all rows, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from keyhole import tree
from keyhole.arrays import Array, Tree
from keyhole.data.federated import Dataset, FederatedData, Ragged
from keyhole.errors import InputError, KeyholeError
from keyhole.models.client_update import Batch, ClientUpdate, TrainsItself
from keyhole.models.local_training import trainer_of
from keyhole.models.model import Model
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.report import Report

_EXAMPLES = 32
_TRIALS = 3  # keys that a column is changed to
_OF_A_MODEL = (
    *(KeyholeError, ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
_LARGEST = 1 << 25  # numbers of a model that is tried whole: 128 MiB


def check_undeclared(
    model: Model | TrainsItself, spaces: Mapping[str, KeySpace], data: Dataset, params: Tree
) -> None:
    """Raises InputError where a column is found to name keys without being declared.

    Args:
        params: of the whole model.
    """
    columns = data.splits["train"].columns
    others = [name for name in columns if name not in (*data.inputs, data.target)]
    named = {name: values_of(columns[name]) for name in others}
    named = {name: values for name, values in named.items() if len(values)}
    if not named or not spaces or model.layout.server_size > _LARGEST:
        return
    client, own = _examples(data.splits["train"])
    for space, paths in _moved(model, spaces, own, params).items():
        declared = [values_of(own[c]) for c, target in data.inputs.items() if target == space]
        known = np.concatenate([*declared, np.empty(0, np.int64)])
        for path, rows in paths.items():
            for column in named:
                values = np.setdiff1d(values_of(own[column]), known)
                if not len(np.intersect1d(np.setdiff1d(rows, known), values)):
                    continue
                if _follows(model, spaces, own, params, column, (space, path), rows):
                    raise InputError(
                        f"column {column!r} names keys of {space!r} and is not declared: got "
                        f"examples of client {client!r} that read other rows of {path!r} where it "
                        f"is changed; expected it among inputs {dict(data.inputs)}, so that its "
                        f"keys are renumbered; pass inputs={{{column!r}: {space!r}}} too, where "
                        "data are made"
                    )


def _follows(
    model: Model | TrainsItself,
    spaces: Mapping[str, KeySpace],
    own: Batch,
    params: Tree,
    column: str,
    at: tuple[str, str],
    rows: Array,
) -> bool:
    """Whether rows that did not move do, each time, once the column names them."""
    space, path = at
    still = np.setdiff1d(np.arange(spaces[space].num_keys), rows)[-_TRIALS:]
    for key in still:
        changed = {**own, column: _filled(own[column], int(key))}
        if key not in _moved(model, spaces, changed, params).get(space, {}).get(path, ()):
            return False
    return len(still) == _TRIALS


def _filled(column: Any, key: int) -> Any:
    if isinstance(column, Ragged):
        return Ragged(np.full_like(column.flat, key), column.offsets)
    return np.full_like(column, key)


def values_of(column: Any) -> Array:
    """Returns the distinct whole numbers of a column; none where it holds something else."""
    flat = column.flat if isinstance(column, Ragged) else np.asarray(column)
    return np.unique(flat).astype(np.int64) if flat.dtype.kind in "iu" else np.empty(0, np.int64)


def _examples(train: FederatedData) -> tuple[Any, Batch]:
    """A few examples of the client that has most."""
    client = int(np.argmax(train.counts))
    own = train.client(client)
    at = np.arange(min(_EXAMPLES, int(train.counts[client])))
    return train.client_ids[client], {name: column[at] for name, column in own.items()}


def _moved(
    model: Model | TrainsItself, spaces: Mapping[str, KeySpace], own: Batch, params: Tree
) -> dict[str, dict[str, Array]]:
    """Key space -> parameter -> the rows that one step moves; nothing where no step can be made,
    of which clients will tell."""
    settings = ClientUpdate(client_lr=1.0, batch_size=_EXAMPLES)
    train = trainer_of(model, settings, {})
    if hasattr(train, "for_keys"):
        train = train.for_keys({name: space.all_keys() for name, space in spaces.items()})
    try:
        update = Report.of(train(params, own, np.random.default_rng(0))).update
        leaves = tree.flatten(update)
        found: dict[str, dict[str, Array]] = {name: {} for name in spaces}
        for part in model.layout.parts:
            for field in part.fields:
                for factor, axis in zip(part.product.factors, field.axes, strict=True):
                    leaf = np.moveaxis(np.asarray(leaves[field.path]), axis, 0)
                    moves = (leaf != 0).reshape(len(leaf), -1).any(axis=1)
                    found[factor.name][field.path] = np.flatnonzero(moves)
    except _OF_A_MODEL:
        return {}
    return found
