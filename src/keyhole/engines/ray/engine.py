"""Runs a cohort on Ray, on one machine or on a cluster, with the bytes of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from keyhole import tree
from keyhole.engines.ray.crew import Crew, connected, fetch
from keyhole.engines.ray.parcels import KeyBundle, Parcel, dense, packing_of
from keyhole.engines.ray.schedule import (
    Call,
    Do,
    WorkTask,
    tasks_of_choices,
    tasks_of_sums,
    tasks_of_updates,
)
from keyhole.errors import InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.opening import open_data
from keyhole.primitives.layout import KeysBySpace, Layout
from keyhole.primitives.report import Report
from keyhole.rounds.adding import add_up_jobs
from keyhole.rounds.clients import ClientJob, Clients, choose_all
from keyhole.rounds.cores import keep_compiled
from keyhole.rounds.spec import RunParts, RunSpec
from keyhole.server.row_sums import BLOCK, BlockSum, pair_up


@dataclass(frozen=True)
class Population:
    """Makes the clients of a run: a factory that can be sent to other machines.

    Args:
        spec: how they train.
        directory: of an imported dataset, at the same path on every machine; None where the data
            are synthetic, made with the run's seed, or of your own.
        sizes: of synthetic data; None takes those that the run asks for.
    """

    spec: RunSpec
    directory: Path | None = None
    sizes: Mapping[str, int] | None = None

    def __call__(self) -> Clients:
        """Opens the data and returns the population; what JAX compiles is kept on the machine.

        Raises:
            InputError: the data are not on this machine.
        """
        keep_compiled()
        data = open_data(self.spec, sizes=self.sizes, find=self._found)
        return Experiment(self.spec, data).clients

    def _found(self, _: str) -> Path:
        if self.directory is None or not self.directory.is_dir():
            raise InputError(
                f"a worker does not find the data: got no directory {self.directory}; expected the "
                "imported dataset at the same path on every machine; let KEYHOLE_CACHE be a folder "
                "that all machines share, or copy it to them"
            )
        return self.directory


class RayEngine:
    """Workers on Ray that train clients: an engine for rounds, and a context that ends them.

    Workers let clients choose keys, select their sub-models and train. They select from rows that
    lie in Ray's object store and are read in place: all rows of a small model, put there once, or
    those that the clients of a task chose. Where sub-models were delivered by a private way, they
    travel themselves, and arrays that a client's `train` gets cannot be written to. Where sums are
    asked for, updates stay with the workers, runs of blocks are added up on their node, and few
    sums of each node come back. No more than two tasks of at most four blocks are on their way to a
    worker at any time. If the workers are as many as the cores of their node, each stays on one.

    A worker or a node that is lost is replaced and its clients are trained again, with the same
    result. The process that makes the rounds, and the node it runs on, must live: a run that loses
    them goes on from its directory.

    Args:
        factory: makes the population, in each worker; importable by name on every node.
        workers: how many processes; None for one on each CPU of the cluster.
        address: of a cluster, such as 10.0.0.1:6379 or "auto"; None starts Ray on this machine,
            unless the process is connected to one.
        patience: seconds after which a worker that has not ended a block counts as lost.

    Raises:
        InputError: Ray is not installed, or a number is out of range.
        WorkerError: the cluster does not answer, has no CPU, or has no room.
    """

    def __init__(
        self,
        factory: Callable[[], Clients],
        workers: int | None = None,
        *,
        address: str | None = None,
        patience: float = 600.0,
    ) -> None:
        _check_above("number of workers", workers, 1)
        _check_above("patience", patience, 1)
        with ExitStack() as stack:
            self._ray = stack.enter_context(connected(address, workers))
            self._crew = Crew(self._ray, factory, workers, patience)
            stack.callback(self._crew.close)
            self._stack = stack.pop_all()

    def __enter__(self) -> RayEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers, and Ray where this engine has started it."""
        self._stack.close()

    @property
    def pids(self) -> list[int]:
        """Process numbers of the workers, each on its node."""
        return [member.pid for member in self._crew.ready()]

    @property
    def nodes(self) -> list[str]:
        """The node of each worker."""
        return self._crew.nodes

    def choose(
        self, clients: Clients, asked: Sequence[int], t: int, layout: Layout, run: RunParts
    ) -> list[KeysBySpace]:
        """Lets workers choose for clients; implements `Engine.choose`."""
        if len(asked) <= BLOCK:  # sooner done than asked for
            return choose_all(clients, asked, t, layout, run)
        self._crew.await_ready()
        tasks = tasks_of_choices(len(asked), self._crew.nodes)
        told = t, self._ray.put(layout), run.for_clients()

        def submit(task: WorkTask, do: Do, _: list[Any]) -> tuple[Any, Any]:
            return do(_choose, [asked[at] for at in task.jobs], *told)

        found = Call(self._crew, tasks, submit, "asked for keys").run()
        return [keys for piece in found for keys in piece.unpack()]

    def __call__(self, clients: Clients, jobs: Sequence[ClientJob]) -> list[Report]:
        """Runs jobs on whichever worker is free; returns reports in the order of the jobs.

        Args:
            clients: not used: each worker has its own.
            jobs: of one round.

        Raises:
            WorkerError: three workers in a row died of one block of jobs.
            Exception: whatever the first client that failed has raised.
        """
        self._crew.await_ready()
        found = self._run(tasks_of_updates(len(jobs), self._crew.nodes), jobs)
        # Copies let go of the object store, and can be written to as updates made here can.
        return [_with_leaves(np.array, report) for piece in found for report in piece]

    def add_up(self, clients: Clients, jobs: Sequence[ClientJob], layout: Layout) -> list[BlockSum]:
        """Runs jobs and adds up their updates where they were made; implements `Engine.add_up`."""
        self._crew.await_ready()
        found = self._run(tasks_of_sums(len(jobs), self._crew.nodes), jobs, layout)
        return pair_up(summed for piece in found for summed in piece)

    def incidents(self) -> list[str]:
        """Returns what went wrong since this was last asked, though nothing is lost: a sentence
        each."""
        told, self._crew.incidents = self._crew.incidents, []
        return told

    def _run(
        self, tasks: list[WorkTask], jobs: Sequence[ClientJob], layout: Layout | None = None
    ) -> list[Any]:
        """The results of tasks that no other task takes, in order."""
        packing = packing_of(jobs)
        shared = self._ray.put((packing.common, layout))

        def submit(task: WorkTask, do: Do, taken: list[Any]) -> tuple[Any, Any]:
            if task.kind == "merge":
                return do(_merge, *taken)
            # Packed no earlier: slices are read while workers train on others.
            parcel = packing.pack(task.jobs)
            if task.kind == "train":
                return do(_train, parcel, shared)
            return do(_train_and_add, parcel, shared, taken)

        return Call(self._crew, tasks, submit).run()


