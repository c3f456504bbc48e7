"""Tells operators of rounds, in the log and as gauges: at the trainer, and at a service.

    round opened    its number, cohort and goal
    resumed         once, after the last round of those that were made before
    gathering       devices that wait for a round that is yet to be drawn from them
    waiting         updates of the goal, devices to come; once a second, and once a minute while
                    nothing happens
    round closed    why, with how many updates count
    round empty     a warning: no update counted
    incident        a warning: what went wrong beside the devices
    traffic         once a minute, where anything was answered: counts of all devices together

Told are counts. No key, no update, no token and no device is named.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import get_args

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from keyhole.errors import KeyholeError
from keyhole.logs import Fact, tell
from keyhole.rounds.machine import Why
from keyhole.rounds.record import RoundRecord
from keyhole.service.inbox import Waiting
from keyhole.service.metrics import REFUSED
from keyhole.service.status import (
    RoundFiles,
    RoundStatus,
    RunsFiles,
    TrainerProgress,
    counted,
    gathers,
    waits,
    write_progress,
)

_LOOK_EVERY = 1.0  # seconds between two looks of a service at its rounds
_GAUGE = "keyhole_round_"  # begins the names of gauges
_AGAIN = 60.0  # seconds after which a line on what is waited for is repeated
_ALIVE_EVERY = 2.0  # seconds after which a trainer that waits says that it is there
_LINE_EVERY = 5.0  # seconds between two lines of a service on one round
_TRAFFIC = {  # counts of a service -> what they are called in its log
    "stored": "updates",
    "bytes": "bytes",
    "private": "private_queries",
    "relayed": "requests",
    "refusals": "refused",  # the last, and told by kind
}


_GAUGES = {
    "number": "Number of the current round, from 0.",
    "open": "Whether the current round takes updates.",
    "cohort": "Devices that take part in the current round.",
    "checked_in": "Devices that were told to take part in it.",
    "updates": "Updates of the current round that are here.",
    "refused": "Updates of the current round that were refused.",
    "goal": "Updates with which the current round closes.",
    "seconds_open": "Seconds since the current round was opened.",
    "bytes": "Bytes of the updates of the current round that are here.",
    "devices_waiting": "Devices that wait to be drawn into a round.",
}


def round_gauges(statuses: Mapping[str, RoundStatus]) -> Iterator[Metric]:
    """Returns how the rounds of runs stand, by the names of the runs, as gauges; what nobody has
    said is left out. Those of a run with a name have it as label `run`."""
    for name, text in _GAUGES.items():
        family = GaugeMetricFamily(_GAUGE + name, text)
        for run, status in statuses.items():
            shown = {"open": float(status.phase == "open"), "devices_waiting": status.waiting}
            value = shown[name] if name in shown else getattr(status, name)
            if value is not None:
                family.add_sample(_GAUGE + name, {"run": run} if run else {}, value)
        if family.samples:
            yield family


def statuses_from(page: str) -> dict[str, RoundStatus]:
    """Returns how rounds stand by the gauges of a page of metrics, by the names of their runs.

    Raises:
        ValueError: it is no such page.
    """
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(_GAUGE) and sample.labels.keys() <= {"run"}:
                of_run = found.setdefault(sample.labels.get("run", ""), {})
                of_run[sample.name.removeprefix(_GAUGE)] = sample.value
    return {run: _status_of(each) for run, each in found.items() if "number" in each}


def _status_of(found: Mapping[str, float]) -> RoundStatus:
    count = {name: int(value) for name, value in found.items()}
    return RoundStatus(
        "",
        count["number"],
        "open" if count.get("open") else "closed",
        count.get("cohort"),
        count.get("goal"),
        count.get("updates", 0),
        count.get("refused", 0),
        count.get("bytes"),
        found.get("seconds_open"),
        checked_in=count.get("checked_in"),
        waiting=count.get("devices_waiting"),
    )


def gauges_of(files: RunsFiles, now: Callable[[], float] = time.time) -> Iterator[Metric]:
    """Returns how the current rounds of a service's folder stand, as gauges."""
    with suppress(KeyholeError, OSError):  # it is being replaced: the next look finds it
        yield from round_gauges(files.statuses(now()))


