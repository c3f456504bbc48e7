"""Holds server tables in the memory of several nodes, each a range of keys.

A `ServerState` takes sharded tables as it takes its own: reads and steps go to the shards that hold
the keys, all of them at once, so a round costs what was selected. Every row is stepped and read by
the same code as in one process, hence the same bytes for any number of shards.

What lasts: shards hold rows in memory and nothing else. A run with a directory writes each step to
its log before the shards apply it, so a run that loses a shard stops with an error and goes on from
its directory. Snapshots, and going on, bring rows through this process a piece at a time, never
more than `max_bytes`; the files have the bytes of a state in one process, and either can go on
from the other's.

    with Shards(8, address="10.0.0.1:6379") as shards:
        run = start_run(shards.hold(state), clients, plan, directory)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import Array, KeyArray
from keyhole.engines.ray.crew import connected
from keyhole.errors import InputError, WorkerError
from keyhole.server.optimizers import Optimizer, optimizer_of
from keyhole.server.snapshots import (
    PIECE,
    Fill,
    StoredArray,
    dump_table,
    fill_in_pieces,
    initial_of,
    rows_of_piece,
    stored_arrays,
)
from keyhole.server.state import ServerState
from keyhole.server.tables import DenseTable, LazyTable, Table, check_keys

_NONE = np.empty(0, np.int64)
_NO_NUMBER = 2**63 - 1  # of a row that does not exist; above all others


class _Held:
    """One table's rows in a shard: those of the keys from `first` up to but without `last`. The
    table is dense with rows counted from 0, or lazy with its keys."""

    def begin(
        self,
        first: int,
        last: int,
        described: Mapping[str, Any],
        num_keys: int,
        width: int,
        optimizer: Optimizer,
    ) -> None:
        """Makes room for the rows, which `fill` brings."""
        self.first, self.last = first, last
        self._slots, self._numbers = _NONE, _NONE
        self.table: DenseTable | LazyTable
        if described["kind"] == "dense":
            self.table = DenseTable(np.empty((last - first, width), np.float32), optimizer)
        else:
            self.table = LazyTable(num_keys, initial_of(described), optimizer)

    @property
    def numbers(self) -> Array:
        """Of a lazy table, for each row one that grows with when it was made, over all shards."""
        return self._numbers[: len(self.table)] if isinstance(self.table, LazyTable) else _NONE

    @property
    def offset(self) -> int:
        """What a key has above its row's place in the table's own counting."""
        return self.first if isinstance(self.table, DenseTable) else 0

    def fill(self, name: str, start: int, piece: Array) -> None:
        """Takes its own rows out of a piece that begins at row `start` of all."""
        stop = start + len(piece)
        if isinstance(self.table, DenseTable):
            low, high = max(start, self.first), min(stop, self.last)
            own = stored_arrays(self.table)[name][low - self.first : high - self.first]
            own[:] = piece[low - start : high - start]
        elif name == "keys":
            mine = np.flatnonzero((piece >= self.first) & (piece < self.last))
            self._claim(piece[mine], start + mine)
        else:
            low, high = np.searchsorted(self.numbers, [start, stop])
            stored_arrays(self.table)[name][low:high] = piece[self.numbers[low:high] - start]

    def _claim(self, keys: KeyArray, numbers: Array) -> KeyArray:
        """Slots of keys; rows that are made for it get the number of the first that asks."""
        if isinstance(self.table, DenseTable):
            return self.table.reserve(keys - self.offset)
        before = len(self.table)
        slots = self.table.reserve(keys)
        made = slots >= before
        _, first = np.unique(slots[made], return_index=True)
        if len(self.table) > len(self._numbers):  # doubled, so that a number is copied about once
            self._numbers = np.resize(self._numbers, 2 * len(self.table))
        self._numbers[before : len(self.table)] = numbers[made][first]
        return slots

    def rows(self, keys: KeyArray, now: int, threads: int) -> NDArray[np.float32]:
        """See `Table.rows`."""
        return self.table.rows(keys - self.offset, now, threads)

    def reserve(self, keys: KeyArray, numbers: Array) -> None:
        """See `Table.reserve`; slots stay here, for the step that follows."""
        self._slots = self._claim(np.array(keys), numbers)

    def step(self, rows: Array, now: int, threads: int) -> None:
        """See `Table.step`; what Ray hands over cannot be written to, which kernels insist on."""
        self.table.step(self._slots, np.array(rows), now, threads)

    def touched_after(self, step: int) -> KeyArray:
        """See `Table.touched_after`."""
        return self.table.touched_after(step) + self.offset

    def nbytes(self) -> int:
        """See `Table.nbytes`."""
        return self.table.nbytes + self.numbers.nbytes

    def shapes(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Type and shape of what is stored, by name, in order."""
        return {name: (a.dtype, a.shape) for name, a in stored_arrays(self.table).items()}

    def dump(self, name: str, first: int, last: int) -> Array:
        """Returns some rows."""
        return stored_arrays(self.table)[name][first:last]

    def number_of(self, row: int) -> int:
        """Returns the number of a row, above all others where there is no such row."""
        return int(self.numbers[row]) if row < len(self.numbers) else _NO_NUMBER

    def dump_below(self, name: str, first: int, below: int) -> tuple[Array, Array]:
        """Rows from `first` on whose numbers are below `below`, and their numbers."""
        last = int(np.searchsorted(self.numbers, below))
        return self.numbers[first:last], self.dump(name, first, last)


