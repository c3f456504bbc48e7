"""Shards: server tables whose rows lie in the memory of several nodes, each a range of keys.

A `ServerState` takes sharded tables as it takes its own: reads and steps go to the shards that hold
the keys, all of them at once, so a round costs what was selected. Every row is stepped and read by
the same code as in one process, hence the same bytes for any number of shards.

What lasts: shards hold rows in memory and nothing else. A run with a directory writes each step to
its log before the shards apply it, so a run that loses a shard stops with an error and goes on from
its directory. Snapshots, and going on, bring the rows that exist through this process one table
after the other: its machine needs room for them then, and only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keyhole.engines.ray.session import connected
from keyhole.errors import InputError, WorkerError
from keyhole.server.optimizers import Optimizer
from keyhole.server.snapshots import dump_table, load_table
from keyhole.server.state import ServerState
from keyhole.server.tables import DenseTable, LazyTable, Table, check_keys
from keyhole.types import Array, KeyArray

__all__ = ["ShardedTable", "Shards"]


class Shards:
    """Actors that hold the rows of tables; a context that ends them, and with them the rows.

    Args:
        count: how many, spread over the nodes.
        address: of a cluster; None starts Ray on this machine, unless the process is connected.

    Raises:
        InputError: Ray is not installed, or `count` is below 1.
        WorkerError: the cluster does not answer.
    """

    def __init__(self, count: int, *, address: str | None = None) -> None:
        if count < 1:
            raise InputError(
                "number of shards is out of range", got=count, allowed="1 or more", fix="pass one"
            )
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(address))
            # No CPU of their own: they work while clients wait, and clients while they wait.
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
            make = self._ray.remote(_Shard).options(**options).remote
            self._actors = [make() for _ in range(count)]
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> Shards:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the shards; what they held is gone."""
        self._stack.close()

    def hold(self, state: ServerState) -> ServerState:
        """Returns a state whose tables are those of `state`, moved to the shards.

        A lazy state moves before it has rows, however many keys it has. Tables of fewer keys than
        shards, such as what is not cut, stay in this process.

        Args:
            state: taken over; let go of it to free its memory.
        """
        tables = tuple(
            self._move(place, table, state.optimizer)
            if table.num_keys >= len(self._actors)
            else table
            for place, table in enumerate(state.tables)
        )
        return replace(state, tables=tables)

    def _move(self, place: int, table: Table, optimizer: Optimizer) -> ShardedTable:
        described, arrays = dump_table(table)
        count = len(self._actors)
        bounds = np.array([table.num_keys * i // count for i in range(count + 1)], np.int64)
        sharded = ShardedTable(self._ray, self._actors, place, bounds, table.width, optimizer)
        # Another state may have been held before: its tables are replaced.
        sharded.ask_all(
            "hold",
            [
                (described, _cut(arrays, first, last), table.num_keys, first, optimizer)
                for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            ],
        )
        return sharded

    def _end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


class ShardedTable:
    """A table whose rows are ranges of keys in actors; made by `Shards.hold`."""

    def __init__(
        self,
        ray: Any,
        actors: Sequence[Any],
        place: int,
        bounds: KeyArray,
        width: int,
        optimizer: Optimizer,
    ) -> None:
        self.width = width
        self._ray = ray
        self._actors = actors
        self._place = place
        self._bounds = bounds
        self._optimizer = optimizer

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

    def reserve(self, keys: KeyArray) -> KeyArray:
        """Implements `Table.reserve`: shards make room; slots are the keys themselves."""
        self._ask("reserve", {shard: (keys[at],) for shard, at in self._split(keys).items()})
        return keys

    def step(self, slots: KeyArray, rows: NDArray[np.float32], now: int, threads: int = 1) -> None:
        """Implements `Table.step`."""
        cuts = self._split(slots)
        self._ask("step", {shard: (rows[at], now, threads) for shard, at in cuts.items()})

    def touched_after(self, step: int) -> KeyArray:
        """Implements `Table.touched_after`: shards hold ascending ranges."""
        found = self.ask_all("touched_after", [(step,)] * len(self._actors))
        return np.concatenate([np.asarray(keys, np.int64) for keys in found])

    def gather(self) -> DenseTable | LazyTable:
        """All of it in this process, as `Gathered` says; rows of a lazy table in order of keys'
        ranges."""
        found = self.ask_all("dump", [()] * len(self._actors))
        arrays = {name: np.concatenate([own[name] for _, own in found]) for name in found[0][1]}
        return load_table(self.num_keys, found[0][0], arrays, self._optimizer)

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
            getattr(self._actors[shard], method).remote(self._place, *given)
            for shard, given in arguments.items()
        ]
        try:
            return dict(zip(arguments, self._ray.get(references), strict=True))
        except self._ray.exceptions.RayActorError as error:
            raise WorkerError(
                "a shard of the server's tables is lost",
                got=f"one of {len(self._actors)} shards is gone",
                allowed="all of them",
                fix="resume the run from its directory; without one, start again",
            ) from error


class _Shard:
    """In an actor: a range of keys of every table."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[DenseTable | LazyTable, int]] = {}
        self._slots: dict[int, KeyArray] = {}

    def hold(
        self,
        place: int,
        described: Mapping[str, Any],
        arrays: Mapping[str, Array],
        num_keys: int,
        first: int,
        optimizer: Optimizer,
    ) -> None:
        """Takes the rows of one table; what Ray hands over cannot be written to."""
        own = {name: np.array(array) for name, array in arrays.items()}
        # A dense table counts its rows from 0; a lazy one knows its keys.
        offset = first if described["kind"] == "dense" else 0
        self._tables[place] = load_table(num_keys, described, own, optimizer), offset

    def rows(self, place: int, keys: KeyArray, now: int, threads: int) -> NDArray[np.float32]:
        """See `Table.rows`."""
        table, offset = self._tables[place]
        return table.rows(keys - offset, now, threads)

    def reserve(self, place: int, keys: KeyArray) -> None:
        """See `Table.reserve`; slots stay here, for the step that follows."""
        table, offset = self._tables[place]
        self._slots[place] = table.reserve(keys - offset)

    def step(self, place: int, rows: Array, now: int, threads: int) -> None:
        """See `Table.step`."""
        self._tables[place][0].step(self._slots.pop(place), np.array(rows), now, threads)

    def touched_after(self, place: int, step: int) -> KeyArray:
        """See `Table.touched_after`."""
        table, offset = self._tables[place]
        return table.touched_after(step) + offset

    def nbytes(self, place: int) -> int:
        """See `Table.nbytes`."""
        return self._tables[place][0].nbytes

    def dump(self, place: int) -> tuple[dict[str, Any], dict[str, Array]]:
        """See `dump_table`."""
        return dump_table(self._tables[place][0])


def _cut(arrays: Mapping[str, Array], first: int, last: int) -> dict[str, Array]:
    """What belongs to keys first..last: rows by place, or by the keys that stand beside them."""
    keys = arrays.get("keys")
    if keys is None:
        return {name: array[first:last] for name, array in arrays.items()}
    mine = (keys >= first) & (keys < last)
    return {name: array[mine] for name, array in arrays.items()}
