"""A secure sum of vectors with all its parties, timed step by step."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.aggregation.masked.client import SecAggClient
from keyhole.aggregation.masked.params import SecAggParams
from keyhole.aggregation.masked.server import SecAggServer
from sum_cells.cohort import timed


@dataclass(frozen=True)
class Spent:
    """CPU seconds, and what came out.

    Args:
        total: the sum over the survivors.
        up: bytes of one survivor in all steps.
        keys: of one client for keys and shares, median.
        mask: of one client for its masked vector, median.
        add: of the server for all masked vectors.
        unmask: of the server from shares to sum.
    """

    total: np.ndarray
    up: int
    keys: float
    mask: float
    add: float
    unmask: float


def run_timed(settings: SecAggParams, vector_of: Callable[[int], np.ndarray], lost: range) -> Spent:
    """Runs a sum in which some clients are lost after they have shared their secrets.

    Args:
        settings: of the sum.
        vector_of: makes the vector of a place; one is held at a time.
        lost: places: the server has to rebuild their masks with everyone, the dearest way to drop.
    """
    server = SecAggServer(settings)
    clients = [SecAggClient(settings, place) for place in range(settings.cohort)]
    up, keys, masks, adds = [0] * settings.cohort, [0.0] * settings.cohort, [], []

    def send(
        place: int, make: Callable[[], bytes], receive: Callable[[int, bytes], None]
    ) -> tuple[float, float]:
        message, took = timed(make)
        up[place] += len(message)
        return took, timed(lambda: receive(place, message))[1]

    for place, client in enumerate(clients):
        keys[place] += send(place, client.advertise, server.receive_keys)[0]
    for place, client in enumerate(clients):
        told = server.key_list(place)
        keys[place] += send(place, lambda c=client, t=told: c.share(t), server.receive_shares)[0]
    staying = [place for place in range(settings.cohort) if place not in lost]
    for place in staying:
        told, vector = server.share_list(place), vector_of(place)
        took = send(
            place, lambda p=place, t=told, v=vector: clients[p].mask(t, v), server.receive_input
        )
        masks.append(took[0])
        adds.append(took[1])
    for place in staying:
        told = server.survivor_list(place)
        send(place, lambda p=place, t=told: clients[p].unmask(t), server.receive_unmasking)
    total, unmask = timed(server.sum)
    median = statistics.median
    return Spent(total, up[staying[0]], median(keys), median(masks), sum(adds), unmask)