class Shard:
    """Some rows of each table, in an actor."""

    def __init__(self) -> None:
        self._tables: dict[int, _Held] = defaultdict(_Held)

    def ask(self, place: int, method: str, *given: Any) -> Any:
        """Calls a method of what is held of the table at a place."""
        return getattr(self._tables[place], method)(*given)


class Shards:
    """Actors that hold the rows of tables; a context that ends them, and with them the rows.

    Args:
        count: how many, spread over the nodes.
        address: of a cluster; None starts Ray on this machine, unless the process is connected.
        max_bytes: of rows that are on their way to or from the shards at once, when they move.

    Raises:
        InputError: Ray is not installed, or `count` is below 1.
        WorkerError: the cluster does not answer.
    """

    def __init__(self, count: int, *, address: str | None = None, max_bytes: int = PIECE) -> None:
        if count < 1:
            raise InputError(
                f"number of shards is out of range: got {count}; expected 1 or more; pass one"
            )
        self._max_bytes = max_bytes
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(address))
            # No CPU of their own: they work while clients wait, and clients while they wait.
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            make = self._ray.remote(Shard).options(**options).remote
            self._actors = [make() for _ in range(count)]
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the shards; what they held is gone."""
        self._stack.close()

    def hold(self, state: ServerState) -> ServerState:
        """Returns a state whose tables are those of `state`, moved to the shards.

        A lazy state moves before it has rows, however many keys it has. Tables of fewer keys than
        shards, such as what is not cut, stay in this process. A state that was held before is let
        go of by its shards.

        Args:
            state: taken over; let go of it to free its memory.
        """
        tables = tuple(
            self._move(place, table, optimizer_of(state.optimizer, state.layout.parts[place]))
            if table.num_keys >= len(self._actors)
            else table
            for place, table in enumerate(state.tables)
        )
        return replace(state, tables=tables)

    def _move(self, place: int, table: Table, optimizer: Optimizer) -> ShardedTable:
        count = len(self._actors)
        bounds = np.array([table.num_keys * i // count for i in range(count + 1)], np.int64)
        sharded = ShardedTable(
            self._ray, self._actors, place, bounds, table.width, optimizer, self._max_bytes
        )
        described, arrays = dump_table(table)
        fill = sharded.refill(described, {name: a.shape for name, a in arrays.items()})
        for name, array in arrays.items():
            fill_in_pieces(fill, name, array.pieces())
        return sharded

    def _end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


@dataclass(eq=False, repr=False)
class ShardedTable:
    """A table whose rows are ranges of keys in actors; made by `Shards.hold`."""

    _ray: Any
    _actors: Sequence[Any]
    _place: int
    _bounds: KeyArray
    width: int
    _optimizer: Optimizer
    _max_bytes: int
    _described: dict[str, Any] = field(default_factory=dict)
    _reserved: int = 0

    @property
    def num_keys(self) -> int:
        """Implements `Table.num_keys`."""
        return int(self._bounds[-1])

    @property
    def nbytes(self) -> int:
        """Implements `Table.nbytes`: memory of all shards."""
        return sum(self.ask_all("nbytes", [()] * len(self._actors)))

    def rows(self, keys: KeyArray, now: int, threads: int = 1) -> NDArray[np.float32]:
        """Implements `Table.rows`; asks the shards that hold some of the keys."""
        check_keys(keys, self.num_keys)
        out = np.empty((len(keys), self.width), np.float32)
        asked = self._split(keys)
        found = self._ask("rows", {i: (keys[at], now, threads) for i, at in asked.items()})
        for shard, at in asked.items():
            out[at] = found[shard]
        return out

    def current(self, keys: KeyArray) -> None:
        """Implements `Table.current`: no row is here."""

    def reserve(self, keys: KeyArray) -> KeyArray:
        """Implements `Table.reserve`: shards make room; slots are the keys themselves."""
        first = self._reserved
        self._reserved += len(keys)
        cuts = self._split(keys)
        self._ask("reserve", {shard: (keys[at], first + at) for shard, at in cuts.items()})
        return keys

    def step(self, slots: KeyArray, rows: NDArray[np.float32], now: int, threads: int = 1) -> None:
        """Implements `Table.step`."""
        cuts = self._split(slots)
        self._ask("step", {shard: (rows[at], now, threads) for shard, at in cuts.items()})

    def touched_after(self, step: int) -> KeyArray:
        """Implements `Table.touched_after`: shards hold ascending ranges."""
        found = self.ask_all("touched_after", [(step,)] * len(self._actors))
        return np.concatenate([np.asarray(keys, np.int64) for keys in found])

    def dump(self) -> tuple[dict[str, Any], dict[str, StoredArray]]:
        """Implements `RemoteTable.dump`: rows of a lazy table in the order in which they were made,
        in whatever shard."""
        held = self.ask_all("shapes", [()] * len(self._actors))
        stored = {}
        pieces = self._in_order if "keys" in held[0] else self._side_by_side
        for name, (dtype, shape) in held[0].items():
            counts = [own[name][1][0] for own in held]
            whole = (sum(counts), *shape[1:])
            rows = rows_of_piece(dtype, whole, self._max_bytes)
            stored[name] = StoredArray(dtype, whole, partial(pieces, name, counts, rows))
        return dict(self._described), stored

    def refill(self, described: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Fill:
        """Implements `RemoteTable.refill`."""
        is_dense = described["kind"] == "dense"
        count, width = shapes["values"]
        if width != self.width or (is_dense and count != self.num_keys):
            raise ValueError(f"{count} rows of {width} numbers")
        spans = zip(self._bounds[:-1].tolist(), self._bounds[1:].tolist(), strict=True)
        given = (described, self.num_keys, self.width, self._optimizer)
        self.ask_all("begin", [(first, last, *given) for first, last in spans])
        self._described = dict(described)
        self._reserved = count
        return self._fill

    def _fill(self, name: str, start: int, piece: Array) -> None:
        """Hands on what fits into a piece of our own; shards take from it what is theirs."""
        rows = rows_of_piece(piece.dtype, piece.shape, self._max_bytes)
        for at in range(0, len(piece), rows):
            cut = self._ray.put(np.ascontiguousarray(piece[at : at + rows]))
            first, last = start + at, start + min(at + rows, len(piece))
            is_dense, bounds = self._described["kind"] == "dense", self._bounds
            shards = [
                shard
                for shard in range(len(self._actors))
                if not is_dense or (bounds[shard] < last and first < bounds[shard + 1])
            ]
            self._ask("fill", dict.fromkeys(shards, (name, first, cut)))

    def _side_by_side(self, name: str, counts: Sequence[int], rows: int) -> Iterator[Array]:
        """The pieces of one shard after those of the other."""
        for shard, count in enumerate(counts):
            for at in range(0, count, rows):
                yield self._ask("dump", {shard: (name, at, min(at + rows, count))})[shard]

    def _in_order(self, name: str, counts: Sequence[int], rows: int) -> Iterator[Array]:
        """Pieces of all shards, rows by the numbers that they got when they were made."""
        share = max(1, rows // len(counts))
        done = [0] * len(counts)
        while sum(done) < sum(counts):
            # No shard has more than its share of rows below the smallest of these numbers.
            below = min(self.ask_all("number_of", [(at + share,) for at in done]))
            found = self.ask_all("dump_below", [(name, at, below) for at in done])
            order = np.argsort(np.concatenate([numbers for numbers, _ in found]))
            yield np.concatenate([own for _, own in found])[order]
            done = [at + len(own) for at, (_, own) in zip(done, found, strict=True)]

    def ask_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every shard."""
        found = self._ask(method, dict(enumerate(arguments)))
        return [found[shard] for shard in range(len(self._actors))]

    def _split(self, keys: KeyArray) -> dict[int, NDArray[np.int64]]:
        """Shard -> the places of its keys, in their order."""
        owner = np.searchsorted(self._bounds, keys, side="right") - 1
        order = np.argsort(owner, kind="stable")
        ends = np.searchsorted(owner[order], np.arange(len(self._actors) + 1))
        spans = {i: order[ends[i] : ends[i + 1]] for i in range(len(self._actors))}
        return {shard: at for shard, at in spans.items() if len(at)}

    def _ask(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls a method of some shards at once."""
        references = [
            self._actors[shard].ask.remote(self._place, method, *given)
            for shard, given in arguments.items()
        ]
        try:
            return dict(zip(arguments, self._ray.get(references), strict=True))
        except self._ray.exceptions.RayActorError as error:
            raise WorkerError(
                f"a shard of the server's tables is lost: got one of {len(self._actors)} shards is "
                "gone; expected all of them; resume the run from its directory; without one, start "
                "again"
            ) from error
