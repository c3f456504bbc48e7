"""Connects to Ray, keeps workers all over a cluster, and starts others where they are lost.

Ray is started on this machine for as long as it is needed, or a cluster is joined. Nothing here
speaks to the internet: no dashboard, no usage statistics. Anyone who reaches a Ray may run code in
it. One that is started here listens on the loopback interface alone, unless the process had
imported Ray before; a cluster's network is its operator's to protect.

A worker builds the population once, then does tasks. A method returns a pair: what went wrong, or
None, and the result. Ray keeps the two apart, so that the driver reads the first and the second
stays on the node. Nothing waits forever: a worker that is silent for longer than `patience` is
ended and counts as lost.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keyhole.arrays import keep_freed_memory
from keyhole.errors import InputError, WorkerError
from keyhole.rounds.clients import Clients
from keyhole.rounds.workers import MAX_ATTEMPTS, count_cores, portable, set_one_thread

# Ray reads these when it is imported.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of what is to change there
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # a lost worker is told in the record, not on the screen
}
_ANSWER_SECONDS = 10
# Ray gives its own programs 30 s to start, which a busy machine exceeds; no setting changes that.
_STARTS = 4
# A client's greeting in HTTP/2: the preface, and a frame of settings (type 4) that has none.
_SETTINGS, _FRAME_HEAD = 4, 9
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_CLUSTERS = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # 0 lets Ray use loopback alone, on Linux as well


def find_ray() -> Any:
    """Returns the library; raises InputError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed: got no module ray; expected ray 2.60 or later; pip install "
            "'keyhole[ray]'"
        ) from error
    return ray


@contextmanager
def connected(address: str | None = None, cpus: int | None = None) -> Iterator[Any]:
    """Connects this process to Ray, and leaves it when the context ends.

    A process that is connected already stays so, and what it is connected to is used. An address is
    that of a cluster, such as 10.0.0.1:6379 or "auto"; None starts a Ray on this machine, with all
    cores that this process may use unless `cpus` says how many. Raises InputError where Ray is not
    installed, and WorkerError where it does not answer or start.
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
        # A start that took too long leaves its programs to Ray's exit, and forgets them.
        warnings.filterwarnings("ignore", r"subprocess \d+ is still running", ResourceWarning)
        for left in reversed(range(_STARTS if address is None else 1)):
            try:
                if address is None:
                    ray.init("local", **quiet, **own)
                else:
                    ray.init(address, **quiet)
                return
            except Exception as error:  # Ray raises no narrower one where its programs are slow
                with suppress(Exception):
                    ray.shutdown()
                if not left or "timed out" not in str(error):
                    raise _no_answer(address or "this machine", error) from error
            gc.collect()


def _knock(address: str) -> None:
    """Raises WorkerError where nobody listens, or somebody who is not Ray: Ray itself would go on
    asking for many minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in address:
        raise InputError(
            f"not the address of a Ray cluster: got {address}; expected HOST:PORT; pass one"
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
        f"Ray does not answer: got {address}: "
        f"{(str(error) or type(error).__name__).splitlines()[0]}; expected a running Ray of the "
        "same version, with the same token; ray start --head on its first machine; pass the "
        "address that it prints, with RAY_AUTH_MODE and RAY_AUTH_TOKEN_PATH as there"
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
            "this process has had a Ray of its own, which other machines do not reach: got "
            f"{address}; expected a cluster on this machine; join the cluster from a new process"
        )


def _check_same(ray: Any, address: str | None) -> None:
    here = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", here):
        raise InputError(
            f"this process is connected to another Ray: got {address}; expected {here}; call "
            "ray.shutdown() first, or leave the address out"
        )


class LostError(Exception):
    """Says that an intermediate result was lost with its worker: the task must be run again."""


def fetch(reference: Any) -> Any:
    """Returns another worker's result once it is there; raises LostError where it will not come."""
    ray = find_ray()
    try:
        found = ray.get(reference)
    except ray.exceptions.RayError as error:
        raise LostError from error
    if found is None:  # that worker has failed, too
        raise LostError
    return found


class RayWorker:
    """A worker; Ray makes an actor of it, whose methods run one at a time."""

    def __init__(self) -> None:
        keep_freed_memory()
        set_one_thread()
        self._clients: Clients | None = None
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

    def prepare(self, factory: Callable[[], Clients]) -> tuple[Exception | None, tuple[str, int]]:
        """Builds the population; returns the node and the process number."""
        found = find_ray().get_runtime_context().get_node_id(), os.getpid()
        try:
            self._clients = factory()
        except Exception as error:  # noqa: BLE001
            return portable(error), found  # the driver raises it
        return None, found

    def settle(self, place: int, workers: int) -> None:
        """Stays on one core if all cores of the node have a worker: a client's work goes back and
        forth between Python's thread and XLA's, which is 10 to 20 % cheaper on one core. `place` is
        that of this worker among those of its node."""
        if hasattr(os, "sched_setaffinity"):
            cores = sorted(self._cores)
            own = {cores[place]} if workers == len(cores) else self._cores
            for thread in Path("/proc/self/task").iterdir():
                with suppress(ProcessLookupError):  # it has ended meanwhile
                    os.sched_setaffinity(int(thread.name), own)

    def do(self, work: Callable[..., Any], *arguments: Any) -> tuple[Exception | None, Any]:
        """Runs `work(clients, *arguments)`; arguments that lie in the object store are there."""
        try:
            return None, work(self._clients, *arguments)
        except Exception as error:  # noqa: BLE001
            return portable(error), None


