"""Deals examples that belong to nobody out to clients, and draws what each client got."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Dataset
from keyhole.data.own import OWN, from_arrays
from keyhole.data.values import count_rows, read_column
from keyhole.errors import InputError
from keyhole.files import storage_errors
from keyhole.parts import near_miss

How = Literal["iid", "size", "dirichlet"]

_SHOWN = 100  # clients that a figure has room for


def partition(
    columns: Mapping[str, Any],
    *,
    clients: int = 100,
    how: How = "iid",
    alpha: float = 0.5,
    label: str = "label",
    seed: int = 0,
    inputs: Mapping[str, str] | None = None,
    target: str | None = None,
    name: str = OWN,
) -> Dataset:
    """Returns the examples of clients, dealt out from a table without clients.

    Args:
        columns: as in `from_arrays`, without a column of clients.
        clients: how many; each gets one example or more.
        how: "iid" deals equal numbers of examples at random; "size" at random too, with the
            clients' shares of all examples drawn from Dirichlet(alpha); "dirichlet" draws, for each
            label, the clients' shares of its examples from Dirichlet(alpha).
        alpha: above 0; the smaller, the more clients differ.
        label: the column of "dirichlet".
        seed: of what is drawn.
        inputs: as in `from_arrays`, and so are `target` and `name`.

    Raises:
        InputError: an argument is out of range, or what `from_arrays` refuses.

    >>> table = {"x": np.arange(6), "label": [0, 0, 0, 1, 1, 1]}
    >>> partition(table, clients=3).splits["train"].counts.tolist()
    [2, 2, 2]

    Reference: Hsu, Qi and Brown, Measuring the effects of non-identical data distribution for
    federated visual classification, 2019 (arXiv:1909.06335).
    """
    rows = max((count_rows(values) for values in columns.values()), default=0)
    if not 1 <= clients <= rows:
        raise InputError(
            f"examples cannot be dealt out: got {clients} clients for {rows} examples; expected "
            f"1..{rows} clients; ask for fewer, or bring more data"
        )
    if not 0 < alpha < np.inf:
        raise InputError(
            f"alpha is out of range: got {alpha}; expected a number above 0; 0.1 is uneven, 100 "
            "is nearly even"
        )
    rng = np.random.default_rng(seed)
    owner = _deal(columns, rows, clients, how, alpha, label, rng)
    order = np.argsort(owner, kind="stable")  # so that clients come in the order of their numbers
    names = np.array([f"client {number}" for number in range(clients)])
    table = {each: _taken(each, values, order) for each, values in columns.items()}
    made = from_arrays(table, client=names[owner[order]], inputs=inputs, target=target, name=name)
    said = how if how == "iid" else f"{how}, alpha {alpha:g}"
    said += f" of {label}" if how == "dirichlet" else ""
    return replace(made, facts={**made.facts, "partition": f"{said}, seed {seed}"})


def _taken(name: str, values: Any, order: Array) -> Any:
    """A column in another order; one of another length as it is, which `from_arrays` refuses."""
    if count_rows(values) != len(order):
        return values
    return read_column(name, values, lambda row: f"row {row}")[order]


def _deal(
    columns: Mapping[str, Any],
    rows: int,
    clients: int,
    how: str,
    alpha: float,
    label: str,
    rng: np.random.Generator,
) -> Array:
    """The client of each row, int64."""
    if how == "iid":
        return rng.permutation(np.arange(rows) % clients)
    if how == "size":
        return _nobody_empty(rng.permutation(_shares(rows, clients, alpha, rng)), clients)
    if how == "dirichlet":
        classes = _classes(columns, label)
        owner = np.empty(rows, np.int64)
        for each in range(classes.max() + 1):
            at = rng.permutation(np.flatnonzero(classes == each))
            owner[at] = _shares(len(at), clients, alpha, rng)
        return _nobody_empty(owner, clients)
    raise InputError(
        f"data cannot be dealt out so: got how={how!r}; expected {', '.join(get_args(How))}; "
        f"{near_miss(how, get_args(How))}"
    )


def _shares(rows: int, clients: int, alpha: float, rng: np.random.Generator) -> Array:
    """The client of each of some rows, rising, in shares drawn from a Dirichlet distribution."""
    ends = np.cumsum(rng.dirichlet(np.full(clients, alpha)))
    cuts = np.rint(ends[:-1] / ends[-1] * rows).astype(np.int64)
    return np.repeat(np.arange(clients), np.diff(np.concatenate([[0], cuts, [rows]])))


def _nobody_empty(owner: Array, clients: int) -> Array:
    """Gives each client without an example the last one of the client that has most."""
    counts = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(counts == 0).tolist():
        rich = int(np.argmax(counts))
        owner[np.flatnonzero(owner == rich)[-1]] = empty
        counts[rich] -= 1
        counts[empty] = 1
    return owner


def _classes(columns: Mapping[str, Any], label: str) -> Array:
    """The label of each row as a number from 0."""
    if label not in columns:
        raise InputError(
            f"label names a column that is not there: got {label!r}; expected one of "
            f"{', '.join(columns)}; {near_miss(label, columns)}"
        )
    found = read_column(label, columns[label], lambda row: f"row {row}")
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        raise InputError(
            f"column {label!r} holds no labels: got several values in a row; expected one for each "
            "example; name another column"
        )
    return np.unique(found, return_inverse=True)[1]


def plot_partition(dataset: Dataset, label: str, path: str | Path) -> Path:
    """Draws how many examples of each label each client has to train on; returns the file.

    Args:
        label: a column with one label for each example.
        path: of a .png, .pdf or .svg file. Of more than 100 clients the first 100 are drawn.

    Raises:
        InputError: there is no such column, or no such kind of file.
    """
    data, path = dataset.splits["train"], Path(path)
    classes = _classes(data.columns, label)
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise InputError(
            f"cannot draw to {path}: got a name that ends in {path.suffix!r}; expected .png, .pdf "
            "or .svg; rename it"
        )
    shown = min(len(data), _SHOWN)
    counts = np.zeros((classes.max() + 1, shown), np.int64)
    for number in range(shown):
        own = classes[int(data.starts[number]) : int(data.stops[number])]
        counts[:, number] = np.bincount(own, minlength=len(counts))
    values = np.unique(np.asarray(data.columns[label])).tolist()
    names = dataset.names.get(dataset.inputs.get(label, label))
    labels = [names[int(v)] if names and int(v) < len(names) else f"{v:g}" for v in values]
    with storage_errors(path, "write"):
        _draw(counts, labels, label, len(data)).savefig(path, dpi=150, bbox_inches="tight")
    return path


def _draw(counts: Array, labels: list[str], label: str, clients: int) -> Any:
    """Bars of the clients' sizes above a map of their labels."""
    from matplotlib.figure import Figure  # slow to import, and needed here alone

    height = min(9.0, 2.2 + 0.2 * len(labels))
    figure = Figure(figsize=(7.5, height), layout="constrained")
    sizes, shares = figure.subplots(
        2, 1, sharex=True, height_ratios=[1.0, max(1.2, height - 1.6)], squeeze=True
    )
    numbers = np.arange(counts.shape[1])
    sizes.bar(numbers, counts.sum(axis=0), width=0.85, color="#4477aa")
    sizes.set_ylabel("examples")
    sizes.spines[["top", "right"]].set_visible(False)
    portion = counts / np.maximum(1, counts.sum(axis=0))
    drawn = shares.imshow(portion, aspect="auto", cmap="Blues", vmin=0.0, interpolation="nearest")
    few = np.unique(np.linspace(0, len(labels) - 1, min(len(labels), 26)).astype(int))
    shares.set_yticks(few, [labels[at] for at in few], fontsize=8)
    shares.set_ylabel(label)
    hidden = f", the first {counts.shape[1]} of {clients}" if counts.shape[1] < clients else ""
    shares.set_xlabel(f"client{hidden}")
    figure.colorbar(drawn, ax=shares, label="share of the client's examples", pad=0.02)
    return figure
