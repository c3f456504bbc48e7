"""The graph of a call: into which tasks a round's jobs are cut, for a number of workers and nodes.

Cuts decide who works, never what comes out: sums are made of the same blocks in the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from keyhole.engines.ray.board import Task, spread_home
from keyhole.server.aggregation import BLOCK

__all__ = ["Kind", "Step", "steps_of_sums", "steps_of_updates"]

Kind: TypeAlias = Literal["train", "train_and_add", "add", "merge"]
"""Updates of some jobs; the sum of a block of jobs; the same from updates; sums of neighbours."""

_ROUNDS = 2  # tasks per worker that make up for unequal clients
_LAST_PIECE = BLOCK // 4  # clients of a task when there are few left: workers then end together


@dataclass(frozen=True)
class Step:
    """A task and what it is about.

    Args:
        kind: of work.
        jobs: places of its jobs; none for a merge.
        task: for the board.
    """

    kind: Kind
    jobs: range = field(default_factory=lambda: range(0))
    task: Task = field(default_factory=Task)


def steps_of_updates(count: int, nodes: Sequence[str]) -> list[Step]:
    """Trains `count` jobs, with an update of each as the result.

    Args:
        count: of jobs.
        nodes: the node of each worker.
    """
    pieces = _cut(range(count), min(BLOCK, _share(count, len(nodes))))
    homes = spread_home(len(pieces), nodes)
    return [
        Step("train", piece, Task(clients=len(piece), home=home))
        for piece, home in zip(pieces, homes, strict=True)
    ]


def steps_of_sums(count: int, nodes: Sequence[str]) -> list[Step]:
    """Trains `count` jobs, with sums of neighbouring blocks as results, in order.

    With fewer blocks than keep all workers busy, the clients of a block are trained by several
    workers and added up by one of them. With many, that goes for the last blocks, one for each
    worker, and runs of blocks are merged on their node, so that two sums or so come from each node,
    however many clients there are.

    Args:
        count: of jobs.
        nodes: the node of each worker.
    """
    blocks = _cut(range(count), BLOCK)
    length = _power_of_two_below(len(blocks) / (_ROUNDS * len(set(nodes))))
    runs = [blocks[at : at + length] for at in range(0, len(blocks), length)]
    is_split = len(blocks) < _ROUNDS * len(nodes)
    small = _share(count, len(nodes)) if is_split else _LAST_PIECE
    last = 0 if is_split else count - BLOCK * len(nodes)
    steps: list[Step] = []
    for run, home in zip(runs, spread_home(len(runs), nodes), strict=True):
        homes = spread_home(len(run), nodes) if is_split else [home] * len(run)
        ends = [
            _add_block(steps, block, small if block.start >= last else BLOCK, at)
            for block, at in zip(run, homes, strict=True)
        ]
        if len(ends) > 1:
            steps.append(Step("merge", task=Task(tuple(ends), home=home)))
    return steps


def _add_block(steps: list[Step], block: range, size: int, home: str) -> int:
    """Appends what one block takes; returns the place of the step that has its sum."""
    if size >= len(block):
        steps.append(Step("train_and_add", block, Task(clients=len(block), home=home)))
        return len(steps) - 1
    first = len(steps)
    pieces = _cut(block, size)
    steps += [Step("train", piece, Task(clients=len(piece), home=home)) for piece in pieces]
    steps.append(Step("add", block, Task(tuple(range(first, len(steps))), home=home)))
    return len(steps) - 1


def _share(count: int, workers: int) -> int:
    """Jobs of a piece such that every worker gets some pieces."""
    return max(1, -(-count // (_ROUNDS * workers)))


def _cut(jobs: range, size: int) -> list[range]:
    return [jobs[at : at + size] for at in range(0, len(jobs), size)]


def _power_of_two_below(value: float) -> int:
    return 1 << max(int(value).bit_length() - 1, 0)
