"""A round in simulated time: devices, servers as queues, and the code that decides in real rounds.

Who takes part and when it fetches is told by `admit` of the coordinator, how a device tries again
by its `Retry`, and which update counts by the round machine: none of them is modelled. Modelled are
time, lines, cores and what devices do.

    check in -> wait for its turn -> fetch slices -> train -> connect again, send the update
         lost with some probability before it fetches, and while it trains

A device that is lost says nothing, as with the service: the round closes at its goal or deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Literal

import numpy as np

from keyhole.rounds.machine import Answered, Reached, RoundMachine, Terms
from keyhole.wire.assignment import Admission, Current, Pace, admit, device_name
from keyhole.wire.sockets import Retry
from round_cells.queues import Queue
from round_cells.service_costs import ServiceCosts

OVER_SELECTION = 1.3
RETRY_AFTER = 2.0  # seconds, that a busy service asks for
MEGABIT = 125_000  # bytes
CHECK_IN, FETCH, REACHED, UPDATE, ANSWERED = range(5)


@dataclass(frozen=True)
class DeviceClass:
    """Devices of one kind.

    Args:
        share: of all devices.
        down: megabits a second that one receives.
        up: that it sends.
        train: seconds, median.
        lost_before: probability that it never fetches.
        lost_after: that it fetches and never answers.
    """

    share: float
    down: float
    up: float
    train: float
    lost_before: float
    lost_after: float


# Shares, lines and losses are assumptions: a mix of the kind that mobile networks show, with the 6
# to 10 of 100 devices that Bonawitz et al. (2019) report lost.
CLASSES = (
    DeviceClass(0.5, down=50.0, up=10.0, train=20.0, lost_before=0.02, lost_after=0.04),
    DeviceClass(0.35, down=10.0, up=3.0, train=45.0, lost_before=0.03, lost_after=0.06),
    DeviceClass(0.15, down=1.5, up=0.5, train=90.0, lost_before=0.05, lost_after=0.10),
)
SPREAD_OF_TRAINING = 0.4  # of the logarithm


@dataclass(frozen=True)
class Fleet:
    """Servers: this many for slices, all alike, and one for check-ins and updates.

    Args:
        servers: of slices.
        cores: of each.
        gbit: of the line of each.
        coordinator_cores: of the coordinator.
    """

    servers: int
    cores: int
    gbit: float
    coordinator_cores: int = 32


@dataclass(frozen=True)
class Setting:
    """A round.

    Args:
        devices: that are asked.
        pace: how they are spread.
        deadline: seconds.
        is_herd: all check in at once, as after a message to all of them; else each at its own time
            within `pace.again`.
        seed: of everything that is drawn.
    """

    devices: int
    pace: Pace
    deadline: float = 3600.0
    is_herd: bool = False
    seed: int = 0

    @property
    def goal(self) -> int:
        """Updates that close the round."""
        return int(self.devices / OVER_SELECTION)


@dataclass(frozen=True)
class Outcome:
    """What became of a round.

    Args:
        why: it closed.
        seconds: until then.
        taken: updates that count.
        late: share of the devices asked that had not answered when the goal was reached, and would.
        lost: share that was gone, or gave up.
        refused: requests that a full queue turned away.
        gave_up: devices that were turned away too often.
        requests_per_second: the most in one second, at all slice servers.
        gbit: the most in one second, out of all slice servers.
        queue: the most requests that were at one slice server together.
        waits: seconds from a fetch to the end of its answer at the server: median and 99th
            percentile.
        checkin_waits: the same of check-ins.
        use: resource -> share of the time that slice servers were busy while devices came.
        coordinator_use: the same of the coordinator, until the round closed.
        coordinator_seconds: CPU seconds of it.
        coordinator_queue: the most requests that were there together.
    """

    why: str
    seconds: float
    taken: int
    late: float
    lost: float
    refused: int
    gave_up: int
    requests_per_second: int
    gbit: float
    queue: int
    waits: tuple[float, float]
    checkin_waits: tuple[float, float]
    use: dict[str, float]
    coordinator_use: dict[str, float]
    coordinator_seconds: float
    coordinator_queue: int


@dataclass(frozen=True)
class Population:
    """What was drawn for each device: lines, training times, and where it is lost."""

    down: Sequence[float]
    up: Sequence[float]
    train: Sequence[float]
    lost_at: Sequence[int]

    @staticmethod
    def draw(count: int, rng: np.random.Generator) -> Population:
        kind = rng.choice(len(CLASSES), count, p=[one.share for one in CLASSES])

        def of(name: str) -> np.ndarray:
            return np.array([getattr(one, name) for one in CLASSES])[kind]

        outcome = rng.random(count)
        before = of("lost_before")
        lost_at = np.where(
            outcome < before, FETCH, np.where(outcome < before + of("lost_after"), REACHED, -1)
        )
        train = of("train") * np.exp(SPREAD_OF_TRAINING * rng.standard_normal(count))
        return Population(of("down").tolist(), of("up").tolist(), train.tolist(), lost_at.tolist())


@dataclass
class _Counts:
    """What is counted on the way."""

    refused: int = 0
    gave_up: int = 0
    requests: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    checkin_waits: list[float] = field(default_factory=list)
    first: float = float("inf")
    last: float = 0.0


class Simulation:
    """One round; call `run` once.

    Args:
        setting: of the round.
        fleet: its servers.
        costs: of requests, as measured.
    """

    def __init__(self, setting: Setting, fleet: Fleet, costs: ServiceCosts) -> None:
        self._setting, self._costs = setting, costs
        rng = np.random.default_rng(setting.seed)
        self._uniform = Random(setting.seed).random
        self._devices = Population.draw(setting.devices, rng)
        self._slices = [Queue(fleet.cores, fleet.gbit) for _ in range(fleet.servers)]
        self._coordinator = Queue(fleet.coordinator_cores, fleet.gbit)
        names = {device_name(n): n for n in range(setting.devices)}
        self._names = list(names)
        self._current = Current("0-" + 64 * "0", 0, "open", names)
        terms = Terms(setting.goal, seconds=setting.deadline)
        self._machine = RoundMachine(terms, range(setting.devices), 0.0)
        self._retry, self._failures = Retry(), dict[int, int]()
        self._counts, self._turn = _Counts(), 0
        window = 1.0 if setting.is_herd else setting.pace.again
        begins = (window * rng.random(setting.devices)).tolist()
        # Kept apart from what follows from them: a small heap is a fast one.
        self._begins = sorted(((at, 8 * n) for n, at in enumerate(begins)), reverse=True)
        self._events: list[tuple[float, int]] = []

    def run(self) -> Outcome:
        """Plays the round until it closes, or nobody is left."""
        steps = (self._check_in, self._fetch, self._reached, self._update, self._answered)
        begins, events, machine, now = self._begins, self._events, self._machine, 0.0
        while (begins or events) and machine.closed is None:
            is_first = begins and (not events or begins[-1] <= events[0])
            now, code = begins.pop() if is_first else heappop(events)
            steps[code & 7](now, code >> 3)
        if machine.closed is None:  # all events are over, and the goal was out of reach
            now = machine.deadline
            machine.handle(Answered(-1, now))
        return self._outcome(now)

    def _check_in(self, now: float, device: int) -> None:
        costs = self._costs
        end = self._coordinator.serve(now, costs.checkin + costs.handshake, 0)
        if end is None:
            self._again(now, device, CHECK_IN)
            return
        self._counts.checkin_waits.append(end - now)
        told = admit(self._names[device], self._current, False, self._setting.pace, self._uniform)
        if isinstance(told, Admission):
            if self._devices.lost_at[device] != FETCH:
                heappush(self._events, (end + told.fetch_after, 8 * device + FETCH))
        else:
            heappush(self._events, (end + told.seconds, 8 * device + CHECK_IN))

    def _fetch(self, now: float, device: int) -> None:
        costs, counts = self._costs, self._counts
        self._turn = (self._turn + 1) % len(self._slices)
        size = costs.answer_bytes
        end = self._slices[self._turn].serve(now, costs.fetch + costs.handshake, size)
        second = int(now)
        counts.requests[second] = counts.requests.get(second, 0) + 1
        if end is None:
            self._again(now, device, FETCH)
            return
        counts.first, counts.last = min(counts.first, now), max(counts.last, now)
        counts.sent[int(end)] = counts.sent.get(int(end), 0) + size
        counts.waits.append(end - now)
        here = max(end, now + size / MEGABIT / self._devices.down[device])
        heappush(self._events, (here, 8 * device + REACHED))

    def _reached(self, now: float, device: int) -> None:
        self._machine.handle(Reached(device, now))
        if self._devices.lost_at[device] != REACHED:
            sending = self._costs.update_bytes / MEGABIT / self._devices.up[device]
            heappush(
                self._events, (now + self._devices.train[device] + sending, 8 * device + UPDATE)
            )

    def _update(self, now: float, device: int) -> None:
        costs = self._costs
        end = self._coordinator.serve(now, costs.update + costs.handshake, costs.update_bytes)
        if end is None:
            self._again(now, device, UPDATE)
            return
        heappush(self._events, (end, 8 * device + ANSWERED))

    def _answered(self, now: float, device: int) -> None:
        self._machine.handle(Answered(device, now))

    def _again(self, now: float, device: int, step: Literal[0, 1, 3]) -> None:
        """A device that was turned away comes back as the device of this package does."""
        self._counts.refused += 1
        failures = self._failures[device] = self._failures.get(device, 0) + 1
        if failures >= self._retry.attempts:
            self._counts.gave_up += 1
            return
        wait = self._retry.wait(failures, RETRY_AFTER, self._uniform())
        heappush(self._events, (now + wait, 8 * device + step))

    def _outcome(self, now: float) -> Outcome:
        machine, counts, asked = self._machine, self._counts, self._setting.devices
        sent = sum(outcome == "sent" for outcome in machine.outcomes.values())
        lost = sum(at >= 0 for at in self._devices.lost_at) + counts.gave_up
        came = max(counts.last - counts.first, 1.0)
        uses = [queue.use(came) for queue in self._slices]
        return Outcome(
            why=str(machine.closed),
            seconds=now,
            taken=sent,
            late=(asked - sent - lost) / asked,
            lost=lost / asked,
            refused=counts.refused,
            gave_up=counts.gave_up,
            requests_per_second=max(counts.requests.values(), default=0),
            gbit=8e-9 * max(counts.sent.values(), default=0),
            queue=max(queue.longest for queue in self._slices),
            waits=_percentiles(counts.waits),
            checkin_waits=_percentiles(counts.checkin_waits),
            use={name: max(use[name] for use in uses) for name in ("CPU", "line")},
            coordinator_use=self._coordinator.use(max(now, 1.0)),
            coordinator_seconds=self._coordinator.cpu_seconds,
            coordinator_queue=self._coordinator.longest,
        )


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    found = np.array(seconds or [0.0])
    return float(np.median(found)), float(np.percentile(found, 99))
