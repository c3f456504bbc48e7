"""Rounds whose slices are computed on demand: the newest one is served, none has files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from keyhole.delivery.sources import SliceSource
from keyhole.errors import InputError, NotFoundError, TooLateError
from keyhole.primitives.layout import Layout
from keyhole.serving.manifest import (
    TableInfo,
    describe_round,
    encode_manifest,
    name_round,
    table_info,
)
from keyhole.serving.on_demand.slab import whole_bytes
from keyhole.serving.on_demand.slab_table import BATCH_KEYS, Counts, SlabTable
from keyhole.serving.tables import NO_ROUND, Current, OpenRound

__all__ = ["OnDemandRounds"]

_REMEMBERED = 1024  # rounds whose devices are told that they are late


class OnDemandRounds:
    """One round at a time, computed as devices ask for it.

    A round that is replaced takes no new requests; those that hold it finish, then its memory goes.
    Slices of a round come from one value: whoever trains further meanwhile passes sources of a
    copy, or closes the round first.

    Used from one event loop.

    Args:
        most_bytes: that the kept slices of a round may take, over all tables. Small
            tables get what they need, large ones share what is left.
        executor: threads to compute on.
        batch_keys: see `SlabTable`.
        counts: to add to.
    """

    def __init__(
        self,
        *,
        most_bytes: int,
        executor: Executor,
        batch_keys: int = BATCH_KEYS,
        counts: Counts | None = None,
    ) -> None:
        self.counts = Counts() if counts is None else counts
        self._most_bytes, self._executor, self._batch_keys = most_bytes, executor, batch_keys
        self._round: OpenRound | None = None
        self._current: Current | None = None
        self._past: deque[str] = deque(maxlen=_REMEMBERED)

    def publish(
        self,
        sources: Sequence[SliceSource],
        layout: Layout | None,
        *,
        number: int,
        step: int = 0,
        settings: Mapping[str, Any] | None = None,
        cohort: Mapping[str, int] | None = None,
    ) -> str:
        """Makes a round the current one, in place of the one before.

        Args:
            sources: of its tables, in order.
            layout: the model whose parts the tables are; None for tables of select functions.
            number: t, greater than that of the round before.
            step: how many steps the server has made.
            settings: what devices are told about the run. The name of a round on demand follows
                from these and the number, not from its slices: whatever tells two runs apart, a
                seed, belongs here if a cache stands between service and devices.
            cohort: device -> its place; None lets every device take part.

        Returns:
            The name of the round.

        Raises:
            InputError: the number does not grow, or the memory does not hold one slice per table.
        """
        if self._current is not None and number <= self._current.number:
            raise InputError(
                "a round does not follow the one before",
                got=f"number {number}",
                allowed=f"{self._current.number + 1} or more",
                fix="count rounds upwards",
            )
        opened = self._open(sources, layout, number, step, settings or {})
        if self._round is not None:
            self._past.append(self._round.id)
        self._round, self._current = opened, Current(opened.id, number, "open", cohort)
        return opened.id

    def close(self) -> None:
        """The current round takes no further updates; its slices can still be had."""
        if self._current is not None:
            self._current = replace(self._current, phase="closed")

    def current(self) -> Current | None:
        """The newest round; None before the first."""
        return self._current

    @contextmanager
    def hold(self, round_id: str) -> Iterator[OpenRound]:
        """Keeps a round while it is used.

        Raises:
            NotFoundError: there never was such a round, as far as is remembered.
            TooLateError: the round has been replaced.
        """
        if self._round is None or self._round.id != round_id:
            raise self._missing(round_id)
        yield self._round

    def _open(
        self,
        sources: Sequence[SliceSource],
        layout: Layout | None,
        number: int,
        step: int,
        settings: Mapping[str, Any],
    ) -> OpenRound:
        infos = [table_info(source.records, layout, place) for place, source in enumerate(sources)]
        manifest = describe_round(layout, infos, number, step, settings)
        encoded = encode_manifest(manifest)
        shares = _share(self._most_bytes, infos)
        tables = tuple(
            SlabTable(
                source,
                info,
                most_bytes=share,
                executor=self._executor,
                batch_keys=self._batch_keys,
                counts=self.counts,
            )
            for source, info, share in zip(sources, infos, shares, strict=True)
        )
        return OpenRound(name_round(encoded, number), manifest, encoded, tables)

    def _missing(self, round_id: str) -> NotFoundError | TooLateError:
        if round_id in self._past:
            return TooLateError(
                "the round is over",
                got="a round before",
                allowed="the current round",
                fix="take part in that one",
            )
        return NotFoundError(
            NO_ROUND, got="another", allowed="the current round", fix="ask which it is"
        )


def _share(most_bytes: int, infos: Sequence[TableInfo]) -> list[int]:
    """Bytes for each table: all it can use, or else an equal part of what smaller ones leave."""
    needs = [whole_bytes(info.num_keys, info.record_bytes) for info in infos]
    shares = [0] * len(infos)
    for rank, place in enumerate(sorted(range(len(infos)), key=needs.__getitem__)):
        shares[place] = min(needs[place], (most_bytes - sum(shares)) // (len(infos) - rank))
    return shares
