"""What one request of each kind costs the service, measured: CPU time of the real program.

A new connection with TLS is measured apart, and so is what the trainer does with an update.
"""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from harness import left_out
from keyhole.compiled import load_compiler
from keyhole.pricing import ServiceSpeeds, Speeds, measured
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.server.inputs import usable
from keyhole.server.row_sums import sum_updates
from keyhole.wire.messages import decode_update
from round_cells.requests import AT_ONCE, Round
from slice_peers.processes import cpu_seconds

NUM_KEYS, WIDTH = 100_000, 64  # rows of 256 bytes
MAX_KEYS = 65_536


@dataclass(frozen=True)
class ServiceCosts:
    """CPU seconds of the service for one request, where nothing else is said.

    Args:
        keys_per_client: m of a fetch and of an update.
        slice_bytes: of one slice.
        answer_bytes: of a fetch.
        update_bytes: of an update.
        checkin: which is told of a round, and given a token.
        fetch: of m slices by POST.
        small_fetch: of a tenth of them.
        update: checked and stored.
        small_update: of a tenth of the keys.
        stored_per_second: updates on this disk; by the clock, one worker.
        handshake: a new connection with TLS 1.3.
        add: of an update at the trainer: read, checked and added to a sum.
    """

    keys_per_client: int
    slice_bytes: int
    answer_bytes: int
    update_bytes: int
    checkin: float
    fetch: float
    small_fetch: float
    update: float
    small_update: float
    stored_per_second: float
    handshake: float
    add: float


def speeds_of(costs: ServiceCosts) -> ServiceSpeeds:
    """The planner's speeds, scaled so that a fetch, an update and a handshake cost what they do."""
    ours = measured(ServiceSpeeds)
    fetch = costs.fetch / planned_fetch(costs.answer_bytes)
    update = costs.update / planned_update(costs.update_bytes)
    add = costs.add / ours.adding_seconds(costs.update_bytes)
    return replace(
        ours,
        request_seconds=ours.request_seconds * fetch,
        sending=ours.sending / fetch,
        receiving=ours.receiving / update,
        store_seconds=ours.store_seconds * update,
        handshake_seconds=costs.handshake or ours.handshake_seconds,
        add_seconds=ours.add_seconds * add,
        adding=ours.adding / add,
    )


def planned_fetch(size: float) -> float:
    """CPU seconds that the planner gives a fetch: request, gather and sending."""
    speeds = measured(ServiceSpeeds)
    return speeds.request_seconds + size / speeds.sending + size / measured(Speeds).gather


def planned_update(size: float) -> float:
    """CPU seconds that the planner gives an update: request, reading and storing."""
    speeds = measured(ServiceSpeeds)
    return speeds.request_seconds + size / speeds.receiving + speeds.store_seconds


def measure_service(keys_per_client: int, count: int = 2_000) -> ServiceCosts:
    """Measures requests of all kinds, this many of each (of updates a fifth)."""
    few = keys_per_client // 10
    with tempfile.TemporaryDirectory(prefix="round-") as made:
        round_ = Round.publish(Path(made), NUM_KEYS, WIDTH)
        with round_.served() as server:
            server.spent(round_.fetches(400, keys_per_client))  # warms up
            fetch, _, answer = server.spent(round_.fetches(count, keys_per_client))
            small, _, _ = server.spent(round_.fetches(count, few))
            checkin, _, _ = server.spent(round_.checkins(count))
            updates = round_.updates(count // 5, keys_per_client)
            update, rate, _ = server.spent(updates)
            small_update, _, _ = server.spent(round_.updates(count // 5, few, first=count))
        handshake = handshake_seconds(round_, count // 4)
        add = adding_seconds(round_.layout, [one.body for one in updates])
    return ServiceCosts(
        keys_per_client=keys_per_client,
        slice_bytes=4 * WIDTH,
        answer_bytes=len(answer),
        update_bytes=len(updates[0].body),
        checkin=checkin,
        fetch=fetch,
        small_fetch=small,
        update=update,
        small_update=small_update,
        stored_per_second=rate,
        handshake=handshake,
        add=add,
    )


def handshake_seconds(round_: Round, count: int) -> float:
    """CPU seconds of a new connection with TLS, a short request included; 0 without openssl."""
    if shutil.which("openssl") is None:
        left_out("handshakes, without openssl", "apt install openssl")
        return 0.0
    key, certificate = round_.directory / "tls.key", round_.directory / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=certificate)
    with round_.served("--tls-cert", certificate, "--tls-key", key) as server:

        def connect(_: int) -> None:
            connection = http.client.HTTPSConnection(
                "localhost", server.port, timeout=60, context=trust
            )
            connection.request("GET", "/healthz")
            connection.getresponse().read()
            connection.close()

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(connect, range(count // 4)))  # warms up
            before = cpu_seconds(server.pid)
            list(pool.map(connect, range(count)))
        return (cpu_seconds(server.pid) - before) / count


def adding_seconds(layout: Layout, bodies: Sequence[bytes]) -> float:
    """CPU seconds of the trainer for one update."""

    def add() -> None:
        found = [decode_update(body, layout, MAX_KEYS, body[8:40]) for body in bodies]
        updates = [usable(update) for update, _ in found]
        keys: list[Mapping[str, Keys]] = [keys for _, keys in found]
        sum_updates(layout, [u for u in updates if u is not None], keys, "cohort")

    load_compiler()  # as a trainer does, since it holds a table
    return _cpu_of(add) / len(bodies)


def _cpu_of(work: Callable[[], object]) -> float:
    work()  # warms up
    start = time.process_time()
    work()
    return time.process_time() - start
