"""Trains a cohort on the cores of one process: threads in parallel, clients in sequence in each."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Lock
from time import perf_counter
from typing import Any, TypeVar

from keyhole.computing import Steps
from keyhole.data.cache import cache_root
from keyhole.errors import InputError
from keyhole.primitives.report import Report
from keyhole.rounds.clients import ClientJob, Clients, bytes_in, trains_in_steps
from keyhole.rounds.workers import THREADS, count_cores, set_one_thread

_CORE = "keyhole_core_"  # names the CPU backend of each core beside the first
_LARGE = 8 << 20  # bytes of an update, of which few may wait for their turn
_SHORT = 1e-3  # seconds; at half of it a second core cost as much CPU as it saved time
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


@dataclass
class _Pace:
    """How long the computations of a client have taken lately; no bytes depend on it."""

    seconds: float = _SHORT  # until it is known: others help

    def note(self, seconds: float) -> None:
        """Counts one more; one that compiles counts as a long one, and is soon forgotten."""
        self.seconds += (min(seconds, 10 * _SHORT) - self.seconds) / 8

    @property
    def is_short(self) -> bool:
        """Whether waking another thread costs more than it saves."""
        return self.seconds < _SHORT


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
    _pace: _Pace = field(default_factory=_Pace, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError(
                f"number of cores is out of range: got {self.count}; expected 1 or more; pass 1"
            )

    def __call__(self, clients: Clients, jobs: Sequence[ClientJob]) -> Iterator[Report]:
        """Yields reports in the order of the jobs; raises what the first client that failed has
        raised."""
        if trains_in_steps(clients.train) is not None:
            return _Team(clients, jobs, self.count, self._pace).reports()
        making = Lock()  # a delivery of one's own need not know of threads

        def run(at: int) -> Report:
            with making:
                job = jobs[at]
            return job.run(clients)

        # A job is made where it runs, so that no sub-model waits for its turn.
        return map_on_cores(run, range(len(jobs)), self.count, _has_large_update)


def _has_large_update(report: Report) -> bool:
    return bytes_in(report.update) > _LARGE


class _Team:
    """Runs jobs whose trainer knows steps: all Python in the thread that takes the reports, and
    computations in that thread and others.

    So no thread waits for Python at every array operation of another; see `keyhole.computing`.
    """

    def __init__(
        self, clients: Clients, jobs: Sequence[ClientJob], count: int, pace: _Pace
    ) -> None:
        self._clients, self._jobs, self._count, self._pace = clients, jobs, count, pace
        self._offered: SimpleQueue[_Computation | None] = SimpleQueue()

    def reports(self) -> Iterator[Report]:
        """Yields the report of each job, in order."""
        others = _devices(self._count)[1:]  # the first is this thread's own
        pool = ThreadPoolExecutor(len(others)) if others else None
        helpers = [pool.submit(self._help, core) for core in others] if pool else []
        try:
            yield from self._in_order()
        finally:
            with suppress(Empty):
                while True:
                    self._offered.get_nowait()
            for _ in helpers:
                self._offered.put(None)
            if pool is not None:
                pool.shutdown(wait=False)  # see `map_on_cores`
            wait(helpers)

    def _help(self, core: Any) -> None:
        """Computes what is offered, in a thread with a core of JAX."""
        import jax

        with jax.default_device(core):
            while (computation := self._offered.get()) is not None:
                computation.run()
                del computation  # nor what it has found

    def _in_order(self) -> Iterator[Report]:
        left, under_way = iter(range(len(self._jobs))), deque[_Task]()
        while True:
            for at in left:
                under_way.append(self._start(at))
                if len(under_way) >= self._room(under_way[0]):
                    break
            if not under_way:
                return
            report = self._finish(under_way)
            yield report
            del report  # it may be large
            under_way.popleft()

    def _room(self, first: _Task) -> int:
        """How many jobs may be under way: sub-models are held meanwhile."""
        if self._pace.is_short:
            return 1
        return self._count if first.is_large else 2 * self._count

    def _start(self, at: int) -> _Task:
        task = _Task(self._clients, self._jobs, at)
        if task.computation and self._count > 1 and not self._pace.is_short:
            self._offered.put(task.computation)
        return task

    def _finish(self, under_way: deque[_Task]) -> Report:
        """Returns the first report; until it can be made, others are computed here."""
        first = under_way[0]
        while (computation := first.computation) is not None:
            for task in under_way:
                if computation.is_done:
                    break
                if task.computation is not None:
                    task.computation.run()
            first.go_on(computation)
            self._pace.note(computation.seconds)
        return first.report()


class _Computation:
    """A function that one thread calls, whichever comes first, and what came of it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._free, self._busy = Lock(), Lock()
        self._busy.acquire()
        self._found: Any = None
        self._failed: BaseException | None = None
        self.seconds = 0.0

    def run(self) -> None:
        """Computes, unless a thread has begun to."""
        if not self._free.acquire(blocking=False):
            return
        work, self._work, start = self._work, None, perf_counter()
        assert work is not None
        try:
            self._found = work()
        except BaseException as error:
            self._failed = error
            if not isinstance(error, Exception):
                raise
        finally:
            del work  # nor what it was given
            self.seconds = perf_counter() - start
            self._busy.release()

    @property
    def is_done(self) -> bool:
        """Whether nobody need wait for it."""
        return not self._busy.locked()

    def send(self, steps: Steps[_Out]) -> Callable[[], Any]:
        """Waits, and passes on what came of it; returns what is to be computed next."""
        with self._busy:
            found, self._found = self._found, None
        return steps.send(found) if self._failed is None else steps.throw(self._failed)


class _Task:
    """A job under way: what it computes now, until it has a report or an error."""

    def __init__(self, clients: Clients, jobs: Sequence[ClientJob], at: int) -> None:
        self.computation: _Computation | None = None
        self.is_large = False
        self._report: Report | None = None
        self._error: Exception | None = None
        try:
            job = jobs[at]
            self.is_large = bytes_in(job.submodel) > _LARGE
            self._steps = job.run_in_steps(clients)
            self.computation = _Computation(next(self._steps))
        except StopIteration as done:
            self._report = done.value
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._error = error

    def go_on(self, done: _Computation) -> None:
        """Moves on to the next computation, or to the end."""
        self.computation = None
        try:
            self.computation = _Computation(done.send(self._steps))
        except StopIteration as end:
            self._report = end.value
        except Exception as error:  # noqa: BLE001 - raised in its turn
            self._error = error

    def report(self) -> Report:
        """Returns what came of a job that has ended, or raises its error."""
        if self._error is not None:
            raise self._error
        assert self._report is not None
        report, self._report = self._report, None
        return report
