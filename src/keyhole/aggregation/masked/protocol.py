"""Runs a masked sum in process: the clients and the server of one round, message by message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from keyhole.aggregation.masked.client import SecAggClient, check_vector
from keyhole.aggregation.masked.messages import REFUSAL, Identity, too_few
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.server import SecAggServer
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.crypto.ring import RingArray
from keyhole.errors import InputError, StaleError

Stage: TypeAlias = Literal["before", "after_keys", "after_shares", "after_input"]
"""When a client is lost: before it does anything, or after it has sent what is named."""

_STAGES: tuple[Stage, ...] = ("before", "after_keys", "after_shares", "after_input")


@dataclass(frozen=True)
class SecAggResult:
    """What a secure sum gave, and what it cost.

    Args:
        total: (length,) ring elements: the sum over the survivors.
        survivors: whose vectors are in it, ascending.
    """

    total: RingArray
    survivors: tuple[int, ...]
    bytes_up: Mapping[int, int]
    bytes_down: Mapping[int, int]


def run_secagg(
    settings: SecAggParams,
    vectors: Mapping[int, RingArray],
    lost: Mapping[int, Stage] | None = None,
    late: Collection[int] = (),
    prg: Prg | None = None,
) -> SecAggResult:
    """Runs a secure sum.

    sum_(i in survivors) x_i mod 2^bits

    Args:
        vectors: (length,) ring elements of every place that takes part; others are lost from the
            start.
        late: clients whose vectors arrive after the survivors are settled: they are not added.
        prg: where all secrets come from; by default fresh ones. One of one's own is for tests.

    >>> import numpy as np
    >>> settings = SecAggParams(bytes(16), cohort=4, length=2)
    >>> vectors = {place: np.array([place, 1], np.uint32) for place in range(4)}
    >>> run_secagg(settings, vectors, {3: "after_shares"}).total
    array([3, 3], dtype=uint32)
    """
    _check(settings, vectors, lost or {}, frozenset(late))
    return _Run(settings, vectors, lost or {}, prg or Prg.fresh()).result(frozenset(late))


class _Run:
    """The parties of one sum, and how much they have sent."""

    def __init__(
        self,
        settings: SecAggParams,
        vectors: Mapping[int, RingArray],
        lost: Mapping[int, Stage],
        prg: Prg,
    ) -> None:
        identities = Identity.all_of(settings.cohort, prg) if settings.signed else ()
        self._settings, self._vectors = settings, vectors
        self._server = SecAggServer(settings, identities[0].everyone if identities else None)
        self._clients = {
            place: SecAggClient(
                settings,
                place,
                Prg(prg.bytes(SEED_BYTES)),
                identities[place] if identities else None,
            )
            for place in sorted(vectors)
        }
        self._last = {place: _STAGES.index(stage) for place, stage in lost.items()}
        self._up = dict.fromkeys(vectors, 0)
        self._down = dict.fromkeys(vectors, 0)

    def result(self, late: frozenset[int]) -> SecAggResult:
        """Every step in turn."""
        server = self._server
        for place in self._there("before"):
            self._send(place, self._clients[place].advertise(), server.receive_keys)
        for place in self._there("after_keys"):
            shares = self._clients[place].share(self._fetch(place, server.key_list))
            self._send(place, shares, server.receive_shares)
        self._mask(late)
        survivors = tuple(sorted(server.survivors))
        return SecAggResult(server.sum(), survivors, self._up, self._down)

    def _mask(self, late: frozenset[int]) -> None:
        """Vectors in time, the lists that settle the survivors, vectors that are late, the end."""
        server, held_back = self._server, {}
        for place in self._there("after_shares"):
            shares = self._fetch(place, server.share_list)
            masked = self._clients[place].mask(shares, self._vectors[place])
            if place in late:
                held_back[place] = masked
            else:
                self._send(place, masked, server.receive_input)
        there = [place for place in self._there("after_input") if place in server.survivors]
        asked = {place: self._fetch(place, server.survivor_list) for place in self._some(there)}
        for place, masked in held_back.items():
            self._send_late(place, masked)
        self._unmask(asked)

    def _unmask(self, asked: dict[int, bytes]) -> None:
        server = self._server
        if self._settings.signed:
            for place, survivors in asked.items():
                signature = self._clients[place].confirm(survivors)
                self._send(place, signature, server.receive_confirmation)
            asked = {place: self._fetch(place, server.confirmation_list) for place in asked}
        for place, request in asked.items():
            self._send(place, self._clients[place].unmask(request), server.receive_unmasking)

    def _there(self, stage: Stage) -> list[int]:
        """Who has not been lost by then."""
        last = _STAGES.index(stage)
        return self._some([place for place in self._clients if self._last.get(place, 9) > last])

    def _some(self, places: list[int]) -> list[int]:
        """The server would wait for ever if there were nobody."""
        if not places:
            raise too_few(0, self._settings.min_survivors)
        return places

    def _send(self, place: int, data: bytes, receive: Callable[[int, bytes], None]) -> None:
        self._up[place] += len(data)
        receive(place, data)

    def _send_late(self, place: int, data: bytes) -> None:
        try:
            self._send(place, data, self._server.receive_input)
        except StaleError:
            self._down[place] += len(REFUSAL)

    def _fetch(self, place: int, listed: Callable[[int], bytes]) -> bytes:
        data = listed(place)
        self._down[place] += len(data)
        return data


def _check(
    settings: SecAggParams,
    vectors: Mapping[int, RingArray],
    lost: Mapping[int, Stage],
    late: frozenset[int],
) -> None:
    """Refuses places and stages that there are not, and vectors that do not fit."""
    named = vectors.keys() | lost.keys() | late
    if not named <= set(range(settings.cohort)) or not set(lost.values()) <= set(_STAGES):
        allowed = f"places 0..{settings.cohort - 1}; stages {', '.join(_STAGES)}"
        raise InputError(
            f"places or stages that a secure sum does not have: got {len(named)} "
            f"places, {len(set(lost.values()) - set(_STAGES))} unknown stages; "
            f"expected {allowed}; number the clients of the cohort from 0 on"
        )
    for vector in vectors.values():
        check_vector(settings, vector)