def tell_end(record: RoundRecord) -> None:
    """Writes a line on how a round ended: a warning where no update counted."""
    facts: dict[str, Fact] = {"round": record.round, "closed": record.closed, "step": record.step}
    facts |= {"updates": len(record.staleness), "cohort": len(record.clients)}
    facts |= {"bytes_down": sum(record.bytes_down), "bytes_up": sum(record.bytes_up)}
    event, level = ("empty", "warning") if record.is_skipped else ("closed", "info")
    tell("trainer", f"round {event}", record.told, level, **facts)


@dataclass(eq=False)  # the registry takes what has an identity
class TrainerTelling:
    """Tells of the rounds of a trainer: in its log, as gauges, and to those who look at its rounds
    directory. It is called at every look at the inbox; `closed` ends a round.

    Args:
        rounds: the rounds directory.
        run: the folder of the run.
        is_quiet: whether a screen shows what is waited for, so that the log need not.
        kept: rounds of the run that were made before: no line tells of them again.
        now: unix seconds.
    """

    rounds: Path
    run: Path
    is_quiet: bool = False
    kept: int = 0
    now: Callable[[], float] = time.time
    _told: TrainerProgress | None = field(default=None, repr=False)
    _said: tuple[float, int] = field(default=(0.0, 0), repr=False)  # when, and how many updates
    _closed: Counter[str] = field(default_factory=Counter, repr=False)  # why -> rounds
    _empty: list[int] = field(default_factory=list, repr=False)
    _incidents: int = field(default=0, repr=False)
    _gathered: Waiting | None = field(default=None, repr=False)  # what the last line said of it
    _gathered_at: float = field(default=-inf, repr=False)

    def __post_init__(self) -> None:
        self._files = RoundFiles(self.rounds)

    def __call__(self, waiting: Waiting) -> None:
        """Takes note of what a round waits for."""
        now, before = self.now(), self._told
        if not waiting.is_drawn:
            self._gather(waiting, now)
            return
        is_new = before is None or before.round != waiting.name
        told = TrainerProgress(
            waiting.name,
            waiting.round,
            waiting.here,
            waiting.goal,
            opened=now if before is None or is_new else before.opened,
            seen=now,
            closes=now + waiting.seconds if isfinite(waiting.seconds) else None,
            run="/".join(self.run.parts[-2:]),
            closed=self._closed.total(),
            empty=len(self._empty),
            last_empty=self._empty[-1] if self._empty else None,
            measures=waiting.measures,
        )
        is_changed = before is None or is_new or before.updates != told.updates
        if before is None or is_changed or before.needs or now - before.seen >= _ALIVE_EVERY:
            self._told = told
            self._write(told)
        if waiting.round < self.kept:
            return
        if is_new:
            self._say_opened(waiting)
        elif not self.is_quiet:
            self._say_waiting(waiting)

    def _gather(self, waiting: Waiting, now: float) -> None:
        """Takes note of devices that wait for the next round, before it is drawn. That the model
        is to be measured is told on a screen as well."""
        if self._told is not None and now - self._told.seen >= _LOOK_EVERY:
            then = {"needs": waiting.goal, "measures_next": waiting.measures}
            self._told = msgspec.structs.replace(self._told, seen=now, **then)
            self._write(self._told)
        last, named = self._gathered, (waiting.round, waiting.measures)
        is_new = last is None or (last.round, last.measures) != named
        is_news = is_new or (last is not None and last.here != waiting.here)
        if self.is_quiet and not (is_new and waiting.measures):
            return
        if waiting.round < self.kept or not (is_news or now - self._gathered_at >= _AGAIN):
            return
        self._gathered, self._gathered_at = waiting, now
        left = waiting.seconds
        text = gathers(waiting.round, waiting.here, waiting.goal, waiting.measures, left)
        facts: dict[str, Fact] = {"round": waiting.round, "waiting": waiting.here}
        facts |= {"seconds": round(left, 1) if isfinite(left) else None}
        event = "evaluation" if waiting.measures else "gathering"
        tell("trainer", event, text, goal=waiting.goal, **facts)

    def _waiting(self, now: float) -> int | None:
        """How many devices wait to be drawn; None where none do, or nobody knows."""
        with suppress(KeyholeError, OSError):
            status = self._files.status(now)
            return None if status is None else status.waiting
        return None

    def _write(self, told: TrainerProgress) -> None:
        with suppress(KeyholeError):  # a full disk is told of by those who need it
            write_progress(self.rounds, told)

    def end(self) -> None:
        """Says to those who look that the trainer ends."""
        if self._told is not None:
            self._write(msgspec.structs.replace(self._told, needs=0, ended=True, closes=None))

    def closed(self, record: RoundRecord) -> None:
        """Says how a round ended, and what went wrong in it."""
        self._closed[record.closed] += 1
        for incident in record.incidents:
            self._incidents += 1
            tell("trainer", "incident", f"round {record.round}: {incident}", "warning")
        if record.is_skipped:
            self._empty.append(record.round)
        tell_end(record)

    def page(self) -> bytes:
        """Returns all numbers, as Prometheus reads them."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for."""
        with suppress(KeyholeError, OSError):  # it is being replaced: the next look finds it
            status = self._files.status(self.now())
            yield from round_gauges({} if status is None else {"": status})
        closed = CounterMetricFamily(
            "keyhole_rounds_closed", "Rounds that this trainer has closed.", labels=["why"]
        )
        for why in get_args(Why):
            closed.add_metric([why], self._closed[why])
        yield closed
        empty = "Rounds that closed without an update that counts."
        yield CounterMetricFamily("keyhole_rounds_empty", empty, value=len(self._empty))
        incidents = "What went wrong beside the devices."
        yield CounterMetricFamily("keyhole_round_incidents", incidents, value=self._incidents)

    def _say_opened(self, waiting: Waiting) -> None:
        cohort = waiting.here + len(waiting.missing)
        seconds = round(waiting.seconds, 1) if isfinite(waiting.seconds) else None
        published = waiting.name.partition("-")[0]
        also = f" (round {published} of the service)" * (published != str(waiting.round))
        opened = "measures the model" if waiting.measures else "is open"
        answers = counted(waiting.goal, "answer" if waiting.measures else "update")
        text = (
            f"round {waiting.round}{also} {opened}: waits for {answers} of "
            f"{counted(cohort, 'device')}{f', at most {seconds:,.0f} s' if seconds else ''}"
        )
        facts: dict[str, Fact] = {"round": waiting.round, "round_id": waiting.name}
        facts |= {"cohort": cohort, "goal": waiting.goal, "updates": waiting.here}
        tell("trainer", "round opened", text, seconds=seconds, **facts)
        self._said = self.now(), waiting.here

    def _say_waiting(self, waiting: Waiting) -> None:
        """Once a second while updates come, once a minute while none do."""
        (at, here), now = self._said, self.now()
        if now - at < (_AGAIN if here == waiting.here else _LOOK_EVERY):
            return
        self._said = now, waiting.here
        ready, missing = self._waiting(now), len(waiting.missing)
        measures = waiting.measures
        text = waits(waiting.round, waiting.here, waiting.goal, missing, ready, measures=measures)
        facts: dict[str, Fact] = {"round": waiting.round, "updates": waiting.here}
        facts |= {"goal": waiting.goal, "missing": missing, "waiting": ready}
        tell("trainer", "waiting", text, **facts)


