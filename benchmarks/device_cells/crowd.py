"""Processes of simulated devices: each device checks in, waits, fetches and sends as real ones do.

A device is `keyhole.device.Device` in a thread of its own, with a token and a connection of its
own. Only its training is tiny: it subtracts 1 from the row that no other device has, so that the
row of the trained model says how many of its updates were counted.
"""

from __future__ import annotations

import multiprocessing
import resource
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from keyhole.arrays import Tree
from keyhole.device.device import Device
from keyhole.device.fetch import KnownRound, Submodel
from keyhole.device.take_part import Participant, Taken, keep_taking_part
from keyhole.errors import KeyholeError
from keyhole.wire.http import HttpClient, Received

_STACK = 256 << 10  # bytes of a thread


@dataclass(frozen=True)
class Simulated:
    """A device: who it is, and which rows it asks for, its own first."""

    name: str
    token: str
    own_key: int
    num_keys: int
    keys_per_client: int

    @property
    def keys(self) -> np.ndarray:
        """Its keys: the others are drawn from the upper half, where nobody has a row alone."""
        drawn = np.random.default_rng(self.own_key).choice(
            self.num_keys // 2, self.keys_per_client - 1, replace=False
        )
        return np.concatenate([[self.own_key], self.num_keys // 2 + drawn])

    def participant(self) -> Participant:
        """Moves its own row by one, and leaves the others where they are."""
        keys = self.keys

        def choose(_: KnownRound) -> Mapping[str, np.ndarray]:
            return {"row": keys}

        def train(_: KnownRound, fetched: Submodel) -> Tree:
            update = {name: np.zeros_like(leaf) for name, leaf in fetched.model.items()}
            update["w"][0] = -1.0
            return update

        return Participant(choose, train)


@dataclass
class Seen:
    """What devices saw.

    Args:
        sent: own key -> rounds whose update the service acknowledged.
        requests: route -> how many, and bytes of their bodies up and down.
        misses: kind of error -> how often a round was over before an update was there.
        failed: errors that ended a device.
    """

    sent: dict[int, list[str]] = field(default_factory=dict)
    requests: dict[str, np.ndarray] = field(default_factory=dict)
    misses: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """Adds what other devices saw."""
        self.sent |= other.sent
        for route, counts in other.requests.items():
            self.requests[route] = self.requests.get(route, 0) + counts
        self.misses += other.misses
        self.failed += other.failed


class _Observed(HttpClient):
    """Counts what goes over the connections of a device; changes nothing."""

    counts: dict[str, np.ndarray]

    def exchange(self, method: str, path: str, body: bytes = b"", **options: Any) -> Received:
        got = super().exchange(method, path, body, **options)
        route = "/".join(part for part in path.split("/") if len(part) < 20)
        counted = np.array([1, len(body), len(got.body)])
        self.counts[route] = self.counts.get(route, 0) + counted
        return got


def _live(one: Simulated, url: str, stop: threading.Event) -> Seen:
    """One device, until it is told to stop."""
    seen, rounds = Seen(), list[str]()
    seen.sent[one.own_key] = rounds

    def taken(what: Taken) -> None:
        rounds.append(what.round)

    def missed(error: KeyholeError) -> None:
        seen.misses[type(error).__name__] += 1

    with Device(url, token=one.token, stop=stop) as device:
        device.client = _Observed(url, clock=device.clock, stop=stop)
        device.client.counts = seen.requests
        try:
            keep_taking_part(device, one.participant(), on_round=taken, on_miss=missed)
        except KeyholeError as error:
            if not stop.is_set():
                seen.failed.append(f"{one.name}: {error}")
    return seen


def _run(url: str, devices: Sequence[Simulated], told: Connection) -> None:
    """A process: its devices live until something is received, then what they saw is sent."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(_STACK)
    stop, all_seen, lock = threading.Event(), Seen(), threading.Lock()

    def live(one: Simulated) -> None:
        seen = _live(one, url, stop)
        with lock:
            all_seen.add(seen)

    threads = [threading.Thread(target=live, args=(one,)) for one in devices]
    for thread in threads:
        thread.start()
    with suppress(EOFError):
        told.recv()
    stop.set()
    for thread in threads:
        thread.join()
    told.send(all_seen)


@contextmanager
def living(url: str, devices: Sequence[Simulated], processes: int) -> Iterator[Callable[[], Seen]]:
    """Devices that live in a few processes until the block ends; what it gives ends them sooner,
    and returns what they saw."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(processes)]
    made = [
        context.Process(target=_run, args=(url, devices[i::processes], there), daemon=True)
        for i, (_, there) in enumerate(pairs)
    ]

    def end() -> Seen:
        seen = Seen()
        for here, _ in pairs:
            here.send("stop")
        for here, _ in pairs:
            seen.add(here.recv())
        return seen

    for process in made:
        process.start()
    try:
        yield end
    finally:
        for process in made:
            process.join(1)
            process.kill()
