"""Optimizers that differ by parameter, and learning rates that follow a schedule.

A part holds several parameters side by side in its rows. Where they are stepped differently, the
touched rows are taken apart by columns, each group is stepped as if it had a table of its own, and
the columns are put back: the bytes are those of a table for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from math import cos, pi, prod, sqrt
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.errors import InputError
from keyhole.parts import near_miss
from keyhole.primitives.layout import Part
from keyhole.server.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Optimizer,
    Slab,
    Span,
    Yogi,
    compiled_steps,
)
from keyhole.server.steps import Decay, decay_of

DecayKind: TypeAlias = Literal["none", "inverse-sqrt", "linear", "cosine"]


@dataclass(frozen=True)
class Schedule:
    """How a learning rate changes with the server's steps, t = 1, 2, ...

    Args:
        warmup: W; in the first W steps the rate is t / W of itself.
        decay: what follows, with s = t - W: `inverse-sqrt` is sqrt(max(W, 1) / t), `linear` falls
            by s / over, and `cosine` is (1 + cos(pi s / over)) / 2.
        over: steps after the warm-up until `linear` and `cosine` reach zero, where they stay.

    >>> [round(Schedule(warmup=2, decay="linear", over=4).factor(t), 2) for t in (1, 2, 4, 9)]
    [0.5, 1.0, 0.5, 0.0]
    """

    warmup: int = 0
    decay: DecayKind = "none"
    over: int = 0

    def __post_init__(self) -> None:
        is_known, needs = self.decay in get_args(DecayKind), self.decay in ("linear", "cosine")
        if not is_known or self.warmup < 0 or (self.over < 1 if needs else self.over != 0):
            raise InputError(
                f"no such schedule: got warmup={self.warmup}, decay={self.decay}, "
                f"over={self.over}; expected a warmup of 0 or more, and decay "
                f"{', '.join(get_args(DecayKind))}; give linear and cosine, and only them, "
                "over=STEPS"
            )

    def factor(self, t: int) -> float:
        """Returns what the learning rate is multiplied by in step t."""
        if t < self.warmup:
            return t / self.warmup
        if self.decay == "inverse-sqrt":
            return sqrt(max(self.warmup, 1) / max(t, 1))
        share = min(1.0, (t - self.warmup) / self.over) if self.over else 0.0
        if self.decay == "linear":
            return 1.0 - share
        return (1.0 + cos(pi * share)) / 2 if self.decay == "cosine" else 1.0


@dataclass(frozen=True)
class Scheduled:
    """An optimizer whose learning rate follows a schedule; `optax.adam(schedule)` and the like.

    Steps that a row has missed are made up for at the rates that they had.

    Args:
        inner: SGD, Adagrad, Adam or Yogi: the missed steps of momentum have no sum with rates that
            change.
        schedule: of its learning rate.
    """

    inner: SGD | Adagrad | Adam | Yogi
    schedule: Schedule

    def __post_init__(self) -> None:
        if not isinstance(self.inner, SGD | Adagrad | Adam | Yogi):
            raise InputError(
                f"an optimizer without schedules: got {type(self.inner).__name__} with "
                f"{self.schedule}; expected sgd, adagrad, adam or yogi; leave the schedule out"
            )

    @property
    def initial_moments(self) -> tuple[Any, ...]:
        """Implements `Optimizer.initial_moments`."""
        return self.inner.initial_moments

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return self.inner.horizon

    @property
    def moves_all(self) -> bool:
        """Implements `Optimizer.moves_all`."""
        return self.inner.moves_all

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        o = self.inner
        rate = np.float32(o.lr * self.schedule.factor(now))
        if isinstance(o, SGD):
            return lambda start, stop: compiled_steps().sgd(
                slab.values, slab.last, slots, rows, now, rate, start, stop
            )
        if isinstance(o, Adagrad):
            eps, held = np.float32(o.eps), (slab.values, slab.first, slab.last)
            return lambda start, stop: compiled_steps().adagrad(
                *held, slots, rows, now, rate, eps, start, stop
            )
        decay = _scheduled_decay(o, self.schedule, 1 << max(now, 1).bit_length())
        settings = np.array((o.lr, o.b1, 1 - o.b1, o.b2, 1 - o.b2, o.eps), np.float32)
        return lambda start, stop: compiled_steps().moments(
            *slab.arrays, slots, rows, now, settings, o.is_yogi, o.moves_all, decay, start, stop
        )

    def read(self, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
        """Implements `Optimizer.read`."""
        o = self.inner
        if isinstance(o, SGD | Adagrad):
            return o.read(slab, slots, out, now)
        decay = _scheduled_decay(o, self.schedule, 1 << max(now, 1).bit_length())
        eps = np.float32(o.eps)
        return lambda start, stop: compiled_steps().read_moments(
            *slab.arrays, slots, out, now, eps, o.moves_all, decay, start, stop
        )


@lru_cache(maxsize=8)
def _scheduled_decay(o: Adam | Yogi, schedule: Schedule, count: int) -> Decay:
    """The tables of an optimizer whose movement in step t is multiplied by the factor of t, which
    is put where the correction of the first moment in step t is."""
    decay = decay_of(o.lr, o.b1, o.b2, not o.is_yogi, count)
    factors = np.array([schedule.factor(t) for t in range(len(decay.bias1))])
    return decay._replace(bias1=decay.bias1 * factors)


@dataclass(frozen=True)
class ByParameter:
    """Steps parameters by the optimizer of the first pattern that names them.

    Args:
        groups: patterns of paths, `*` for any text, and what steps these parameters.
        rest: steps all others.
        columns: for each group, and for the rest, where its parameters stand in the rows of one
            part, which `of_part` finds; without them `rest` steps everything.
    """

    groups: tuple[tuple[str, Optimizer], ...]
    rest: Optimizer
    columns: tuple[tuple[int, ...], ...] = ()

    @property
    def initial_moments(self) -> tuple[Any, ...]:
        """What each column starts with; one whose optimizer keeps fewer moments holds zeros."""
        if not self.columns:
            return self.rest.initial_moments
        count = max(len(optimizer.initial_moments) for optimizer, _ in self._placed)
        found = np.zeros((count, sum(map(len, self.columns))), np.float32)
        for optimizer, own in self._placed:
            for place, start in enumerate(optimizer.initial_moments):
                found[place, own] = start
        return tuple(found)

    @property
    def horizon(self) -> int:
        """Implements `Optimizer.horizon`."""
        return max(optimizer.horizon for optimizer in self._each)

    @property
    def moves_all(self) -> bool:
        """Implements `Optimizer.moves_all`."""
        return any(optimizer.moves_all for optimizer in self._each)

    def step(self, slab: Slab, slots: KeyArray, rows: Array, now: int) -> Span:
        """Implements `Optimizer.step`."""
        if not self.columns:
            return self.rest.step(slab, slots, rows, now)

        def work(start: int, stop: int) -> None:
            here = slots[start:stop]
            at = np.arange(len(here))
            for optimizer, own in self._placed:
                taken = _taken(slab, here, own, len(optimizer.initial_moments))
                moved = np.ascontiguousarray(rows[start:stop][:, own])
                optimizer.step(taken, at, moved, now)(0, len(here))
                index = here[:, None], own
                slab.values[index] = taken.values
                for whole, part in zip(slab.moments, taken.moments, strict=False):
                    whole[index] = part
            slab.last[here] = now

        return work

    def read(self, slab: Slab, slots: KeyArray, out: Array, now: int) -> Span:
        """Implements `Optimizer.read`."""
        if not self.columns:
            return self.rest.read(slab, slots, out, now)

        def work(start: int, stop: int) -> None:
            there = start + np.flatnonzero(slots[start:stop] >= 0)
            at = np.arange(len(there))
            for optimizer, own in self._placed:
                taken = _taken(slab, slots[there], own, len(optimizer.initial_moments))
                values = np.empty((len(there), len(own)), np.float32)
                optimizer.read(taken, at, values, now)(0, len(there))
                out[there[:, None], own] = values

        return work

    def of_part(self, part: Part) -> Optimizer:
        """Returns what steps the table of one part: one optimizer where it is the same for all."""
        columns: list[list[int]] = [[] for _ in self._each]
        start = 0
        for field in part.fields:
            stop = start + prod(field.slice_shape)
            columns[self._place_of(field.path)].extend(range(start, stop))
            start = stop
        used = [place for place, own in enumerate(columns) if own]
        if len(used) == 1:
            return self._each[used[0]]
        return replace(self, columns=tuple(map(tuple, columns)))

    def check(self, paths: Sequence[str]) -> None:
        """Raises InputError where a pattern names no parameter, or none that is left."""
        found = [self._place_of(path) for path in paths]
        for place, (pattern, _) in enumerate(self.groups):
            if place not in found:
                raise InputError(
                    f"no parameter is left for an optimizer of its own: got {pattern!r}; expected "
                    f"some of {', '.join(paths)}, * for any text, that no pattern before it names; "
                    f"{near_miss(pattern, paths)}"
                )

    def _place_of(self, path: str) -> int:
        matching = (n for n, (pattern, _) in enumerate(self.groups) if fnmatchcase(path, pattern))
        return next(matching, len(self.groups))

    @property
    def _each(self) -> tuple[Optimizer, ...]:
        return *(optimizer for _, optimizer in self.groups), self.rest

    @property
    def _placed(self) -> list[tuple[Optimizer, KeyArray]]:
        pairs = zip(self._each, self.columns, strict=True)
        return [(optimizer, np.array(own, np.int64)) for optimizer, own in pairs if own]


def _taken(slab: Slab, slots: KeyArray, columns: KeyArray, moments: int) -> Slab:
    """Some columns of some rows, copied."""
    index = slots[:, None], columns
    return Slab(
        np.ascontiguousarray(slab.values[index]),
        tuple(np.ascontiguousarray(each[index]) for each in slab.moments[:moments]),
        slab.last[slots],
    )
