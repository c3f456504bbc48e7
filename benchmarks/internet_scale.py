"""A round of 10^6 devices in simulated time, and the planner beside it.

What a check-in, a fetch, an update and a TLS handshake cost is measured first, in the same run and
with the real service; the planner is given the same costs. Then devices of three kinds check in,
are spread by the coordinator's pace, fetch 1,000 slices of 256 bytes, train and send their updates.
The code that decides is that of real rounds: `admit` and `Pace`, `Retry`, and the round machine
with an over-selection of 1.3.

* round: 10^6 devices over 600 seconds, on as many servers as the planner says.
* removed: the same rate of devices, with fewer and fewer slice servers; the least with which 99 of
  100 fetches are answered within a second is compared with what the planner says, and so is the
  resource that runs out first. Once with few cores, once with a narrow line.
* herd: a tenth of the devices on a tenth of the servers, all at once and without pace.

    python benchmarks/internet_scale.py --check
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Goal, finish, machine_facts, parser, progress
from keyhole.aggregation import aggregation_named
from keyhole.planner import capacity
from keyhole.planner.prices import price_of
from keyhole.pricing import ServiceSpeeds, Workload, measured
from keyhole.wire.assignment import Pace
from round_cells.service_costs import (
    ServiceCosts,
    measure_service,
    planned_fetch,
    planned_update,
    speeds_of,
)
from round_cells.simulated_round import Fleet, Outcome, Setting, Simulation

NUM_KEYS, KEYS_PER_CLIENT, SLICE_BYTES = 10**9, 1_000, 256
DEVICES, SECONDS, AGAIN = 10**6, 600.0, 300.0
CORES, GBIT = 32, 25.0
FEW = 50_000  # devices of the runs with fewer servers, at the same rate
NARROW = {"CPU": (2, 25.0), "line": (32, 1.0)}  # resource that runs out -> cores, Gbit/s
PATIENCE = 1.0  # seconds, within which 99 of 100 fetches are to be answered
FACTOR = 2.0  # between what the planner says and what is needed
WORK_FACTOR = 1.5  # between CPU seconds planned and spent
HERD_TIMES = 10.0  # times as long as with pace
MAX_SECONDS, MAX_BYTES = 60.0, 2e9
RESULTS = Path(__file__).parent / "results" / "internet_scale.json"


@dataclass(frozen=True)
class Costs:
    """What was measured first."""

    costs: ServiceCosts

    def goals(self) -> list[Goal]:
        found, ours = self.costs, measured(ServiceSpeeds)
        planned = {
            "fetch": planned_fetch(found.answer_bytes),
            "update": planned_update(found.update_bytes),
            "handshake": ours.handshake_seconds,
            "add": ours.adding_seconds(found.update_bytes),
        }
        goals = []
        for name, seconds in planned.items():
            spent = getattr(found, name)
            close = min(seconds / spent, spent / seconds) if spent else 1.0
            goals.append(Goal(f"planner's {name} beside the measured", close, 1 / FACTOR))
        return goals

    def __str__(self) -> str:
        found = self.costs
        milli = {name: 1e3 * getattr(found, name) for name in ("checkin", "fetch", "update", "add")}
        shown = ", ".join(f"{name} {value:.2f}" for name, value in milli.items())
        return f"CPU ms of a request: {shown}, handshake {1e3 * found.handshake:.2f}"


@dataclass(frozen=True)
class Round:
    """The whole round.

    Args:
        devices: that were asked.
        planned: slice servers.
        planned_seconds: CPU seconds of the coordinator for the devices that came.
        outcome: what became of it.
        simulated_in: CPU seconds of the simulation.
        peak_bytes: of this process.
    """

    devices: int
    planned: int
    planned_seconds: float
    outcome: Outcome
    simulated_in: float
    peak_bytes: int

    def goals(self) -> list[Goal]:
        found, planned = self.outcome, self.planned_seconds
        rate = DEVICES / SECONDS
        return [
            Goal("the round closes at its goal", float(found.why == "goal"), 1),
            Goal("nobody is turned away", float(found.refused == 0), 1),
            Goal("1 s over the 99th percentile of fetches", PATIENCE / found.waits[1], 1),
            Goal("planned requests a second over the peak", rate / found.requests_per_second, 0.8),
            Goal(
                "coordinator CPU, planned over spent",
                planned / found.coordinator_seconds,
                1 / WORK_FACTOR,
            ),
            Goal(
                "coordinator CPU, spent over planned",
                found.coordinator_seconds / planned,
                1 / WORK_FACTOR,
            ),
            Goal("a minute over the simulation", MAX_SECONDS / self.simulated_in, 1),
            Goal("2 GB over its memory", MAX_BYTES / self.peak_bytes, 1),
        ]

    def __str__(self) -> str:
        found = self.outcome
        return (
            f"round   {self.devices} devices: {found.why} after {found.seconds:.0f} s,"
            f" {found.taken} updates, {found.late:.1%} late, {found.lost:.1%} lost;"
            f" peak {found.requests_per_second}/s, {found.gbit:.1f} Gbit/s, queue {found.queue};"
            f" fetches {1e3 * found.waits[0]:.1f} ms, 99 of 100 in {1e3 * found.waits[1]:.1f};"
            f" coordinator {found.coordinator_use['CPU']:.0%} CPU,"
            f" queue {found.coordinator_queue}; simulated in {self.simulated_in:.0f} s,"
            f" {self.peak_bytes / 1e9:.1f} GB"
        )


@dataclass(frozen=True)
class Removed:
    """Slice servers taken away one after the other.

    Args:
        cores: of a server.
        gbit: of its line.
        planned: servers, and `first` the resource that runs out, by the planner.
        needed: the least that kept up.
        saturated: which resource was busiest with one server fewer; where one was enough, with it.
        outcomes: servers -> what became of the round.
    """

    cores: int
    gbit: float
    planned: int
    first: str
    needed: int
    saturated: str
    outcomes: dict[int, Outcome]

    def goals(self) -> list[Goal]:
        where = f"{self.cores} cores, {self.gbit:g} Gbit/s"
        return [
            Goal(f"planned servers over needed, {where}", self.planned / self.needed, 1),
            Goal(f"needed servers over planned, {where}", self.needed / self.planned, 1 / FACTOR),
            Goal(f"the resource is the planned one, {where}", self.first == self.saturated, 1),
        ]

    def __str__(self) -> str:
        shown = "; ".join(
            f"{servers}: {1e3 * one.waits[1]:.0f} ms, CPU {one.use['CPU']:.0%}, line"
            f" {one.use['line']:.0%}, queue {one.queue}, refused {one.refused}"
            for servers, one in self.outcomes.items()
        )
        return (
            f"removed {self.cores} cores, {self.gbit:g} Gbit/s: planned {self.planned}"
            f" ({self.first}), needed {self.needed} ({self.saturated}); {shown}"
        )


@dataclass(frozen=True)
class Herd:
    """The same devices and servers with pace and without."""

    devices: int
    paced: Outcome
    herd: Outcome

    def goals(self) -> list[Goal]:
        times = self.herd.checkin_waits[1] / self.paced.checkin_waits[1]
        return [
            Goal("wait of a herd over that with pace, times", times, HERD_TIMES),
            Goal("nobody is turned away with pace", float(self.paced.refused == 0), 1),
        ]

    def __str__(self) -> str:
        shown = [
            f"{name}: check-in 99 of 100 in {one.checkin_waits[1]:.2f} s, fetch in"
            f" {one.waits[1]:.2f} s, {one.refused} refused, {one.gave_up} gave up, goal after"
            f" {one.seconds:.0f} s"
            for name, one in (("paced", self.paced), ("herd", self.herd))
        ]
        return f"herd    {self.devices} devices on a tenth of the servers; {'; '.join(shown)}"


def need_of(devices: int) -> Workload:
    """Returns the public numbers of a round of this many clients."""
    return Workload(NUM_KEYS, KEYS_PER_CLIENT, SLICE_BYTES, devices)


def planned_slices(costs: ServiceCosts, devices: int, fleet: capacity.Fleet) -> capacity.PartyNeed:
    """What the planner says of slice servers."""
    need, speeds = need_of(devices), speeds_of(costs)
    (found,) = capacity.delivery_needs(price_of("pregenerated", need), need, fleet, speeds)
    return found


def planned_coordinator_seconds(costs: ServiceCosts, came: int, answered: int) -> float:
    """CPU seconds that the planner gives the coordinator, for check-ins and for updates."""
    fleet, speeds = capacity.Fleet(1.0), speeds_of(costs)
    checkins = capacity.checkin_need(need_of(came), fleet, speeds).cores
    need = need_of(answered)
    updates = capacity.sum_needs(aggregation_named("plain").price(need), need, fleet, speeds)[0]
    return checkins + updates.cores


def play_round(costs: ServiceCosts, devices: int) -> Round:
    """The round, on the servers that the planner says."""
    planned = planned_slices(
        costs, devices, capacity.Fleet(SECONDS * devices / DEVICES, CORES, GBIT)
    )
    scale = devices / DEVICES
    setting = Setting(devices, Pace(SECONDS * scale, AGAIN * scale))
    start = time.process_time()
    gc.disable()  # there are millions of events, and no cycles among them
    outcome = Simulation(setting, Fleet(planned.servers, CORES, GBIT), costs).run()
    gc.enable()
    spent = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = planned_coordinator_seconds(costs, devices, outcome.taken)
    return Round(devices, planned.servers, seconds, outcome, spent, peak)


def remove_servers(costs: ServiceCosts, cores: int, gbit: float) -> Removed:
    """Takes servers away until fetches wait."""
    seconds = SECONDS * FEW / DEVICES
    planned = planned_slices(costs, FEW, capacity.Fleet(seconds, cores, gbit))
    setting = Setting(FEW, Pace(seconds, AGAIN * FEW / DEVICES))
    outcomes: dict[int, Outcome] = {}
    for servers in range(planned.servers, 0, -1):
        progress(f"{servers} servers of {cores} cores, {gbit:g} Gbit/s")
        outcomes[servers] = one = Simulation(setting, Fleet(servers, cores, gbit), costs).run()
        if one.waits[1] > PATIENCE or one.refused:
            break
    needed = min(
        (n for n, one in outcomes.items() if one.waits[1] <= PATIENCE), default=planned.servers + 1
    )
    use = outcomes[min(outcomes)].use
    saturated = max(use, key=lambda name: use[name])
    return Removed(cores, gbit, planned.servers, planned.first, needed, saturated, outcomes)


def play_herd(costs: ServiceCosts, devices: int) -> Herd:
    """A tenth of everything: with pace, and all at once."""
    fleet = Fleet(1, CORES // 10, GBIT / 10, coordinator_cores=CORES // 10)
    paced = Setting(devices, Pace(SECONDS * devices * 10 / DEVICES, AGAIN * devices * 10 / DEVICES))
    herd = Setting(devices, Pace(spread=0.0, again=5.0), is_herd=True)
    found = [Simulation(setting, fleet, costs).run() for setting in (paced, herd)]
    return Herd(devices, *found)


def main() -> int:
    flags = parser(__doc__.splitlines()[0], RESULTS).parse_args()
    print(machine_facts())
    progress("what requests cost")
    costs = measure_service(KEYS_PER_CLIENT, 500 if flags.quick else 2_000)
    cells: list[Costs | Round | Removed | Herd] = [Costs(costs)]
    print(cells[0])
    devices = DEVICES // 10 if flags.quick else DEVICES
    progress(f"a round of {devices} devices")
    cells.append(play_round(costs, devices))
    print(cells[-1])
    for cores, gbit in NARROW.values():
        cells.append(remove_servers(costs, cores, gbit))
        print(cells[-1])
    progress("a herd")
    cells.append(play_herd(costs, devices // 10))
    print(cells[-1])
    goals = [goal for cell in cells for goal in cell.goals()]
    show(goals)
    return finish(flags, "internet_scale", cells, goals)


def show(goals: Sequence[Goal]) -> None:
    for goal in goals:
        print(f"{'met   ' if goal.is_met() else 'MISSED'}  {goal}")


if __name__ == "__main__":
    sys.exit(main())
