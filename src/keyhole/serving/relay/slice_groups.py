"""Single requests for slices, looked up together: one gather for each table that is asked."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from keyhole.errors import KeyholeError, NotFoundError, TooLargeError
from keyhole.private.oblivious.binary_http import BinaryRequest, BinaryResponse
from keyhole.private.oblivious.gateway import Reply, refusal
from keyhole.private.oblivious.slice_requests import (
    CHECK_FIELD,
    parse_slice_path,
    slice_reply_bytes,
)
from keyhole.serving import wire
from keyhole.serving.service.guards import Guards
from keyhole.serving.service.slice_routes import parse_round
from keyhole.serving.tables import Fetched, OpenRound, RoundSource, SliceTable

__all__ = ["SliceGroups"]


@dataclass
class _Group:
    """What is asked of one table: places in the batch, and their keys."""

    table: SliceTable
    places: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    @property
    def reply_bytes(self) -> int:
        return slice_reply_bytes(self.table.info.record_bytes)


class SliceGroups:
    """The slices that a batch asks for.

    Args:
        rounds: of the service.
        guards: what stands before them.
        stack: holds the rounds that are asked for, until it is closed.
    """

    def __init__(self, rounds: RoundSource, guards: Guards, stack: ExitStack) -> None:
        self._rounds, self._guards, self._stack = rounds, guards, stack
        self._kept: dict[str, OpenRound | KeyholeError] = {}
        self._groups: dict[tuple[str, int], _Group] = {}
        self._refused: dict[int, Reply] = {}

    def add(self, place: int, request: BinaryRequest) -> None:
        """Takes in what is asked at one place of the batch; what is wrong is answered there."""
        try:
            round_id, table, key = parse_slice_path(request)
            group = self._group(round_id, table)
        except KeyholeError as error:
            self._refused[place] = refusal(error)
            return
        if key < group.table.info.num_keys:
            group.places.append(place)
            group.keys.append(key)
        else:
            self._refused[place] = refusal(_missing("slice"), group.reply_bytes)

    @property
    def count(self) -> int:
        """How many slices are asked for."""
        return sum(len(group.keys) for group in self._groups.values())

    @property
    def ideal(self) -> int:
        """Bytes of these slices."""
        return sum(len(g.keys) * g.table.info.record_bytes for g in self._groups.values())

    @property
    def weight(self) -> int:
        """Bytes of their answers.

        Raises:
            TooLargeError: they are more than the service gives out at once.
        """
        total = sum(len(group.keys) * group.reply_bytes for group in self._groups.values())
        most = self._guards.limits.most_answer
        if total > most:
            raise TooLargeError(
                "the slices asked for are too large for one batch",
                got=f"{total} bytes",
                allowed=f"{most} bytes",
                fix="forward fewer requests at a time: `keyhole relay --batch`",
            )
        return total

    async def replies(self) -> dict[int, Reply]:
        """The reply at each place."""
        found = dict(self._refused)
        for group in self._groups.values():
            if group.keys:
                found |= await self._replies(group)
        return found

    async def _replies(self, group: _Group) -> dict[int, Reply]:
        try:
            fetched = await self._gather(group)
        except KeyholeError as error:
            return dict.fromkeys(group.places, refusal(error, group.reply_bytes))
        return {
            place: Reply(_slice(fetched, at), group.reply_bytes)
            for at, place in enumerate(group.places)
        }

    async def _gather(self, group: _Group) -> Fetched:
        gate = self._guards.gathers
        await gate.enter()
        try:
            return await group.table.fetch(np.array(group.keys, np.int64))
        finally:
            gate.leave()

    def _group(self, round_id: str, table: int) -> _Group:
        """The group of a table; raises what keeps it from being read."""
        found = self._groups.get((round_id, table))
        if found is None:
            held = self._hold(parse_round(round_id))
            if table >= len(held.tables):
                raise _missing("table")
            found = self._groups[round_id, table] = _Group(held.tables[table])
        return found

    def _hold(self, round_id: str) -> OpenRound:
        if round_id not in self._kept:
            try:
                held = self._stack.enter_context(self._rounds.hold(round_id))
            except KeyholeError as error:
                self._kept[round_id] = error
            else:
                self._kept[round_id] = held
        found = self._kept[round_id]
        if isinstance(found, KeyholeError):
            raise found
        return found


def _slice(fetched: Fetched, at: int) -> BinaryResponse:
    """One slice with what vouches for it."""
    check = wire.check_of([fetched.sums[at : at + 1]]).encode("ascii")
    return BinaryResponse(200, ((CHECK_FIELD, check),), fetched.records[at].tobytes())


def _missing(what: str) -> NotFoundError:
    return NotFoundError(
        f"no such {what}",
        got="another place",
        allowed="one of this round",
        fix="take it from the manifest",
    )
