"""Connects to Ray: one started on this machine for as long as it is needed, or a cluster.

Nothing here speaks to the internet: no dashboard, no usage statistics. Anyone who reaches a Ray may
run code in it. One that is started here listens on the loopback interface alone, unless the process
had imported Ray before; a cluster's network is its operator's to protect.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from keyhole.errors import InputError, WorkerError
from keyhole.rounds.threads import count_cores

# Ray reads these when it is imported.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of what is to change there
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # a lost worker is told in the record, not on the screen
}
_ANSWER_SECONDS = 10
# A client's greeting in HTTP/2: the preface, and a frame of settings (type 4) that has none.
_SETTINGS, _FRAME_HEAD = 4, 9
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0 lets Ray use loopback alone, on Linux as well


def find_ray() -> Any:
    """The library.

    Raises:
        InputError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed",
            got="no module ray",
            allowed="ray 2.60 or later",
            fix="pip install 'keyhole[ray]'",
        ) from error
    return ray


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[Any]:
    """Connects this process to Ray, and leaves it when the context ends.

    A process that is connected already stays so, and what it is connected to is used.

    Args:
        address: of a cluster, such as 10.0.0.1:6379 or "auto"; None starts a Ray on this machine.
        cpus: of a Ray that is started here; None takes all cores that this process may use.

    Raises:
        InputError: Ray is not installed.
        WorkerError: the cluster does not answer, or Ray does not start.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address is None:
        os.environ.setdefault(_CLUSTERS, "0")
    ray = find_ray()
    if ray.is_initialized():
        _check_same(ray, address)
        yield ray
        return
    _check_reach(address)
    if address not in (None, "auto"):
        _knock(str(address))
    _start(ray, address, cpus)
    try:
        yield ray
    finally:
        ray.shutdown()


def living_nodes(ray: Any) -> dict[str, float]:
    """Node -> its CPUs, of those that are alive."""
    return {
        node["NodeID"]: float(node["Resources"].get("CPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    }


def _start(ray: Any, address: str | None, cpus: int | None) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    own = {
        "num_cpus": cpus or count_cores(),
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    with _signals_kept(), warnings.catch_warnings():
        # JAX warns of forks where it has started; Ray forks to start its own programs alone.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        try:
            if address is None:
                ray.init("local", **quiet, **own)
            else:
                ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            with suppress(Exception):
                ray.shutdown()
            raise _no_answer(address or "this machine", error) from error


def _knock(address: str) -> None:
    """Raises WorkerError where nobody listens, or somebody who is not Ray: Ray itself would go on
    asking for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise InputError(
            "not the address of a Ray cluster", got=address, allowed="HOST:PORT", fix="pass one"
        )
    try:
        with socket.create_connection((host, int(port)), _ANSWER_SECONDS) as connection:
            _check_speaks(connection)
    except OSError as error:
        raise _no_answer(address, error) from error


def _check_speaks(connection: socket.socket) -> None:
    """Raises OSError unless HTTP/2 is spoken, as by every gRPC server: the answer to the client's
    greeting begins with settings (RFC 9113, section 3.4). Behind TLS that is not asked for."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return
    connection.sendall(_GREETING)
    answer = b""
    while len(answer) < _FRAME_HEAD:
        found = connection.recv(_FRAME_HEAD - len(answer))
        if not found:
            raise ConnectionError("what listens there is not Ray")
        answer += found
    if answer[3] != _SETTINGS:
        raise ConnectionError("what listens there is not Ray")


def _no_answer(address: str, error: Exception) -> WorkerError:
    return WorkerError(
        "Ray does not answer",
        got=f"{address}: {(str(error) or type(error).__name__).splitlines()[0]}",
        allowed="a running Ray of the same version, with the same token",
        fix="ray start --head on its first machine; pass the address that it prints, with "
        "RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as there",
    )


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keeps what SIGTERM does: Ray would end the process before a round is stored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_reach(address: str | None) -> None:
    """A process that has had a Ray on loopback is not seen by other machines."""
    is_local = address is None or address.startswith(("127.", "localhost"))
    if not is_local and os.environ.get(_CLUSTERS) == "0":
        raise InputError(
            "this process has had a Ray of its own, which other machines do not reach",
            got=address,
            allowed="a cluster on this machine",
            fix="join the cluster from a new process",
        )


def _check_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise InputError(
            "this process is connected to another Ray",
            got=address,
            allowed=here,
            fix="call ray.shutdown() first, or leave the address out",
        )
