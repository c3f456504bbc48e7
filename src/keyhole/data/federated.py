"""Holds examples that belong to clients, in arrays that may stay on disk.

All examples of a split lie in one array for each column, those of a client side by side, so a
client is a slice. Where arrays are memory maps, only the clients that are asked for are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, Literal, TypeAlias

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InputError


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of unequal length; row i is `values[offsets[i]:offsets[i + 1]]`.

    Args:
        values: all rows, one after the other.
        offsets: int64 (rows + 1,), never falling.

    >>> rows = Ragged.of([[3, 1], [], [7]])
    >>> len(rows), rows[0].tolist(), rows[1:].lengths.tolist()
    (3, [3, 1], [0, 1])
    """

    values: Array
    offsets: Array

    @staticmethod
    def of(rows: Sequence[Any], dtype: Any = np.int32) -> Ragged:
        """Returns rows that are given one by one."""
        arrays = [np.asarray(row, dtype) for row in rows]
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        return Ragged(np.concatenate([np.empty(0, dtype), *arrays]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        """The length of each row, int64 (rows,)."""
        return np.diff(self.offsets)

    def __getitem__(self, at: int | slice | Array) -> Any:
        """Row `at`; or the rows of a slice, without a copy; or the rows of an index array."""
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            assert step == 1, "rows of a slice are neighbours"
            return Ragged(self.values, self.offsets[start : max(start, stop) + 1])
        if isinstance(at, np.ndarray):
            return self._gather(at)
        row = at + len(self) if at < 0 else at
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def _gather(self, rows: Array) -> Ragged:
        """These rows in this order, as a copy."""
        starts, lengths = self.offsets[rows], self.offsets[rows + 1] - self.offsets[rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        places = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[places], offsets)

    @property
    def flat(self) -> Array:
        """The values of these rows alone, one after the other."""
        return self.values[self.offsets[0] : self.offsets[-1]]

    @property
    def row_numbers(self) -> Array:
        """The row of each value of `flat`, int64."""
        return np.repeat(np.arange(len(self)), self.lengths)


Column: TypeAlias = Array | Ragged
"""One entry for each example: an array whose first axis counts them, or rows of unequal length."""


@dataclass(frozen=True, eq=False)
class FederatedData:
    """The clients of one split and their examples.

    Args:
        client_ids: a name for each client.
        starts: int64 (clients,), where the examples of a client begin.
        stops: int64 (clients,), where they end.
        columns: name -> all examples.

    >>> data = FederatedData.of(["ann", "ben"], [2, 1], {"label": np.array([4, 5, 6])})
    >>> len(data), data.num_examples, data.client(0)["label"].tolist()
    (2, 3, [4, 5])
    >>> data.subset([1]).client_ids
    ['ben']
    """

    client_ids: Sequence[str]
    starts: Array
    stops: Array
    columns: Mapping[str, Column]

    @staticmethod
    def of(
        client_ids: Sequence[str], counts: Sequence[int] | Array, columns: Mapping[str, Column]
    ) -> FederatedData:
        """Returns clients whose examples stand in the order of the clients, `counts` of each."""
        ends = np.cumsum(np.asarray(counts, np.int64))
        return FederatedData(client_ids, ends - np.asarray(counts, np.int64), ends, columns)

    def __len__(self) -> int:
        return len(self.client_ids)

    @property
    def counts(self) -> Array:
        """How many examples each client has, int64 (clients,)."""
        return self.stops - self.starts

    @property
    def num_examples(self) -> int:
        """How many examples all clients have."""
        return int(self.counts.sum())

    def client(self, i: int) -> dict[str, Column]:
        """Returns the examples of client i, by column, without a copy."""
        at = slice(int(self.starts[i]), int(self.stops[i]))
        return {name: column[at] for name, column in self.columns.items()}

    def subset(self, clients: Sequence[int] | Array) -> FederatedData:
        """These clients alone, in this order; examples stay where they are."""
        at = np.asarray(clients, np.int64)
        ids = [self.client_ids[int(i)] for i in at]
        return FederatedData(ids, self.starts[at], self.stops[at], self.columns)

    def compact(self) -> FederatedData:
        """Returns the same clients over columns that hold their examples alone, as a copy."""
        at = _rows(self)[1]
        columns = {name: column[at] for name, column in self.columns.items()}
        return FederatedData.of(self.client_ids, self.counts, columns)

    def with_min_examples(self, count: int) -> FederatedData:
        """Returns the clients that have this many examples or more."""
        return self.subset(np.flatnonzero(self.counts >= count))


@dataclass(frozen=True, eq=False)
class Dataset:
    """All splits of one source.

    The columns of each kind, pixels as in TensorFlow Federated's EMNIST (255 is paper, 0 is ink):

    - writers: "pixels" uint8 (n, 28, 28), "label" uint8 (n,) below 62.
    - posts: "words", "title", "tags" and "sentences", Ragged int32. Words and tags are numbered by
      the number of users who use them, the most common is 0, so a vocabulary of n words is the
      numbers below n. `sentences` are the lengths of the sentences of "words", in order.
    - ratings: "item" int32 (n,), "half_stars" uint8 (n,), 1..10.

    Args:
        name: such as "femnist" or "synthetic".
        kind: what the examples are: "writers", "posts", "ratings", or a word of your own.
        splits: "train", "test", and "validation" where the source has one.
        names: what numbers stand for: "words" and "tags" of posts, "classes" of writers, "items".
        facts: "source", "licence", "sha256" of the file, and whatever else explains the data.
        inputs: column -> the key space whose keys it names, for a `keyhole.front.task.Task`.
        target: the column that is predicted, where the data say so.
    """

    name: str
    kind: str
    splits: Mapping[str, FederatedData]
    names: Mapping[str, Sequence[str]]
    facts: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None

    @property
    def is_at_devices(self) -> bool:
        """Whether nobody's examples are here, to train on: devices hold them."""
        return "train" in self.splits and not len(self.splits["train"])

    def __repr__(self) -> str:
        if self.is_at_devices:
            keys = ", ".join(f"{column} -> {space}" for column, space in self.inputs.items())
            return f"<data set {self.name}: at devices; keys {keys}>"
        counts = ", ".join(
            f"{split} {len(data):,} clients with {int(data.counts.sum()):,} examples"
            for split, data in self.splits.items()
        )
        columns = next(iter(self.splits.values())).columns if self.splits else ()
        keys = ", ".join(f"{column} -> {space}" for column, space in self.inputs.items())
        told = [counts, f"columns {', '.join(columns)}", keys and f"keys {keys}"]
        return f"<data set {self.name}: {'; '.join(part for part in told if part)}>"

    def hold_out(
        self,
        share: float,
        by: Literal["client", "time", "within"] = "client",
        *,
        column: str | None = None,
        seed: int = 0,
        into: str = "test",
    ) -> Dataset:
        """Returns the data with a share of the training examples set aside in a split of their own.

        Args:
            share: above 0 and below 1.
            by: "client" sets whole clients aside, drawn at random; "time" the latest examples of
                all clients, by `column`; "within" some examples of each client that has two or
                more: its latest, where `column` is given, else drawn at random.
            column: of times, such as dates or seconds.
            seed: of what is drawn.
            into: the split that they go to.

        Raises:
            InputError: one side would be empty, the split is there already, or `column` is not one
                of times.

        >>> people = FederatedData.of(["a", "b"], [2, 4], {"day": np.array([1, 9, 2, 3, 4, 5])})
        >>> data = Dataset("mine", "own", {"train": people}, {})
        >>> found = data.hold_out(0.25, by="within", column="day").splits
        >>> found["train"].columns["day"].tolist(), found["test"].columns["day"].tolist()
        ([1, 2, 3, 4], [9, 5])
        """
        if into in self.splits or not 0 < share < 1:
            raise InputError(
                f"nothing can be held out: got a share of {share} for the split {into!r}; expected "
                f"a share between 0 and 1, and none of {', '.join(self.splits)}; choose another"
            )
        data, rng = self.splits["train"], np.random.default_rng(seed)
        if by == "client":
            kept, held = hold_out(data, share, rng)
        elif by == "time":
            kept, held = _cut_at(data, _latest(_times(data, column), share))
        elif by == "within":
            kept, held = _cut_at(data, _of_each(data, column, share, rng))
        else:
            raise InputError(
                f"data cannot be split so: got by={by!r}; expected client, time or within; choose "
                "one of them"
            )
        said = f"{share:g} by {by}" + (f" of {column}" if column else "") + f", seed {seed}"
        return replace(
            self,
            splits={**self.splits, "train": kept, into: held},
            facts={**self.facts, f"held out for {into}": said},
        )


def hold_out(
    data: FederatedData, share: float, rng: np.random.Generator
) -> tuple[FederatedData, FederatedData]:
    """Sets clients aside: those to train on, and those to validate on (20 % for EMNIST).

    Raises:
        InputError: one of the two would have no client.

    >>> data = FederatedData.of(list("abcde"), [1] * 5, {"label": np.arange(5)})
    >>> [len(part) for part in hold_out(data, 0.2, np.random.default_rng(0))]
    [4, 1]
    """
    kept = ceil((1 - share) * len(data) - 1e-9)
    if not 0 < kept < len(data):
        raise InputError(
            f"held-out clients leave nobody on one side: got {share} of {len(data)} clients; "
            "expected at least one client on each side; choose another share or more clients"
        )
    order = rng.permutation(len(data))
    return data.subset(np.sort(order[:kept])), data.subset(np.sort(order[kept:]))


def draw_pool(data: FederatedData, limit: int, rng: np.random.Generator) -> dict[str, Column]:
    """Examples of all clients in one pool, to evaluate on: all, or `limit` drawn at random.

    >>> data = FederatedData.of(["a", "b"], [2, 2], {"label": np.arange(4)})
    >>> draw_pool(data, 10, np.random.default_rng(0))["label"].tolist()
    [0, 1, 2, 3]
    """
    total = data.num_examples
    places = np.sort(rng.choice(total, limit, replace=False)) if limit < total else np.arange(total)
    at = _rows(data, places)[1]
    return {name: column[at] for name, column in data.columns.items()}


def _rows(data: FederatedData, places: Array | None = None) -> tuple[Array, Array]:
    """Whose example stands at each place, counted over all clients, and its row in the columns."""
    ends = np.cumsum(data.counts)
    places = np.arange(data.num_examples) if places is None else places
    owner = np.searchsorted(ends, places, side="right")
    return owner, data.starts[owner] + places - (ends - data.counts)[owner]


_WHOLE_FLOATS = 2**24  # from here on a float32 passes over whole numbers


def _times(data: FederatedData, column: str | None) -> Array:
    """The time of each example, over all clients; InputError where a column has none."""
    found = data.columns.get(column or "")
    if not isinstance(found, np.ndarray) or found.ndim != 1:
        raise InputError(
            f"no column of times: got {column!r}; expected a column with one number for each "
            f"example, of {', '.join(data.columns)}; pass column=NAME"
        )
    times = np.asarray(found[_rows(data)[1]])
    if times.dtype.kind == "f" and not (np.abs(times) < _WHOLE_FLOATS).all():
        raise InputError(
            f"column {column!r} holds no exact times: got {times.dtype} up to {times.max()}; "
            f"expected dates, whole numbers, or floats below {_WHOLE_FLOATS}; convert it"
        )
    return times


def _latest(times: Array, share: float) -> Array:
    """Whether each example is one of the latest; those of one time are on one side."""
    cut = np.sort(times)[min(ceil((1 - share) * len(times) - 1e-9), len(times) - 1)]
    return np.asarray(times >= cut)


def _of_each(
    data: FederatedData, column: str | None, share: float, rng: np.random.Generator
) -> Array:
    """Whether each example is held out: of n of a client, n * share, and 1 or more if n > 1."""
    owner, _ = _rows(data)
    by = rng.random(len(owner)) if column is None else _times(data, column)
    counts = data.counts
    held = np.where(counts > 1, np.maximum(1, np.floor(counts * share + 1e-9)), 0)
    order = np.lexsort((by, owner))  # stable: examples of one time stay in order
    rank = np.empty(len(owner), np.int64)
    rank[order] = np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]
    return np.asarray(rank >= (counts - held)[owner])


def _cut_at(data: FederatedData, is_held: Array) -> tuple[FederatedData, FederatedData]:
    """Examples that are kept, and those held out; a client is in a split if it has one there."""
    if is_held.all() or not is_held.any():
        raise InputError(
            f"held-out examples leave nothing on one side: got {int(is_held.sum())} of "
            f"{len(is_held)} examples; expected some on each side; choose another share or column"
        )
    owner, at = _rows(data)
    sides = []
    for side in (~is_held, is_held):
        columns = {name: column[at[side]] for name, column in data.columns.items()}
        counts = np.bincount(owner[side], minlength=len(data))
        whole = FederatedData.of(data.client_ids, counts, columns)
        sides.append(whole.with_min_examples(1))
    return sides[0], sides[1]
