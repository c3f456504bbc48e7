"""Runs trials in parallel processes: each trial in one process, with the bytes of a single one.

Processes are spawned, not forked, and open the data themselves. A signal that ends the command
reaches all of them: each finishes and stores the round under way, and takes no further trial.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from keyhole.data.federated import Dataset
from keyhole.data.open import import_dataset
from keyhole.errors import WorkerError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import Find, open_data
from keyhole.experiments.specs import spec_of
from keyhole.experiments.trackers import run_tracked, trackers_of
from keyhole.experiments.trial import Result
from keyhole.rounds.cores import Cores, start_jax
from keyhole.rounds.spec import RunSpec
from keyhole.rounds.workers import count_cores, portable
from keyhole.signals import stop_on_signals

_LOOK = 0.5  # seconds between two looks at whether to stop


@dataclass(frozen=True)
class DataSource:
    """What opens the data of a sweep in any process.

    Args:
        task: that they are for.
        name: a file, a name, or module:NAME.
        seed: of data that are made.
        sizes: of synthetic data, by name.
    """

    task: str
    name: str
    seed: int
    sizes: tuple[tuple[str, int], ...] = ()

    def open(self, find: Find = import_dataset) -> Dataset:
        """Returns the data; `find` finds or imports a file."""
        spec, sizes = spec_of(self.task), dict(self.sizes)
        return open_data(spec, self.name, self.seed, sizes=sizes, find=find)


@dataclass(frozen=True)
class Cell:
    """One trial of one arm: what to run, on what, where to keep it, and names of its trackers."""

    spec: RunSpec
    data: DataSource
    trial: int
    directory: Path
    keep_state: bool
    trackers: tuple[str, ...] = ()


def run_cells(
    cells: Sequence[Cell], processes: int, stop: threading.Event
) -> Iterator[tuple[Cell, Result | None]]:
    """Runs trials in processes and yields each when it ends; None where it was stopped.

    Args:
        processes: at a time; cores are shared out among them.
        stop: once set, trials under way end with their round, and no other begins.

    Raises:
        WorkerError: a process has died.
        Exception: what a trial has raised.
    """
    left, count = deque(cells), min(processes, len(cells))
    workers = dict(_spawn(max(1, count_cores() // processes)) for _ in range(count))
    busy: dict[Connection, Cell | None] = dict.fromkeys(workers)  # None while a process starts
    told: set[Connection] = set()  # to stop
    try:
        while busy:
            if stop.is_set():
                _stop(workers[line] for line, cell in busy.items() if cell and line not in told)
                told |= busy.keys()
            ready = wait(list(busy), _LOOK)
            for line in [line for line in busy if line in ready]:
                cell, found = busy.pop(line), _answer(line)
                if cell is not None:
                    yield cell, found
                if left and not stop.is_set():
                    busy[line] = left.popleft()
                    line.send(busy[line])
    finally:
        _stop(workers[line] for line, cell in busy.items() if cell)  # an error ends the sweep
        for line in workers:
            line.close()
        for process in workers.values():
            process.join()


def _spawn(cores: int) -> tuple[Connection, BaseProcess]:
    context = get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=_work, args=(other, cores), daemon=True)
    process.start()
    other.close()
    return own, process


def _stop(workers: Iterable[BaseProcess]) -> None:
    """Asks processes to end with the round under way; one that got Ctrl-C knows it already."""
    for process in workers:
        if process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)


def _answer(line: Connection) -> Result | None:
    """What a process has to say of its trial."""
    try:
        found = line.recv()
    except (EOFError, OSError) as error:
        raise WorkerError(
            "a process that ran trials has died: got no result from it; expected one; see whether "
            "memory ran out, ask for fewer --processes, and resume with the same command"
        ) from error
    if isinstance(found, BaseException):
        raise found
    assert found is None or isinstance(found, Result)
    return found


def _work(line: Connection, cores: int) -> None:
    """Runs the trials that arrive, in a process of its own, until the line is closed."""
    start_jax()
    opened: dict[DataSource, Dataset] = {}
    with stop_on_signals() as stop, suppress(EOFError, OSError):
        line.send(None)  # has started, and can be asked to stop
        while True:
            cell = line.recv()
            try:
                found: Any = None if stop.is_set() else _run(cell, opened, cores, stop)
            except Exception as error:  # noqa: BLE001 - is raised where the sweep was asked for
                found = portable(error, "a trial", "without --processes")
            line.send(found)


def _run(
    cell: Cell, opened: dict[DataSource, Dataset], cores: int, stop: threading.Event
) -> Result | None:
    """Runs one trial; data stay open for the next."""
    if cell.data not in opened:
        opened[cell.data] = cell.data.open()
    experiment = Experiment(cell.spec, opened[cell.data])
    return run_tracked(
        experiment,
        trackers_of(cell.trackers, cell.directory.parent.parent),
        cell.trial,
        cell.directory,
        on_failure=lambda said: warnings.warn(said, RuntimeWarning, stacklevel=1),
        execute=experiment.engine or Cores(cores),
        stop=stop,
        keep_state=cell.keep_state,
    )
