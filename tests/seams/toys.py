"""Own parts for the toy run of tests/rounds/toy.py: sums, choices and train functions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.aggregation.base import SumRequest, SumResult
from keyhole.aggregation.plain import PLAIN
from keyhole.rounds.loop import resume_run, start_run
from keyhole.server.row_sums import RowUpdate
from tests.rounds import toy

ROUNDS = 2


@dataclass(frozen=True)
class Sum:
    """An aggregation made of a function; it declares nothing."""

    add: Callable[[SumRequest], SumResult]


def scaled_sum(factor):
    """A closure: every one of them has the same name."""

    def own_sum(request):
        return _scaled(PLAIN.add(request), factor)

    return Sum(own_sum)


class ScaledSum:
    """The same as a class without a text of its own."""

    def __init__(self, factor):
        self.factor = factor

    def add(self, request):
        return _scaled(PLAIN.add(request), self.factor)


def _scaled(summed, factor):
    rows = tuple(RowUpdate(u.keys, np.float32(factor) * u.rows) for u in summed.rows)
    return replace(summed, rows=rows)


def passed_on(aggregate):
    """A wrapper that changes nothing and declares nothing."""

    def pass_on(request):
        return aggregate.add(request)

    return Sum(pass_on)


def started(directory, clients=None, state=None, **plan):
    """Makes a run of a few rounds and closes it, as if it had been stopped there."""
    run = start_run(
        state or toy.make_state(), clients or toy.make_clients(), toy.make_plan(**plan), directory
    )
    list(run.rounds(ROUNDS))
    run.close()
    return run


def resumed(directory, clients=None, state=None, **plan):
    """Goes on with the run of a directory."""
    return resume_run(
        state or toy.make_state(), clients or toy.make_clients(), toy.make_plan(**plan), directory
    )
