"""A population large enough for several blocks; some of its clients send what cannot be added."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import keyhole as kh
from keyhole.errors import InputError
from keyhole.rounds.clients import ClientJob, Clients
from keyhole.sampling import Cohorts
from tests.rounds import toy

COUNT = 260
EXAMPLES = toy.oracle.make_clients(COUNT, toy.FEATURE.num_keys, seed=7)


def get_examples(client):
    return EXAMPLES[client]


def train(submodel, examples, rng, context=None):
    """The toy's client, which reports all that it may; about one in forty diverges, and one that
    took part before moves less."""
    update = toy.train(submodel, examples, rng)
    times = 0 if context is None or context.state is None else int(context.state["times"])
    factor = np.nan if rng.random() < 0.025 else 1 / (1 + times)
    moved = {"x": update["x"] * np.float32(factor)}
    state = {"times": np.array(times + 1)}
    return kh.Report(moved, len(examples), {"times": times, "mean": update["x"].mean()}, state)


def make_clients(train=train):
    return Clients(COUNT, get_examples, toy.choose, train, toy.localize)


def make_plan(**changes):
    cohorts = changes.pop("cohorts", None) or {}
    return toy.make_plan(cohorts=Cohorts(COUNT, **{"size": 150, **cohorts}), **changes)


def make_jobs(count=COUNT):
    state = toy.make_state()
    chosen = [toy.chosen(EXAMPLES[c]) for c in range(count)]
    return [ClientJob.of(0, 0, 0, c, z, state.select(z)) for c, z in enumerate(chosen)]


def check_one_loss(incidents):
    """One worker was lost, and no more than the clients of a block trained again: those that it
    had, and those after them, which had nothing to go on from."""
    told = [re.fullmatch(r"(\w+) lost: (\d+) clients trained again", told) for told in incidents]
    assert [match[1] for match in told] in (["worker"], ["worker", "results"])
    assert 0 < sum(int(match[2]) for match in told) <= 64


def once(mark, act):
    """Does something in the first client that gets there; a file remembers that it did."""

    def train_once(submodel, examples, rng, context):
        try:
            Path(mark).touch(exist_ok=False)
        except FileExistsError:
            return train(submodel, examples, rng, context)
        act()
        return train(submodel, examples, rng, context)

    return train_once


def kill_me():
    os.kill(os.getpid(), signal.SIGKILL)


def make_suicidal_clients(mark):
    return make_clients(once(mark, kill_me))


def make_sleepy_clients(mark):
    """One client does not come back; the mark tells that it has begun."""
    return make_clients(once(mark, lambda: time.sleep(1000)))


def make_slow_clients(mark):
    """The mark tells that the first has begun."""

    def train_slowly(submodel, examples, rng, context):
        Path(mark).touch()
        time.sleep(0.04)
        return train(submodel, examples, rng, context)

    return make_clients(train_slowly)


def make_clients_at_second_try(folder):
    """Of each of two workers, the first to be started dies."""
    for name in ("one", "two"):
        try:
            (Path(folder) / name).touch(exist_ok=False)
        except FileExistsError:
            continue
        kill_me()
    return make_clients()


def make_deadly_clients():
    return make_clients(lambda submodel, examples, rng: kill_me())


@dataclass(frozen=True)
class BreakableCrowd:
    """Makes the clients of `make_clients`, all of which fail while a file is there."""

    mark: str

    def __call__(self):
        def train_unless_broken(submodel, examples, rng, context):
            if Path(self.mark).exists():
                raise InputError("it broke: got 1; expected 0; mend it")
            return train(submodel, examples, rng, context)

        return make_clients(train_unless_broken)


def make_nobody():
    raise InputError("there are no clients: got 0; expected some; find them")
