"""Holds examples that belong to clients, in arrays that may stay on disk.

All examples of a split lie in one array for each column, those of a client side by side, so a
client is a slice. Where arrays are memory maps, only the clients that are asked for are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, TypeAlias

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
        """The examples of client i, by column, without a copy."""
        at = slice(int(self.starts[i]), int(self.stops[i]))
        return {name: column[at] for name, column in self.columns.items()}

    def subset(self, clients: Sequence[int] | Array) -> FederatedData:
        """These clients alone, in this order; examples stay where they are."""
        at = np.asarray(clients, np.int64)
        ids = [self.client_ids[int(i)] for i in at]
        return FederatedData(ids, self.starts[at], self.stops[at], self.columns)

    def with_at_least(self, examples: int) -> FederatedData:
        """The clients that have this many examples."""
        return self.subset(np.flatnonzero(self.counts >= examples))


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
    """

    name: str
    kind: str
    splits: Mapping[str, FederatedData]
    names: Mapping[str, Sequence[str]]
    facts: Mapping[str, str] = field(default_factory=dict)
    inputs: Mapping[str, str] = field(default_factory=dict)


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
    ends = np.cumsum(data.counts)
    total = int(ends[-1]) if len(ends) else 0
    places = np.sort(rng.choice(total, limit, replace=False)) if limit < total else np.arange(total)
    owner = np.searchsorted(ends, places, side="right")
    at = data.starts[owner] + places - (ends - data.counts)[owner]
    return {name: column[at] for name, column in data.columns.items()}
