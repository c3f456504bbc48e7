"""Counts for Prometheus: never by key, device or address.

Counts are numbers in a block of memory with one row for each worker process. A worker adds to its
own row, which takes a tenth of a microsecond and no lock; whichever worker is asked adds up all
rows. The block is made before workers are, and outlives each of them, so nothing is lost with one.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from keyhole import errors

BUCKETS = (0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
STATUSES = (
    *(200, 201, 206, 304),
    *(400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 416, 429),
    *(500, 502, 503, 507),
)
UNEXPECTED = "Unexpected"

Count: TypeAlias = Literal[
    "keys",
    "bytes",
    "ideal_bytes",
    "evaluations",
    "cached",
    "stored",
    "repeated",
    "unused",
    "above_norm",
    "cut_off",
    "gone",
    "private",
    "scans",
    "relayed",
]
_COUNTS: Mapping[Count, tuple[str, str]] = {
    "keys": ("keyhole_keys", "Keys asked for."),
    "bytes": ("keyhole_sent_bytes", "Bytes of answers with slices, their heads included."),
    "ideal_bytes": ("keyhole_ideal_bytes", "Bytes of the slices in them."),
    "evaluations": ("keyhole_select_evaluations", "Slices computed on demand."),
    "cached": ("keyhole_select_cached", "Slices asked for that were computed before."),
    "stored": ("keyhole_updates_stored", "Updates taken."),
    "repeated": ("keyhole_updates_repeated", "Updates sent again, equal to the first."),
    "unused": ("keyhole_updates_refused", "Updates refused."),
    "above_norm": (
        "keyhole_updates_above_norm",
        "Updates above the max norm of their round: refused, or to be clipped by the trainer.",
    ),
    "cut_off": ("keyhole_slow_connections", "Connections cut off because they were slow."),
    "gone": ("keyhole_gone", "Requests whose sender left before the answer."),
    "private": ("keyhole_private_queries", "Private queries answered."),
    "scans": ("keyhole_private_scans", "Passes over a table that answered them."),
    "relayed": ("keyhole_relayed_requests", "Sealed requests that were forwarded."),
}
REFUSED = "refused "
"""Begins the names of counts of refusals of one kind."""
_GAUGES = {
    "in_flight": ("keyhole_requests_in_flight", "Requests under way."),
    "waiting": ("keyhole_requests_waiting", "Requests that wait for their turn."),
    "checked_in": (
        "keyhole_round_checked_in",
        "Devices told to take part in the newest rounds.",
    ),
}
Gauge: TypeAlias = Literal["in_flight", "waiting", "checked_in"]
_CELLS = 4096  # of a worker: 32 kB; a route takes 36


class MetricsBoard:
    """The numbers of all workers; if it is shared, processes forked later write to the same."""

    def __init__(self, workers: int = 1, *, is_shared: bool = False) -> None:
        size = workers * _CELLS * 8
        self._memory = mmap.mmap(-1, size) if is_shared else bytearray(size)
        self._workers = workers

    def row(self, worker: int) -> memoryview[float]:
        """Returns the numbers of one worker."""
        at = worker * _CELLS * 8
        return memoryview(self._memory)[at : at + _CELLS * 8].cast("d")

    def totals(self) -> list[float]:
        """Returns the numbers of all workers together."""
        rows = np.frombuffer(self._memory, np.float64).reshape(self._workers, _CELLS)
        totals: list[float] = rows.sum(axis=0).tolist()
        return totals

    def by_name(self) -> dict[str, float]:
        """Returns the counts and gauges of all workers together, all "refusals", and those of each
        kind under `REFUSED` and its name."""
        totals = self.totals()
        kinds = {REFUSED + kind: totals[_AT[kind]] for kind in _KINDS}
        told = {n: totals[_AT[n]] for n in (*_COUNTS, *_GAUGES)}
        return told | kinds | {"refusals": sum(kinds.values())}


@dataclass(frozen=True)
class RouteMetrics:
    """Where the numbers of a route stand: answers by status, then by time, then the total time."""

    name: str
    at: int
    row: memoryview[float]

    def count(self, status: int, seconds: float) -> None:
        """Counts an answer."""
        row, at = self.row, self.at
        row[at + _PLACE_OF.get(status, len(STATUSES))] += 1
        at += len(STATUSES) + 1
        row[at + bisect_left(BUCKETS, seconds)] += 1
        row[at + len(BUCKETS) + 1] += seconds


_PLACE_OF = {status: place for place, status in enumerate(STATUSES)}
_ROUTE_CELLS = len(STATUSES) + 1 + len(BUCKETS) + 2
_KINDS = (*errors.__all__, UNEXPECTED)
# Where the numbers of a worker stand; those of its routes follow.
_AT: Mapping[str, int] = {n: place for place, n in enumerate((*_COUNTS, *_GAUGES, *_KINDS))}


class Metrics:
    """The counts of one worker, and the page that shows those of all: each worker makes the same
    routes in the same order."""

    def __init__(self, board: MetricsBoard | None = None, worker: int = 0) -> None:
        self._board = board or MetricsBoard()
        self._row = self._board.row(worker)
        self._routes: list[RouteMetrics] = []
        # A worker that takes the place of a dead one has nothing under way yet.
        for gauge in _GAUGES:
            self._row[_AT[gauge]] = 0.0
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._further: list[Callable[[], Iterable[Metric]]] = []

    def show(self, further: Callable[[], Iterable[Metric]]) -> None:
        """Shows what else a service knows, such as how its round stands, on the same page."""
        self._further.append(further)

    def route(self, name: str) -> RouteMetrics:
        """Makes room for the numbers of a route; parts of a service count under one name."""
        known = next((each for each in self._routes if each.name == name), None)
        if known is not None:
            return known
        made = RouteMetrics(name, len(_AT) + len(self._routes) * _ROUTE_CELLS, self._row)
        if made.at + _ROUTE_CELLS > _CELLS:
            raise errors.InputError(
                f"too many routes to count: got {len(self._routes) + 1}; expected "
                f"{len(self._routes)}; mount fewer"
            )
        self._routes.append(made)
        return made

    def add(self, name: Count, amount: float = 1.0) -> None:
        """Adds to a count."""
        self._row[_AT[name]] += amount

    def add_slices(self, keys: int, sent: int, ideal: int) -> None:
        """Adds an answer with slices; they are the first three counts."""
        row = self._row
        row[0] += keys
        row[1] += sent
        row[2] += ideal

    def change(self, name: Gauge, amount: int) -> None:
        """Moves a gauge up or down."""
        self._row[_AT[name]] += amount

    def refuse(self, kind: str) -> None:
        """Counts an error by its kind."""
        self._row[_AT[kind if kind in _KINDS else UNEXPECTED]] += 1

    def page(self) -> bytes:
        """Returns all numbers, as Prometheus reads them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        totals = self._board.totals()
        for name, (title, text) in _COUNTS.items():
            yield CounterMetricFamily(title, text, value=totals[_AT[name]])
        for gauge, (title, text) in _GAUGES.items():
            yield GaugeMetricFamily(title, text, value=totals[_AT[gauge]])
        refused = CounterMetricFamily("keyhole_refused", "Requests refused.", labels=["kind"])
        for kind in _KINDS:
            if totals[_AT[kind]]:
                refused.add_metric([kind], totals[_AT[kind]])
        yield refused
        yield _answers(self._routes, totals)
        yield _times(self._routes, totals)
        for further in self._further:
            yield from further()


def _answers(routes: Sequence[RouteMetrics], totals: Sequence[float]) -> Metric:
    family = CounterMetricFamily("keyhole_requests", "Answers.", labels=["route", "status"])
    for route in routes:
        for place, status in enumerate((*STATUSES, "other")):
            if totals[route.at + place]:
                family.add_metric([route.name, str(status)], totals[route.at + place])
    return family


def _times(routes: Sequence[RouteMetrics], totals: Sequence[float]) -> Metric:
    text = "Seconds from the head of a request to the end of its answer."
    family = HistogramMetricFamily("keyhole_request_seconds", text, labels=["route"])
    for route in routes:
        first = route.at + len(STATUSES) + 1
        counts = totals[first : first + len(BUCKETS) + 1]
        running = np.cumsum(counts).tolist()
        bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
        buckets = list(zip(bounds, running, strict=True))
        family.add_metric([route.name], buckets, totals[first + len(BUCKETS) + 1])
    return family