@dataclass(eq=False)
class Member:
    """One worker: its actor, where it runs once it has built its population, what it has to do."""

    actor: Any
    node: str = ""
    pid: int = 0
    tasks: list[int] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)


class Crew:
    """Workers of a cluster.

    Args:
        ray: the library, connected.
        factory: makes the population, in each worker.
        count: how many workers; None for one on each CPU.
        patience: seconds that a worker may take for a task, or to start.
    """

    def __init__(
        self, ray: Any, factory: Callable[[], Clients], count: int | None, patience: float
    ) -> None:
        self.ray = ray
        self.patience = patience
        self._actor_class = ray.remote(RayWorker)
        self._factory = ray.put(factory)
        self._members: list[Member] = []
        self._starting: dict[Any, tuple[Member, Any]] = {}
        self._failed_starts = 0
        self.incidents: list[str] = []
        cpus = sum(living_nodes(ray).values())
        if cpus < 1:
            raise WorkerError(
                f"the Ray cluster has no CPU: got {cpus:g} CPUs; expected 1 or more; start its "
                "nodes with --num-cpus, or add one"
            )
        count = count or int(cpus)
        for _ in range(count):
            self._start(1 if count <= cpus else 0)
        try:
            self.await_ready(count)
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> list[str]:
        """The node of each worker that is ready."""
        return [member.node for member in self.ready()]

    def close(self) -> None:
        """Ends the workers."""
        for member in self._members:
            self.ray.kill(member.actor)
        self._members.clear()

    def _start(self, cpus: int) -> None:
        """Starts a worker wherever there is room; it takes no task until it is ready."""
        options = {"num_cpus": cpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        member = Member(self._actor_class.options(**options).remote())
        prepare = member.actor.prepare.options(num_returns=2)
        wrong, found = prepare.remote(self._factory)
        self._members.append(member)
        self._starting[wrong] = member, found

    def await_ready(self, minimum: int = 1) -> None:
        """Waits until this many workers take tasks. Raises WorkerError where there is no room for
        them or they die before, and whatever the factory has raised."""
        until = time.monotonic() + self.patience
        while len(self.ready()) < minimum:
            left = max(until - time.monotonic(), 0)
            heard, _ = self.ray.wait(self.starting, num_returns=1, timeout=left)
            if not heard:
                raise WorkerError(
                    f"the Ray cluster has no room for the workers: got {len(self.ready())} of "
                    f"{minimum} started in {self.patience:g} s; expected a free CPU for each; ask "
                    "for fewer workers, or wait until others have ended"
                )
            for reference in heard:
                self.welcome(reference)

    @property
    def starting(self) -> list[Any]:
        """References to how the start of workers went that are not ready yet."""
        return list(self._starting)

    def welcome(self, reference: Any) -> None:
        """Takes a worker in whose start has come to an end, or starts another in its place."""
        member, found = self._starting.pop(reference)
        try:
            error = self.ray.get(reference)
            member.node, member.pid = self.ray.get(found) if error is None else ("", 0)
        except self.ray.exceptions.RayError as lost:
            self._members.remove(member)
            self._failed_starts += 1
            if self._failed_starts >= MAX_ATTEMPTS:
                raise WorkerError(
                    f"workers die before they are ready: got {self._failed_starts} times: "
                    f"{str(lost).splitlines()[0]}; expected a population that every worker can "
                    "build; run without Ray to see why; keyhole and the data must be on every node"
                ) from lost
            self._start(0)
            return
        if error is not None:
            self.close()
            raise error
        self._failed_starts = 0
        self._settle()

    def _settle(self) -> None:
        """Tells workers how many share their node; whatever becomes of that is not waited for."""
        for node in set(self.nodes):
            members = [member for member in self.ready() if member.node == node]
            for place, member in enumerate(members):
                member.actor.settle.remote(place, len(members))

    def ready(self) -> list[Member]:
        """Returns the workers that take tasks."""
        return [member for member in self._members if member.node]

    def replace(self, member: Member) -> bool:
        """Starts another worker for one that is lost; returns whether its node is lost as well.

        It claims no CPU: after a node is lost the others may be full, and to wait for room would
        stop the round.
        """
        self._members.remove(member)
        self.ray.kill(member.actor)
        self._start(0)
        return member.node not in living_nodes(self.ray)

    def end_silent(self, now: float) -> None:
        """Ends workers that have said nothing for too long; Ray then reports them as dead."""
        for member in self._members:
            is_due = member.tasks or not member.node
            if is_due and now - member.since > self.patience:
                self.ray.kill(member.actor)
                member.since = now
