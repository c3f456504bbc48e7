"""The graph of a call: into which tasks a round's jobs are cut, for a number of workers and nodes.

Cuts decide who works, never what comes out: sums are made of the same blocks in the same pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from keyhole.engines.ray.board import Task, spread_home
from keyhole.server.aggregation import BLOCK

__all__ = ["Kind", "Step", "steps_of_choices", "steps_of_sums", "steps_of_updates"]

Kind: TypeAlias = Literal["choose", "train", "train_and_add", "merge"]
"""Keys of some clients; updates of some jobs; the sum of a few blocks of jobs, or of one up to a
piece of it; sums of neighbours."""

_ROUNDS = 2  # tasks per worker that make up for unequal clients
_TASKS = 4  # the same where a task has several blocks
_MOST_BLOCKS = 4  # of a task
_MOST_SUMS = 8  # that come from one node as they are: on one machine, the driver merges no slower
_MOST_CHOICES = 8 * BLOCK  # clients that choose in one task
_LAST_PIECE = BLOCK // 4  # clients of a task when there are few left: workers then end together


@dataclass(frozen=True)
class Step:
    """A task and what it is about.

    Args:
        kind: of work.
        jobs: places of its jobs, or of the clients that choose; none for a merge.
        task: for the board.
    """

    kind: Kind
    jobs: range = field(default_factory=lambda: range(0))
    task: Task = field(default_factory=Task)


def steps_of_choices(count: int, nodes: Sequence[str]) -> list[Step]:
    """Lets `count` clients choose keys, which is short: few tasks.

    Args:
        count: of clients.
        nodes: the node of each worker.
    """
    pieces = _cut(range(count), min(_MOST_CHOICES, _share(count, len(nodes), rounds=1)))
    return _spread("choose", pieces, nodes)


def steps_of_updates(count: int, nodes: Sequence[str]) -> list[Step]:
    """Trains `count` jobs, with an update of each as the result.

    Args:
        count: of jobs.
        nodes: the node of each worker.
    """
    return _spread("train", _cut(range(count), min(BLOCK, _share(count, len(nodes)))), nodes)


def _spread(kind: Kind, pieces: Sequence[range], nodes: Sequence[str]) -> list[Step]:
    """A step for each piece, neighbours on the same node."""
    homes = spread_home(len(pieces), nodes)
    return [
        Step(kind, piece, Task(clients=len(piece), home=home))
        for piece, home in zip(pieces, homes, strict=True)
    ]


def steps_of_sums(count: int, nodes: Sequence[str]) -> list[Step]:
    """Trains `count` jobs, with sums of neighbouring blocks as results, in order.

    With fewer blocks than keep all workers busy, a block is trained by several workers at a time,
    and the sum of its first clients handed from one to the next. With many, that goes for the last
    blocks, one for each worker; the others are trained a few at a time, and runs of them merged on
    their node, so that two sums or so come from each node, however many clients there are.

    Args:
        count: of jobs.
        nodes: the node of each worker.
    """
    blocks = _cut(range(count), BLOCK)
    length = _power_of_two_below(len(blocks) / (_ROUNDS * len(set(nodes))))
    few = min(_MOST_BLOCKS, _power_of_two_below(len(blocks) / (_TASKS * len(nodes))))
    runs = [blocks[at : at + length] for at in range(0, len(blocks), length)]
    is_split = len(blocks) < _ROUNDS * len(nodes)
    rounds = 1 if count <= BLOCK else _ROUNDS  # a piece costs as much as two clients
    small = _share(count, len(nodes), rounds) if is_split else _LAST_PIECE
    last = 0 if is_split else count - BLOCK * len(nodes)
    steps: list[Step] = []
    for run, home in zip(runs, spread_home(len(runs), nodes), strict=True):
        cuts = _cut_run(run, few, last, small)
        homes = spread_home(len(cuts), nodes) if is_split else [home] * len(cuts)
        ends = [_add_pieces(steps, *pair) for pair in zip(cuts, homes, strict=True)]
        if len(ends) > (1 if len(set(nodes)) > 1 else _MOST_SUMS):
            steps.append(Step("merge", task=Task(tuple(ends), home=home)))
    return steps


def _cut_run(run: Sequence[range], few: int, last: int, small: int) -> list[list[range]]:
    """Blocks a few in one piece, and from `last` on each in several of size `small`."""
    cuts: list[list[range]] = []
    for at in range(0, len(run), few):
        own = run[at : at + few]
        is_whole = own[-1].start < last
        whole = [range(own[0].start, own[-1].stop)]
        cuts += [whole] if is_whole else [_cut(block, small) for block in own]
    return cuts


def _add_pieces(steps: list[Step], pieces: Sequence[range], home: str) -> int:
    """Appends steps, one after the other; returns the place of the one that has their sum."""
    for piece in pieces:
        after = len(steps) - 1 if piece is not pieces[0] else None
        task = Task(clients=len(piece), home=home, is_piece=len(pieces) > 1, after=after)
        steps.append(Step("train_and_add", piece, task))
    return len(steps) - 1


def _share(count: int, workers: int, rounds: int = _ROUNDS) -> int:
    """Jobs of a piece such that every worker gets so many pieces."""
    return max(1, -(-count // (rounds * workers)))


def _cut(jobs: range, size: int) -> list[range]:
    return [jobs[at : at + size] for at in range(0, len(jobs), size)]


def _power_of_two_below(value: float) -> int:
    return 1 << max(int(value).bit_length() - 1, 0)
