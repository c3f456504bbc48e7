"""What devices of a round send to the real service, and the CPU time that it takes to answer.

`keyhole serve` runs as operators run it, over files and with tokens, one worker on a core of its
own. Requests come over a few connections that live. Every update is of another device, and on the
disk before it is answered.
"""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.access import Keyring, new_key
from keyhole.service.publishing import Publisher
from keyhole.wire.manifest import digest_of
from keyhole.wire.messages import Ask, encode_query, encode_update
from slice_peers.processes import cpu_seconds, free_port, serving

AT_ONCE = 8  # connections
COMMAND = (sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve")
BINARY = {"content-type": "application/octet-stream"}


@dataclass(frozen=True)
class Request:
    """What is sent, and the status that must come back."""

    path: str
    body: bytes
    token: str
    status: int

    @property
    def headers(self) -> Mapping[str, str]:
        return {**BINARY, "authorization": f"Bearer {self.token}"}


@dataclass(frozen=True)
class Server:
    """A running service."""

    port: int
    pid: int

    def spent(self, requests: Sequence[Request]) -> tuple[float, float, bytes]:
        """CPU seconds of a request, requests a second, and the last answer."""
        before, start = cpu_seconds(self.pid), time.perf_counter()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(self._send_all, [requests[i::AT_ONCE] for i in range(AT_ONCE)]))
        wall = time.perf_counter() - start
        cpu = cpu_seconds(self.pid) - before
        return cpu / len(requests), len(requests) / wall, answers[-1]

    def _send_all(self, requests: Sequence[Request]) -> bytes:
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
class Round:
    """A published round, and what devices of it send."""

    directory: Path
    id: str
    layout: Layout
    ring: Keyring

    @staticmethod
    def publish(folder: Path, num_keys: int, width: int) -> Round:
        """Publishes a table of `width` numbers for each key."""
        model = {"w": np.random.default_rng(0).standard_normal((num_keys, width), np.float32)}
        layout = Layout.of(model, Cut(KeySpace("row", num_keys), {"w": 0}))
        key = new_key()
        (folder / "token.key").touch(0o600)
        (folder / "token.key").write_text(key)
        with Publisher(folder / "rounds") as publisher:
            state = ServerState.dense(layout, model, SGD(0.1))
            published = publisher.publish_state(state, number=0, settings={}, durable=False)
        return Round(folder, published.id, layout, Keyring((bytes.fromhex(key),)))

    @contextmanager
    def served(self, *options: object) -> Iterator[Server]:
        """Runs the service over it, until the block ends."""
        port, key = free_port(), self.directory / "token.key"
        command = [*COMMAND, self.directory / "rounds", "--port", port, "--token-key", key]
        with serving([str(part) for part in (*command, *options)], port) as pid:
            yield Server(port, pid)

    def checkins(self, count: int) -> list[Request]:
        return [Request("/v1/checkin", b"", self._token("device", n), 200) for n in range(count)]

    def fetches(self, count: int, keys_per_client: int) -> list[Request]:
        return [
            fetch(self.id, self._keys(n, keys_per_client), self._token("round", n))
            for n in range(count)
        ]

    def updates(self, count: int, keys_per_client: int, first: int = 0) -> list[Request]:
        path = f"/v1/rounds/{self.id}/updates"
        return [
            Request(path, self.update(n, keys_per_client), self._token("round", n), 201)
            for n in range(first, first + count)
        ]

    def _token(self, kind: Literal["device", "round"], device: int) -> str:
        name = self.id if kind == "round" else None
        return self.ring.issue(
            kind, f"device-{device}", now=time.time(), seconds=3600, round_id=name
        )

    def _keys(self, device: int, count: int) -> np.ndarray:
        (space,) = self.layout.spaces
        return np.random.default_rng(device).choice(space.num_keys, count, replace=False)

    def update(self, device: int, keys_per_client: int) -> bytes:
        """The body of a device's update."""
        (part,), keys = self.layout.parts, self._keys(device, keys_per_client)
        shape = len(keys), part.slice_size
        rows = np.random.default_rng(device).standard_normal(shape, np.float32)
        chosen = {part.space.name: part.space.keys(keys)}
        return encode_update(self.layout, {"w": rows}, chosen, digest_of(self.id))


def fetch(round_id: str, keys: np.ndarray, token: str = "") -> Request:
    """The slices of some keys of the first table."""
    body = encode_query([Ask(0, keys)])
    return Request(f"/v1/rounds/{round_id}/slices", body, token, 200)
