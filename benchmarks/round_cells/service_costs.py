"""What one request of each kind costs the service, measured: CPU time of the real program.

`keyhole serve` runs as operators run it, over files and with tokens, one worker on a core of its
own. Requests come over a few connections that live; a new connection with TLS is measured apart.
Every update is of another device, and on the disk before it is answered.
"""

from __future__ import annotations

import http.client
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from keyhole.pricing import ServiceSpeeds, Speeds
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.inputs import usable
from keyhole.server.optimizers import SGD
from keyhole.server.row_sums import sum_updates
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring, new_key
from keyhole.service.publishing import Publisher
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import Ask, decode_update, encode_query, encode_update
from slice_peers.processes import cpu_seconds, free_port, serving

NUM_KEYS, WIDTH = 100_000, 64  # rows of 256 bytes
SPACE = KeySpace("row", NUM_KEYS)
AT_ONCE = 8  # connections
MAX_KEYS = 65_536
COMMAND = (sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve")
BINARY = {"content-type": "application/octet-stream"}


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
    ours = ServiceSpeeds()
    fetch = costs.fetch / planned_fetch(costs)
    update = costs.update / planned_update(costs)
    return ServiceSpeeds(
        ours.request_seconds * fetch,
        ours.sending / fetch,
        ours.receiving / update,
        ours.store_seconds * update,
        costs.handshake or ours.handshake_seconds,
        costs.update_bytes / costs.add,
    )


def planned_fetch(costs: ServiceCosts) -> float:
    """CPU seconds that the planner gives a fetch of m slices: request, gather and sending."""
    speeds, size = ServiceSpeeds(), costs.answer_bytes
    return speeds.request_seconds + size / speeds.sending + size / Speeds().gather


def planned_update(costs: ServiceCosts) -> float:
    """CPU seconds that the planner gives an update: request, reading and storing."""
    speeds = ServiceSpeeds()
    storing = costs.update_bytes / speeds.receiving + speeds.store_seconds
    return speeds.request_seconds + storing


@dataclass(frozen=True)
class _Request:
    """What is sent, and the status that must come back."""

    path: str
    body: bytes
    token: str
    status: int

    @property
    def headers(self) -> Mapping[str, str]:
        return {**BINARY, "authorization": f"Bearer {self.token}"}


@dataclass(frozen=True)
class _Server:
    """A running service."""

    port: int
    pid: int

    def spent(self, requests: Sequence[_Request]) -> tuple[float, float, bytes]:
        """CPU seconds of a request, requests a second, and the last answer."""
        before, start = cpu_seconds(self.pid), time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(self._send_all, [requests[i::AT_ONCE] for i in range(AT_ONCE)]))
        wall = time.perf_counter() - start
        cpu = cpu_seconds(self.pid) - before
        return cpu / len(requests), len(requests) / wall, answers[-1]

    def _send_all(self, requests: Sequence[_Request]) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        answer = b""
        for one in requests:
            connection.request("POST", one.path, one.body, dict(one.headers))
            response = connection.getresponse()
            answer = response.read()
            if response.status != one.status:
                raise RuntimeError(f"{one.path}: {response.status} {answer[:300]!r}")
        connection.close()
        return answer


