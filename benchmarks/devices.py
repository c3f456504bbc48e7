"""Two thousand devices that check in, wait and take part: nothing lost, and CPU beside nginx.

`keyhole serve` runs as operators run it, with tokens and one worker, on a core of its own; devices
are threads in a few processes, each with a token and a connection of its own, and speak everything
that a real one speaks. This process is the trainer: every round draws half of the devices from
those that wait.

* Lost updates: every device moves a row of its own by one in each round that it takes part in. Each
  row of the trained model must be the number of updates that were acknowledged to its device.
* Deadlines: a round that would close by its deadline, and how long rounds were open.
* CPU time of the service, user and system, for each device and round that it took part in, with all
  check-ins of those that wait. nginx then serves the same bytes: as many requests, of the same
  lengths up and down, from files and, for updates, into files. It checks no token and no proof,
  chooses no slices, and does not wait for the disk. nginx comes from a Debian package
  (`apt install nginx`); without it that part is left out.

--quick takes 200 devices and 3 rounds.

    python benchmarks/devices.py --check
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device_cells.crowd import Simulated, living
from harness import Goal, left_out, parser, progress, run_steps
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.rounds.clients import Clients
from keyhole.rounds.loop import start_run
from keyhole.rounds.record import RoundRecord
from keyhole.rounds.spec import RunParts
from keyhole.sampling import UNCOUNTED, Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring, new_key
from keyhole.service.inbox import SpoolInbox, Waiting
from keyhole.service.lobby import Lobby, WaitingRoom
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from slice_peers import nginx
from slice_peers.contest import burst, contestant, load_process
from slice_peers.load import ask, http_length
from slice_peers.processes import cpu_seconds, free_port, serving

RESULTS = Path(__file__).parent / "results" / "devices.json"
COMMAND = (sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve")
NUM_KEYS, WIDTH, KEYS_PER_CLIENT = 20_000, 64, 100  # slices of 256 bytes
DEVICES, ROUNDS, PROCESSES = 2_000, 20, 4
DEADLINE = 120.0  # seconds that a round is open
AGAIN = 5.0  # seconds, on average, until a device that waits asks again: the service's default
SAMPLES, SECONDS = 5, 0.6
RATIO_GOAL = 0.05  # tokens, a choice, proofs and a durable disk are worth that


@dataclass(frozen=True)
class Cell:
    """A run.

    Args:
        took_part: devices and rounds that they took part in: updates that were acknowledged.
        counted: updates in the records of the rounds.
        lost: acknowledged updates that the model lacks, and ones that it has too many.
        over_deadline: rounds that closed by their deadline.
        longest: seconds that a round was open.
        misses: times that a device was told that a round is over.
        requests: of the service for each device and round: check-ins of those that wait, too.
        bytes_down: in the answers to these.
        service_ms: CPU time of the service for each device and round.
        nginx_ms: CPU time of nginx for requests of the same lengths; None without it.
    """

    devices: int
    rounds: int
    cohort: int
    took_part: int
    counted: int
    lost: int
    over_deadline: int
    deadline: float
    longest: float
    misses: int
    requests: float
    bytes_down: float
    service_ms: float
    nginx_ms: float | None
    seconds: float

    def goals(self) -> list[Goal]:
        took = max(self.took_part, 1)
        goals = [
            Goal("updates that the model has, of those acknowledged", 1 - self.lost / took, 1.0),
            Goal("updates in records, of those acknowledged", self.counted / took, 1.0),
            Goal("devices and rounds, of those asked", took / (self.cohort * self.rounds), 1.0),
            Goal("rounds within their deadline", 1 - self.over_deadline / self.rounds, 1.0),
        ]
        if self.nginx_ms is not None:
            ratio = self.nginx_ms / self.service_ms
            goals.append(Goal("CPU time of nginx for the same bytes over ours", ratio, RATIO_GOAL))
        return goals


def make_state(devices: int) -> ServerState:
    """A table of random rows; those of devices are zero."""
    rows = np.random.default_rng(0).standard_normal((NUM_KEYS, WIDTH), np.float32)
    rows[:devices] = 0
    layout = Layout.of({"w": rows}, Cut(KeySpace("row", NUM_KEYS), {"w": 0}))
    return ServerState.dense(layout, {"w": rows}, SGD(1.0))


def _elsewhere(*_: object) -> object:
    raise AssertionError("the trainer has no client")


@dataclass
class Trained:
    """What a trainer saw: its records, and how long the longest of its rounds was open."""

    records: list[RoundRecord]
    rows: np.ndarray
    longest: float


def train(folder: Path, devices: int, rounds: int) -> Trained:
    """The trainer: draws cohorts from those that wait, and adds up what they send."""
    longest = 0.0

    def told(waiting: Waiting) -> None:
        nonlocal longest
        if waiting.is_drawn:
            longest = max(longest, DEADLINE - waiting.seconds)

    parts = RunParts(
        Cohorts(UNCOUNTED, devices // 2, sampling="check-in"),
        {"row": KEYS_PER_CLIENT},
        over="choosers",
    )
    clients = Clients(UNCOUNTED, _elsewhere, _elsewhere, _elsewhere)
    directory = folder / "rounds"
    with Publisher(directory) as publisher:
        kind = Served(
            publisher,
            SpoolInbox(UpdateSpool(directory / "updates")),
            seconds=DEADLINE,
            lobby=Lobby(WaitingRoom(directory)),
            on_arrival=told,
        )
        run = start_run(make_state(devices), clients, parts, folder / "run", kind)
        records = []
        for record in run.rounds(rounds):
            records.append(record)
            progress(f"round {record.round}: {len(record.staleness)} updates, {record.closed}")
        rows = run.state.model()["w"]
        run.close()
    return Trained(records, rows, longest)


@contextmanager
def service(folder: Path, key: str):
    """`keyhole serve`; gives its port and process."""
    (folder / "token.key").touch(0o600)
    (folder / "token.key").write_text(key)
    (folder / "rounds").mkdir()
    port = free_port()
    command = [*COMMAND, folder / "rounds", "--port", port, "--token-key", folder / "token.key"]
    command += ["--again", AGAIN, "--log-level", "warning"]
    with serving([str(part) for part in command], port) as pid:
        ask(port, b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n", http_length)  # it has warmed up
        yield port, pid


def simulated(devices: int, key: str) -> list[Simulated]:
    """The devices, each with its token."""
    ring = Keyring((bytes.fromhex(key),))
    names = [f"phone-{number}" for number in range(devices)]
    tokens = [ring.issue("device", name, now=time.time(), seconds=86_400) for name in names]
    sizes = NUM_KEYS, KEYS_PER_CLIENT
    return [Simulated(n, t, i, *sizes) for i, (n, t) in enumerate(zip(names, tokens, strict=True))]


def measure(devices: int, rounds: int) -> Cell:
    """A whole run, then nginx."""
    key = new_key()
    with tempfile.TemporaryDirectory(prefix="devices-") as made, service(Path(made), key) as server:
        port, pid = server
        began, before = time.perf_counter(), cpu_seconds(pid)
        with living(f"http://127.0.0.1:{port}", simulated(devices, key), PROCESSES) as end:
            trained = train(Path(made), devices, rounds)
            spent, seconds = cpu_seconds(pid) - before, time.perf_counter() - began
            seen = end()
    for line in seen.failed[:5]:
        progress(f"failed: {line}")
    took = sum(map(len, seen.sent.values()))
    expected = np.zeros(devices)
    for own_key, names in seen.sent.items():
        expected[own_key] = len(names)
    each = {route: counts / took for route, counts in seen.requests.items()}
    progress(str({route: counts.round(2).tolist() for route, counts in each.items()}))
    return Cell(
        devices=devices,
        rounds=rounds,
        cohort=devices // 2,
        took_part=took,
        counted=sum(len(record.staleness) for record in trained.records),
        lost=round(float(np.abs(trained.rows[:devices].mean(axis=1) - expected).sum())),
        over_deadline=sum(record.closed != "goal" for record in trained.records),
        deadline=DEADLINE,
        longest=trained.longest,
        misses=sum(seen.misses.values()),
        requests=float(sum(counts[0] for counts in each.values())),
        bytes_down=float(sum(counts[2] for counts in each.values())),
        service_ms=spent / took * 1e3,
        nginx_ms=nginx_cpu(each),
        seconds=seconds,
    )


def nginx_cpu(each: Mapping[str, np.ndarray]) -> float | None:
    """Milliseconds of CPU time of nginx for requests of these lengths; median of five."""
    if not nginx.find():
        left_out("nginx, which is not installed", nginx.INSTALL)
        return None
    with tempfile.TemporaryDirectory(prefix="devices-") as made, load_process() as pool:
        root = Path(made)
        (root / "put").mkdir()
        requests = []
        for place, (route, (count, up, down)) in enumerate(each.items()):
            size = round(down / count)
            (root / f"answer-{place}").write_bytes(bytes(size))
            is_update = route.endswith("updates")
            path = "PUT /put/{}" if is_update else f"GET /answer-{place}"
            body = bytes(round(up / count))
            head = f"{path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
            requests += [
                head.format(number).encode() + body for number in range(round(100 * count))
            ]
        random.Random(0).shuffle(requests)
        with nginx.nginx(root) as (port, pid):
            answers = [len(ask(port, request, nginx.answer_length)) for request in requests]
            # Those of files that are there by now have another status.
            answers = [len(ask(port, request, nginx.answer_length)) for request in requests]
            one = contestant((port, pid), requests, answers)
            taken = [burst(pool, one) for _ in range(SAMPLES)]
    per_request = sorted(cpu / outcome.answered for outcome, cpu in taken)[SAMPLES // 2]
    return float(per_request * sum(counts[0] for counts in each.values()) * 1e3)


def main() -> int:
    """Measures, prints, and checks what was promised."""
    flags = parser((__doc__ or "").splitlines()[0], RESULTS).parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    devices, rounds = (200, 3) if flags.quick else (DEVICES, ROUNDS)
    steps = [(f"{devices} devices, {rounds} rounds", lambda: measure(devices, rounds))]
    return run_steps(flags, "devices", steps)


if __name__ == "__main__":
    sys.exit(main())