def _choose(clients: Clients, *told: Any) -> KeyBundle:
    """In a worker: the keys of clients."""
    return KeyBundle.of(choose_all(clients, *told))


def _train(clients: Clients, parcel: Parcel, shared: tuple[Any, None]) -> list[Report]:
    """In a worker: reports."""
    common, _ = shared
    return [_with_leaves(dense, job.run(clients)) for job in parcel.jobs(common)]


def _with_leaves(fn: Callable[[Any], Any], report: Report) -> Report:
    return replace(report, update=tree.map_leaves(fn, report.update))


def _train_and_add(
    clients: Clients, parcel: Parcel, shared: tuple[Any, Layout], before: list[Any]
) -> list[BlockSum]:
    """In a worker: the sum of blocks, or of one up to these clients; `before` refers to that of the
    clients before them, and is not waited for until these have trained."""
    common, layout = shared

    def so_far() -> BlockSum:
        return cast("BlockSum", fetch(before[0])[0])

    jobs = parcel.jobs(common)
    return pair_up(
        add_up_jobs(clients, jobs[at : at + BLOCK], layout, so_far if before else None)
        for at in range(0, len(jobs), BLOCK)
    )


def _merge(_: Clients, *sums: list[BlockSum]) -> list[BlockSum]:
    """In a worker: the sums of neighbouring blocks in one, or few where they are not 2^r."""
    return pair_up(summed for piece in sums for summed in piece)


def _check_above(name: str, value: float | None, minimum: float) -> None:
    if value is not None and not value >= minimum:
        raise InputError(
            f"{name} is out of range: got {value}; expected {minimum:g} or more; pass more"
        )
