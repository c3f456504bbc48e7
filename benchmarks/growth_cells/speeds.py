"""The planner's speeds, from what was measured: fits, and the file that the planner reads."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import keyhole
from growth_cells.places import Line, Place
from growth_cells.service import ADDING, ADDING_ALL, FETCH, UPDATE
from harness import Goal, machine_facts, progress
from keyhole.aggregation.plain import PLAIN, merged_rows
from keyhole.pricing import ServiceSpeeds, Speeds, Workload, measured
from round_cells.requests import Round
from round_cells.service_costs import handshake_seconds, planned_fetch, planned_update

MEASURED = Path(keyhole.__file__).with_name("measured.json")
COMMAND = "python benchmarks/growth.py --write"
FACTOR = 2.0  # between what the planner says and what was measured
_DIGITS = 2
_CALIBRATIONS = 3
CALIBRATE = (
    *(sys.executable, "-c", "from keyhole.cli.main import main; main()"),
    *("plan", "--calibrate", "--json", "--num-keys", "10000", "--keys-per-client", "100"),
    *("--slice-bytes", "2000", "--cohort", "50"),  # what is planned makes no difference
)
_TABLE = 10_000, 64  # keys and numbers of a slice, where devices connect


@dataclass(frozen=True)
class Handshake:
    """CPU seconds of the service for a new connection with TLS."""

    seconds: float

    def goals(self) -> list[Goal]:
        """The planner has it right."""
        return _agree("a handshake", measured(ServiceSpeeds).handshake_seconds, self.seconds)


def measure_handshake(count: int = 300) -> Handshake:
    """Connects anew, again and again."""
    with tempfile.TemporaryDirectory(prefix="growth-") as made:
        return Handshake(handshake_seconds(Round.publish(Path(made), *_TABLE), count))


def planner_goals(lines: Iterable[Line]) -> list[Goal]:
    """The planner's seconds are those that were measured, at every point."""
    planned: dict[str, Callable[[Place, float], float]] = {
        FETCH: lambda _, size: planned_fetch(size),
        UPDATE: lambda _, size: planned_update(size),
        ADDING: lambda _, size: measured(ServiceSpeeds).adding_seconds(size),
        ADDING_ALL: lambda place, _: PLAIN.price(_workload(place)).seconds_by["trainer"],
    }
    return [
        goal
        for line in lines
        if line.of in planned
        for place, one in zip(line.places, line.spent, strict=True)
        for goal in _agree(
            f"{line.of} at {line.axis} {getattr(place, line.axis)}",
            planned[line.of](place, one.message),
            one.cpu,
        )
    ]


def _agree(name: str, planned: float, spent: float) -> list[Goal]:
    close = min(planned / spent, spent / planned) if spent else 1.0
    return [Goal(f"planner's seconds of {name} beside the measured", close, 1 / FACTOR)]


def write_speeds(lines: Sequence[Line], handshake: Handshake) -> None:
    """Writes what the planner computes with; what was measured elsewhere stays."""
    record = json.loads(MEASURED.read_text())
    progress(f"calibrating, {_CALIBRATIONS} times")
    runs = [_calibrated() for _ in range(_CALIBRATIONS)]
    known = record[Speeds.__name__]["speeds"]
    deliveries = {name: statistics.median(run[name] for run in runs) for name in known}
    fetch, update, adding = (_points(lines, of) for of in (FETCH, UPDATE, ADDING))
    request, sent = fit(fetch)
    stored, received = fit(update)
    once, added = fit(adding)
    (crowd,) = (line for line in lines if line.of == ADDING_ALL)
    service = {
        "request_seconds": request,
        "sending": 1 / max(sent - 1 / deliveries["gather"], sent / 10),
        "receiving": 1 / received,
        "store_seconds": max(stored - request, stored / 10),
        "handshake_seconds": handshake.seconds,
        "add_seconds": once,
        "adding": 1 / added,
        "merging": _merging(crowd, once, added),
    }
    known = record[ServiceSpeeds.__name__]["speeds"]
    for kind, speeds in ((Speeds, deliveries), (ServiceSpeeds, {**known, **service})):
        facts = {name: machine_facts()[name] for name in ("cpu", "cores", "date", "commit")}
        rounded = {name: float(f"{value:.{_DIGITS}g}") for name, value in speeds.items()}
        record[kind.__name__] = {"by": COMMAND, **facts, "speeds": rounded}
    MEASURED.write_text(json.dumps(record, indent=1) + "\n")


def _calibrated() -> dict[str, float]:
    """Speeds of deliveries, in a process of its own: new memory is a part of what they cost."""
    done = subprocess.run(CALIBRATE, check=True, capture_output=True, text=True)
    speeds: dict[str, float] = json.loads(done.stdout)["speeds"]
    return speeds


def _merging(line: Line, once: float, added: float) -> float:
    """Bytes a second of what is left, of the largest crowd, once updates are in their blocks."""
    place, one = line.places[-1], line.spent[-1]
    row = one.message // place.keys_per_client
    left = one.cpu - place.cohort * (once + added * one.message)
    return merged_rows(_workload(place)) * row / max(left, one.cpu / 10)


def _workload(place: Place) -> Workload:
    return Workload(place.num_keys, place.keys_per_client, place.slice_bytes, place.cohort)


def _points(lines: Iterable[Line], of: str) -> list[tuple[int, float]]:
    return [(one.message, one.cpu) for line in lines if line.of == of for one in line.spent]


def fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Returns seconds of a message whatever its length, and for each byte: the least squares of
    relative errors.

    >>> fit([(0, 1.0), (10, 21.0), (1000, 2001.0)])
    (1.0, 2.0)
    """
    sizes, seconds = np.array(points).T
    weighed = np.stack([np.ones_like(sizes), sizes]).T / seconds[:, None]
    once, byte = np.linalg.lstsq(weighed, np.ones(len(points)), rcond=None)[0]
    return max(float(once), 1e-9), max(float(byte), 1e-15)
