"""Declares data that devices hold, and reads those of one device, or a held-out file.

The trainer knows what the columns mean, and has no example to train on. Each device brings its own:
a file of one table, a folder of such files, or what a function of its operator returns. A trainer
may have such a file, too, to measure the model with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.data.federated import Dataset, FederatedData
from keyhole.data.own import OWN, from_arrays
from keyhole.data.tables import READERS, read_tables
from keyhole.data.values import count_rows, flat_values, row_of_value
from keyhole.errors import InputError
from keyhole.identity import Ref
from keyhole.parts import resolve, running

_ME = "this device"
_HELD_OUT = "the held-out examples"


def at_devices(*, inputs: Mapping[str, str], target: str | None = None, name: str = OWN) -> Dataset:
    """Returns the declaration of data that devices hold, for a `Task` that they train.

    Args:
        inputs: column -> the key space whose keys it names. Devices bring numbers: texts would be
            numbered by each device in its own way. Other columns that the loss reads, devices bring
            under the names that it has for them, undeclared.
        target: the column that is predicted.
        name: of the dataset.

    >>> at_devices(inputs={"item": "item"}, target="label").is_at_devices
    True
    """
    nobody = FederatedData.of([], [], {})
    splits = {"train": nobody, "test": nobody}
    return Dataset(name, OWN, splits, {}, inputs=dict(inputs), target=target)


def with_held_out(declared: Dataset, source: str | None) -> Dataset:
    """Returns a declaration whose test split are the trainer's own examples, which a model is
    measured with; what it was where there are none.

    Args:
        source: of the examples, as of `own_examples`.

    Raises:
        InputError: the data are no declaration of what devices hold, or as of `own_examples`.
    """
    if source is None:
        return declared
    if not declared.is_at_devices:
        raise InputError(
            f"held-out examples go with data at devices: got {source} beside {declared.name}; "
            "expected data of kh.data.at_devices; call .hold_out(0.1) on data that are here"
        )
    found = own_examples(source, declared, owner=_HELD_OUT)
    facts = {**declared.facts, "held_out": found.facts["sha256"]}
    return replace(declared, splits={**declared.splits, "test": found.splits["train"]}, facts=facts)


def own_examples(source: str, declared: Dataset, share: float = 0.0, owner: str = _ME) -> Dataset:
    """Returns the examples of one device, as the train split of a dataset; its test split has those
    that are held out.

    Args:
        share: of the examples, drawn at random, that it does not train on and measures with; a
            single example is trained on.
        owner: whose examples they are, in errors.
        source: a file (.csv, .jsonl, .npz or .parquet), a folder of such files, which hold one
            table together, or "module:NAME" of the columns, or of a function that returns them.
        declared: what the columns mean.

    Raises:
        InputError: there is no such file, a column is missing, or the data are not what the
            columns of the declaration are.
    """
    columns = _columns(source)
    needed = [*declared.inputs, *([declared.target] if declared.target else [])]
    if missing := [each for each in needed if each not in columns]:
        raise InputError(
            f"the data of {owner} lack a column: got {source} with "
            f"{', '.join(columns) or 'none'}; expected {', '.join(missing)} as well; name the "
            "columns as the task does"
        )
    rows = count_rows(columns[needed[0]]) if needed else 0
    if not rows:
        raise InputError(
            f"no examples of {owner}: got {source} with {', '.join(columns)} and no rows; expected "
            "one or more; bring some"
        )
    made = from_arrays(
        columns,
        client=[owner] * rows,
        inputs=declared.inputs,
        target=declared.target,
        name=declared.name,
    )
    if made.names:
        raise InputError(
            f"the data of {owner} have texts, which every device would number in its own way: "
            f"got texts for {', '.join(made.names)}; expected numbers; number them by a list that "
            "all devices share"
        )
    _check_finite(made.splits["train"], source)
    splits = {"train": made.splits["train"], "test": FederatedData.of([], [], {})}
    if share and rows > 1:
        splits = dict(made.hold_out(share, "within").splits)
    return Dataset(
        declared.name,
        declared.kind,
        splits,
        declared.names,
        made.facts,
        inputs=declared.inputs,
        target=declared.target,
    )


def _check_finite(own: FederatedData, source: str) -> None:
    """Raises InputError where a column has NaN or infinity: the update would be of no use."""
    for name, column in own.columns.items():
        is_bad = ~np.isfinite(flat_values(column))
        if is_bad.any():
            at = int(np.argmax(is_bad))
            raise InputError(
                f"column {name!r} of {source} has no number in row "
                f"{int(row_of_value(column)[at]) + 1}, counted from 1: got "
                f"{flat_values(column)[at]}; expected finite numbers; mend it, or leave out the "
                "row or the column"
            )


def _columns(source: str) -> Mapping[str, Any]:
    """The columns of a file, a folder, or a function."""
    if Ref(source).is_own:
        named = resolve(source)
        with running(f"data {source}"):
            found = named() if callable(named) else named
        if not isinstance(found, Mapping) or not found:
            raise InputError(
                f"{source} names no examples: got a {type(found).__name__}; expected a dict of "
                "column and one entry for each example; return such a dict"
            )
        return {str(name): column for name, column in found.items()}
    path = Path(source)
    files = [path]
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in READERS)
        if not files:
            raise InputError(
                f"no examples in folder {path}: got no file that can be read; expected "
                f"{', '.join(READERS)}; put the examples there"
            )
    if not files[0].exists():
        raise InputError(
            f"no examples: got no file {path}; expected a file of {', '.join(READERS)}, a folder "
            "of them, or module:NAME; check the path"
        )
    return read_tables(files, lambda done, total: None)
