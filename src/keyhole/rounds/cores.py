"""Trains a cohort on the cores of one process: threads in parallel, clients in sequence in each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from queue import SimpleQueue
from threading import Lock
from typing import Any, TypeVar

from keyhole.data.cache import cache_root
from keyhole.errors import InputError
from keyhole.primitives.report import Report
from keyhole.rounds.clients import ClientJob, Clients, bytes_in
from keyhole.rounds.workers import THREADS, count_cores, set_one_thread

_CORE = "keyhole_core_"  # names the CPU backend of each core beside the first
_LARGE = 8 << 20  # bytes of an update, of which few may wait for their turn
_In = TypeVar("_In")
_Out = TypeVar("_Out")


def start_jax() -> None:
    """Starts JAX as runs need it, where it is installed: a device whose model trains itself may
    have none. Calls `use_one_thread` and `keep_compiled`."""
    if find_spec("jax") is not None:
        use_one_thread()
        keep_compiled()


def use_one_thread() -> None:
    """Lets JAX compute each operation with one thread, the one that asks for it.

    So updates have the same bytes on any machine and engine; and splitting the operations of a
    small model over cores can double their CPU time. Every core gets a CPU backend of its own: the
    devices of one backend share its threads, and XLA computes convolutions otherwise where there
    are two of them. JAX decides when it first computes, so this comes before anything else that
    uses it.

    Raises:
        InputError: JAX has started otherwise.
    """
    import jax

    try:
        for count in (2, 1):  # a JAX that has started refuses a change, and only that
            jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        if os.environ.get(THREADS) != "1":
            raise InputError(
                "too late to let JAX compute with one thread, it has started: got a JAX that has "
                "computed; expected one that has not; call use_one_thread first of all, before any "
                "JAX array is made"
            ) from None
    else:
        set_one_thread()
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        _register_cores()


def _register_cores() -> None:
    import jax
    from jax.extend.backend import register_backend_factory
    from jaxlib.xla_client import make_cpu_client

    names = [f"{_CORE}{core}" for core in range(1, count_cores())]
    for name in names:
        make = partial(make_cpu_client, asynchronous=False)
        register_backend_factory(name, make, priority=-1000)  # none of them is the default
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms:
        jax.config.update("jax_platforms", ",".join([platforms, *names]))


def map_on_cores(
    work: Callable[[_In], _Out],
    items: Iterable[_In],
    count: int,
    is_large: Callable[[_Out], bool] = lambda _: False,
) -> Iterator[_Out]:
    """Yields `work` of each item, in order, from `count` threads with a core of JAX each.

    Items are taken as threads get free: no more than twice as many as threads are held at a time,
    with what was made of them; where that is large, one more than threads.
    """
    import jax

    cores: SimpleQueue[Any] = SimpleQueue()
    for device in _devices(count):
        cores.put(device)

    def on_a_core(item: _In) -> _Out:
        core = cores.get()
        try:
            with jax.default_device(core):
                return work(item)
        finally:
            cores.put(core)

    left, waiting = iter(items), deque[Future[_Out]]()
    pool = ThreadPoolExecutor(count)
    try:
        waiting.extend(pool.submit(on_a_core, item) for item in islice(left, count + 1))
        while waiting:
            room = count + 1 if is_large(waiting[0].result()) else 2 * count
            yield waiting[0].result()
            waiting.popleft()
            free = max(0, room - len(waiting))
            waiting.extend(pool.submit(on_a_core, item) for item in islice(left, free))
    finally:
        # Not `with pool`: Python 3.11 takes a thread for ended once a join of it is interrupted,
        # and then aborts when the process ends before it.
        pool.shutdown(wait=False, cancel_futures=True)
        # `wait` would never see the end of those that were cancelled before they started.
        wait([each for each in waiting if not each.cancelled()])


def _devices(count: int) -> list[Any]:
    """A device for each thread. Where JAX computes elsewhere, or with threads of its own, all
    share its default."""
    from jax.extend.backend import backends, get_default_device

    first = get_default_device()
    others = [each.devices()[0] for name, each in backends().items() if name.startswith(_CORE)]
    found = [first, *others] if first.platform == "cpu" else [first]
    return [found[at % len(found)] for at in range(count)]


def keep_compiled() -> None:
    """Keeps what JAX compiles beside imported data, so that the next process need not compile
    it."""
    import jax

    jax.config.update("jax_compilation_cache_dir", str(cache_root() / "compiled"))


@dataclass(frozen=True)
class Cores:
    """Runs jobs in threads of this process: an executor for rounds. Call `use_one_thread` first.

    A client's update depends on its job and data alone, so the result is the same for any number of
    threads, to the byte.

    Args:
        count: threads, each of which trains one client at a time; as many as there are cores
            unless told, and more bring nothing.
    """

    count: int = field(default_factory=count_cores)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                f"number of cores is out of range: got {self.count}; expected 1 or more; pass 1"
            )

    def __call__(self, clients: Clients, jobs: Sequence[ClientJob]) -> Iterator[Report]:
        """Yields reports in the order of the jobs; raises what the first client that failed has
        raised."""
        making = Lock()  # a delivery of one's own need not know of threads

        def run(at: int) -> Report:
            with making:
                job = jobs[at]
            return job.run(clients)

        # A job is made where it runs, so that no sub-model waits for its turn.
        return map_on_cores(run, range(len(jobs)), self.count, _has_large_update)


def _has_large_update(report: Report) -> bool:
    return bytes_in(report.update) > _LARGE