@dataclass(frozen=True)
class _Round:
    """A published round, and what devices of it send."""

    directory: Path
    id: str
    layout: Layout
    ring: Keyring

    def token(self, kind: Literal["device", "round"], device: int) -> str:
        name = self.id if kind == "round" else None
        return self.ring.issue(
            kind, f"device-{device}", now=time.time(), seconds=3600, round_id=name
        )

    def checkins(self, count: int) -> list[_Request]:
        return [_Request("/v1/checkin", b"", self.token("device", n), 200) for n in range(count)]

    def fetches(self, count: int, keys_per_client: int) -> list[_Request]:
        path = f"/v1/rounds/{self.id}/slices"
        bodies = [encode_query([Ask(0, keys_of(n, keys_per_client))]) for n in range(count)]
        return [_Request(path, body, self.token("round", n), 200) for n, body in enumerate(bodies)]

    def updates(self, count: int, keys_per_client: int, first: int = 0) -> list[_Request]:
        path = f"/v1/rounds/{self.id}/updates"
        return [
            _Request(path, self._update(n, keys_per_client), self.token("round", n), 201)
            for n in range(first, first + count)
        ]

    def _update(self, device: int, keys_per_client: int) -> bytes:
        keys = keys_of(device, keys_per_client)
        rows = np.random.default_rng(device).standard_normal((len(keys), WIDTH), np.float32)
        chosen = {"row": SPACE.keys(keys)}
        return encode_update(self.layout, {"w": rows}, chosen, digest_of(self.id))


def keys_of(device: int, count: int) -> np.ndarray:
    """The keys of a device."""
    return np.random.default_rng(device).choice(NUM_KEYS, count, replace=False)


def measure_service(keys_per_client: int, count: int = 2_000) -> ServiceCosts:
    """Measures requests of all kinds, this many of each (of updates a fifth)."""
    few = keys_per_client // 10
    with tempfile.TemporaryDirectory(prefix="round-") as made:
        folder = Path(made)
        round_ = _publish(folder)
        with _service(round_) as server:
            server.spent(round_.fetches(400, keys_per_client))  # warms up
            fetch, _, answer = server.spent(round_.fetches(count, keys_per_client))
            small, _, _ = server.spent(round_.fetches(count, few))
            checkin, _, _ = server.spent(round_.checkins(count))
            updates = round_.updates(count // 5, keys_per_client)
            update, rate, _ = server.spent(updates)
            small_update, _, _ = server.spent(round_.updates(count // 5, few, first=count))
        handshake = _handshake(round_, folder, count // 4)
        add = _adding(round_.layout, [one.body for one in updates])
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


def _publish(folder: Path) -> _Round:
    model = {"w": np.random.default_rng(0).standard_normal((NUM_KEYS, WIDTH), np.float32)}
    layout = Layout.of(model, Cut(SPACE, {"w": 0}))
    key = new_key()
    (folder / "token.key").touch(0o600)
    (folder / "token.key").write_text(key)
    with Publisher(folder / "rounds") as publisher:
        state = ServerState.dense(layout, model, SGD(0.1))
        published = publisher.publish_state(state, number=0, settings={}, durable=False)
    return _Round(folder, published.id, layout, Keyring((bytes.fromhex(key),)))


@contextmanager
def _service(round_: _Round, *options: object) -> Iterator[_Server]:
    port = free_port()
    key = round_.directory / "token.key"
    command = [*COMMAND, round_.directory / "rounds", "--port", port, "--token-key", key, *options]
    with serving([str(part) for part in command], port) as pid:
        yield _Server(port, pid)


def _handshake(round_: _Round, folder: Path, count: int) -> float:
    """CPU seconds of a new connection with TLS, a short request included; 0 without openssl."""
    if shutil.which("openssl") is None:
        return 0.0
    key, certificate = folder / "tls.key", folder / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "2"]
    command += ["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    command += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    trust = ssl.create_default_context(cafile=certificate)
    with _service(round_, "--tls-cert", certificate, "--tls-key", key) as server:

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


def _adding(layout: Layout, bodies: Sequence[bytes]) -> float:
    """CPU seconds of the trainer for one update."""

    def add() -> None:
        found = [decode_update(body, layout, MAX_KEYS, body[8:40]) for body in bodies]
        updates = [usable(update) for update, _ in found]
        keys: list[Mapping[str, Keys]] = [keys for _, keys in found]
        sum_updates(layout, [u for u in updates if u is not None], keys, "cohort")

    return _cpu_of(add) / len(bodies)


def _cpu_of(work: Callable[[], object]) -> float:
    work()  # warms up
    start = time.process_time()
    work()
    return time.process_time() - start
