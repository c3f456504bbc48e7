"""Holds the training state: one table for each part of a layout, an optimizer, a step count.

The cost of a step depends on what was selected: no row is read or written that no client chose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole import tree
from keyhole.arrays import Array, KeyArray, Tree, empty_on_line
from keyhole.errors import InputError, ShapeError
from keyhole.primitives.layout import ClientKeys, KeysBySpace, Layout, Part, select_rows
from keyhole.server.initial import Initial
from keyhole.server.optimizers import Optimizer, optimizer_of
from keyhole.server.row_sums import RowUpdate, check_float32, check_updates
from keyhole.server.rows import take_columns
from keyhole.server.tables import DenseTable, LazyTable, RowInitial, Table

_MAX_NUMBERS = 1 << 28  # 1 GiB of float32: beyond, a full model is more likely a mistake
_MAX_STEPS = 2**31 - 1  # a row's step is int32


@dataclass
class ServerState:
    """What the server holds between rounds. Made by `ServerState.dense` or `ServerState.lazy`.

    Args:
        layout: the model and its cuts; all parameters float32.
        tables: one for each part, in the order of `layout.parts`.
        optimizer: applied to all of them.
        steps: how many steps were made.
        threads: how many threads may share a large job; the bytes do not depend on it.

    >>> from keyhole.primitives.layout import Cut
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> from keyhole.server.optimizers import SGD
    >>> word = KeySpace("word", 10**9)
    >>> like = {"w": np.broadcast_to(np.float32(0), (10**9, 2))}
    >>> layout = Layout.of(like, Cut(word, {"w": 0}))
    >>> state = ServerState.lazy(layout, SGD(lr=0.5))
    >>> state.step([RowUpdate(np.array([7]), np.ones((1, 2), np.float32))])
    >>> state.select(word.keys([3, 7]))["w"]
    array([[ 0. ,  0. ],
           [-0.5, -0.5]], dtype=float32)
    """

    layout: Layout
    tables: tuple[Table, ...]
    optimizer: Optimizer
    steps: int = 0
    threads: int = 1

    @staticmethod
    def dense(layout: Layout, model: Tree, optimizer: Optimizer, threads: int = 1) -> ServerState:
        """Returns a state that holds every row of `model`, copied.

        Raises:
            ShapeError: the model does not fit the layout, or is not float32.
        """
        check_float32(_dtypes(layout))
        layout.check(model)
        leaves = {path: np.asarray(leaf) for path, leaf in tree.flatten(model).items()}
        check_float32({path: leaf.dtype for path, leaf in leaves.items()})
        tables = tuple(
            DenseTable(_own_rows(part, leaves), optimizer_of(optimizer, part))
            for part in layout.parts
        )
        return ServerState(layout, tables, optimizer, threads=threads)

    @staticmethod
    def lazy(
        layout: Layout,
        optimizer: Optimizer,
        initial: Mapping[str, Initial] | None = None,
        seed: int = 0,
        threads: int = 1,
    ) -> ServerState:
        """Returns a state whose rows exist once they are touched.

        Args:
            layout: the model and its cuts; only shapes are read.
            optimizer: applied to every part.
            initial: parameter path -> how it starts; those not named start at zero.
            seed: of the initial values, from 0 to 2^64 - 1.
            threads: how many threads may share a large job.

        Raises:
            ShapeError: a parameter is not float32.
            InputError: `initial` names a parameter that does not exist.
        """
        check_float32(_dtypes(layout))
        starts = dict(initial or {})
        paths = {field.path for part in layout.parts for field in part.fields}
        if starts.keys() - paths:
            raise InputError(
                "no such parameter to initialize: got "
                f"{', '.join(map(repr, sorted(starts.keys() - paths)))}; expected "
                f"{', '.join(map(repr, sorted(paths)))}; name paths of the model"
            )
        tables = tuple(
            LazyTable(
                part.space.num_keys,
                RowInitial.of(part, starts, (seed + i) % 2**64),
                optimizer_of(optimizer, part),
            )
            for i, part in enumerate(layout.parts)
        )
        return ServerState(layout, tables, optimizer, threads=threads)

    @property
    def nbytes(self) -> int:
        """Memory set aside for tables and optimizer state."""
        return sum(table.nbytes for table in self.tables)

    def rows(self, part: int, keys: KeyArray) -> NDArray[np.float32]:
        """Returns the current rows of one part.

        Args:
            part: its place in `layout.parts`.
            keys: (m,) int64 of the part's key space; order and repeats are kept.

        Returns:
            (m, width) float32: the fields of each slice side by side.
        """
        return self.tables[part].rows(_plain(keys), self.steps, self.threads)

    def lend(self, keys: ClientKeys) -> Tree:
        """Returns what `select` does, until the next step: leaves may be read-only views of tables,
        where a client takes every row. Others are C-contiguous."""
        chosen, leaves = self.layout.keys_by_space(keys), dict[str, Array]()
        for place, part in enumerate(self.layout.parts):
            leaves |= self._lend_part(place, part, chosen)
        return tree.unflatten(self.layout.structure, leaves)

    def _lend_part(self, place: int, part: Part, chosen: KeysBySpace) -> dict[str, Array]:
        table, keys = self.tables[place], part.keys_of(chosen).array
        counts = [len(chosen[factor.name]) for factor in part.product.factors]
        seen = table.view(keys) if isinstance(table, DenseTable) else None
        if seen is not None:
            return part.from_rows(seen, counts)
        blocks = part.blocks
        found = None if blocks is None else table.current(_plain(keys))
        if found is None or blocks is None:
            return part.from_rows(self.rows(place, keys), counts)
        leaves = {}
        for (path, start, before, behind), field in zip(blocks, part.fields, strict=True):
            leaf = empty_on_line(field.client_shape(counts), np.float32)
            take_columns(*found, start, leaf.reshape(before, len(keys), behind))
            leaves[path] = leaf
        return leaves

    def select(self, keys: ClientKeys) -> Tree:
        """Returns one client's sub-model: the bytes of `Layout.select` on the full model.

        Raises:
            KeySpaceError: keys are missing, or of another key space.
        """
        return select_rows(self, keys)

    def step(self, updates: Sequence[RowUpdate]) -> None:
        """Makes one optimizer step. Untouched rows are neither read nor written.

        Args:
            updates: one for each part, in the order of `layout.parts`.

        Raises:
            ShapeError, KeySpaceError, NotFiniteError: an update cannot be used; nothing changed.
        """
        self.apply(self.prepare(updates), updates)

    def prepare(self, updates: Sequence[RowUpdate]) -> list[KeyArray]:
        """Checks the updates and makes room for their rows: the part of a step that can fail.

        No value changes. Returns what `apply` takes; in between, the step can be made durable.
        """
        check_updates(self.layout, updates)
        if self.steps >= _MAX_STEPS:
            raise InputError(
                f"too many steps: got {self.steps + 1}; expected {_MAX_STEPS}; start a new state"
            )
        return [t.reserve(_plain(u.keys)) for t, u in zip(self.tables, updates, strict=True)]

    def apply(self, slots: Sequence[KeyArray], updates: Sequence[RowUpdate]) -> None:
        """Makes the rest of the step, once for each `prepare`."""
        for table, at, update in zip(self.tables, slots, updates, strict=True):
            table.step(at, _plain(update.rows), self.steps + 1, self.threads)
        self.steps += 1

    def changed_since(self, step: int) -> tuple[KeyArray | None, ...]:
        """Returns which rows may read differently now than after `step`.

        Rows whose momentum still moves them count, for as long as the optimizer's horizon.

        Args:
            step: from 0 to `steps`.

        Returns:
            For each part the keys, ascending, or None where every row may differ.

        Raises:
            InputError: no such step was made.
        """
        if not 0 <= step <= self.steps:
            raise InputError(
                f"no such step: got {step}; expected 0..{self.steps}; ask for a past step"
            )
        if step == self.steps:
            return tuple(np.empty(0, np.int64) for _ in self.tables)
        if self.optimizer.moves_all and step < self.optimizer.horizon:
            return tuple(None for _ in self.tables)
        oldest = max(0, step - self.optimizer.horizon)
        return tuple(table.touched_after(oldest) for table in self.tables)

    def model(self) -> Tree:
        """Returns the full model, every row caught up.

        Raises:
            ShapeError: lazy tables would have more than 2^28 numbers; select from them instead.
        """
        lazy = [table for table in self.tables if not isinstance(table, DenseTable)]
        numbers = sum(table.num_keys * table.width for table in lazy)
        if numbers > _MAX_NUMBERS:
            raise ShapeError(
                f"the full model of lazy tables is too large to build: got {numbers} numbers; "
                f"expected {_MAX_NUMBERS}; select the keys that are needed"
            )
        return self.select([space.all_keys() for space in self.layout.spaces])


def _own_rows(part: Part, leaves: Mapping[str, Array]) -> Array:
    """A copy of the rows of a model, which JAX reads where it lies."""
    rows = empty_on_line((part.space.num_keys, part.slice_size), np.float32)
    return part.to_rows(leaves, out=rows)


def _plain(array: Array) -> Array:
    """The array if kernels take it as it is; read-only ones would need a second compilation."""
    return array if array.flags.carray else np.array(array, order="C")


def _dtypes(layout: Layout) -> dict[str, np.dtype[Any]]:
    return {field.path: field.dtype for part in layout.parts for field in part.fields}