@dataclass
class ServiceTelling:
    """Tells in the log of a service of the rounds that it serves, and how much it has answered. It
    is called now and then by the process above all workers.

    Args:
        part: what it is: service, relay, aggregator.
        rounds: the rounds directory; None where it has none.
        now: unix seconds.
    """

    part: str
    rounds: Path | None = None
    now: Callable[[], float] = time.time
    _looked: float = field(default=-inf, repr=False)
    _said: dict[str, float] = field(default_factory=dict, repr=False)
    _told: dict[str, RoundStatus] = field(default_factory=dict, repr=False)
    _counts: Mapping[str, float] = field(default_factory=dict, repr=False)
    _counted: float = field(default=inf, repr=False)

    def __post_init__(self) -> None:
        self._files = None if self.rounds is None else RunsFiles(self.rounds)

    def __call__(self, totals: Callable[[], Mapping[str, float]]) -> None:
        """Looks at the rounds and the counts of all workers, if it is time to."""
        now = self.now()
        if now - self._looked < _LOOK_EVERY:
            return
        self._looked = now
        counts = totals()
        if self._files is not None:
            with suppress(KeyholeError, OSError):  # the folder is being replaced: look again
                self._look(self._files.statuses(now), int(counts["checked_in"]), now)
        if self._counted == inf:  # the first look
            self._counted, self._counts = now, counts
        if now - self._counted >= _AGAIN:
            self._counted = now
            self._say_traffic(counts)

    def _look(self, statuses: Mapping[str, RoundStatus], checked_in: int, now: float) -> None:
        is_alone = statuses.keys() <= {""}  # else it is not known in whose round they are
        for run, status in statuses.items():
            told = msgspec.structs.replace(status, checked_in=checked_in if is_alone else None)
            self._look_at(run, told, now)

    def _look_at(self, run: str, status: RoundStatus, now: float) -> None:
        before = self._told.get(run)
        is_new = before is None or before.round != status.round
        is_over = status.phase == "closed" and (is_new or before is None or before.phase == "open")
        seen = before and (before.updates, before.refused, before.checked_in)
        is_changed = seen != (status.updates, status.refused, status.checked_in)
        if is_new and status.phase == "open":
            does = "measures the model" if status.measures else "is open"
            self._say(run, "round opened", f"round {status.number} {does}", status, now)
        elif is_over:
            self._say(run, "round closed", status.told, status, now)
        elif status.phase == "open" and is_changed and now - self._said[run] >= _LINE_EVERY:
            here = status.checked_in
            there = "" if here is None else f"; {counted(here, 'device')} checked in"
            self._say(run, "waiting", f"{status.told}{there}", status, now)
        else:
            return
        self._told[run] = status

    def _say(self, run: str, event: str, text: str, status: RoundStatus, now: float) -> None:
        names = ("cohort", "goal", "updates", "refused", "checked_in", "bytes")
        facts: dict[str, Fact] = {name: getattr(status, name) for name in names}
        facts |= {"round": status.number, "round_id": status.round}
        facts |= {"run": run} if run else {}
        tell(self.part, event, f"{run}: {text}" if run else text, **facts)
        self._said[run] = now

    def _say_traffic(self, counts: Mapping[str, float]) -> None:
        """What was answered since the last time, if anything was."""
        before, self._counts = self._counts, counts
        new = {n: int(counts[name] - before.get(name, 0)) for name, n in _TRAFFIC.items()}
        if any(new.values()):
            words = [f"{count:,} {name.replace('_', ' ')}" for name, count in new.items() if count]
            kinds = {n: int(counts[n] - before.get(n, 0)) for n in counts if n.startswith(REFUSED)}
            why = [f"{count:,} {n.removeprefix(REFUSED)}" for n, count in kinds.items() if count]
            words += [f"{words.pop()} ({', '.join(why)})"] if why else []
            tell(self.part, "traffic", f"since the last such line: {', '.join(words)}", **new)
