"""Publishers that are killed at random moments; run as a script: DIRECTORY KILLS SEED.

Each is a fork of this process, which has everything compiled, and publishes every round twice, as
if the first were damaged. Every third one lives until it has published a round, however slow the
machine is. After every kill, this process reads the current round and compares every byte with the
state that the round was made from.
"""

import os
import random
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np

from keyhole.service import directory as retiring
from keyhole.service import publishing
from keyhole.service.publishing import Publisher
from tests.service.small_rounds import check_current, small_state, step

OPTIONS = {"segment_bytes": 100, "cohort": ["a"]}


def can_exchange(number):
    """Whether the publisher that begins with this round may exchange names; not all systems can."""
    return number % 3 > 0


def publish_for_ever(directory, state, number, tell):
    publishing._is_whole = lambda *_: False  # so that a round published again replaces the first
    if not can_exchange(number):
        retiring._exchange = lambda *_: False
    with Publisher(directory) as publisher:
        while True:
            for durable in (number % 2 == 0, False):
                publisher.publish_state(state, number=number, durable=durable, **OPTIONS)
                tell()
            number += 1
            step(state, [number % 40])


def check(directory, state, number):
    """Steps `state` to the current round and compares; returns its number."""
    found = check_current(directory)
    if found is None:
        return -1
    assert found[0] >= number, "a round was lost"
    while state.steps < found[0]:
        step(state, [(state.steps + 1) % 40])
    for place, records in enumerate(found[1]):
        rows = state.rows(place, np.arange(len(records)))
        assert records.tobytes() == rows.tobytes(), "a round is not what was published"
    return found[0]


def main(directory, kills, seed):
    rng, state, number = random.Random(seed), small_state(), -1
    check_current(directory)
    with Publisher(directory / "warm") as publisher:
        publisher.publish_state(small_state(), number=0, **OPTIONS)
        started = time.perf_counter()  # from here on, everything is compiled
        publisher.publish_state(small_state(), number=1, **OPTIONS)
        usual = min(time.perf_counter() - started, 0.03)
    check_current(directory / "warm")
    for kill in range(kills):
        told, tells = os.pipe()
        child = os.fork()
        if child == 0:
            copy = small_state()
            while copy.steps < number + 1:
                step(copy, [(copy.steps + 1) % 40])
            publish_for_ever(directory, copy, number + 1, partial(os.write, tells, b"x"))
        os.close(tells)
        if kill % 3 == 0:
            assert os.read(told, 1) == b"x", "the publisher has ended"
        time.sleep(rng.uniform(0, 4 * usual))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(told)
        if not can_exchange(number + 1):  # between two renames: the next one puts things right
            Publisher(directory).close()
        number = check(directory, state, number)
    with Publisher(directory) as publisher:
        while state.steps < number + 1:
            step(state, [(state.steps + 1) % 40])
        publisher.publish_state(state, number=number + 1, **OPTIONS)
    check(directory, state, number + 1)
    print(number)


if __name__ == "__main__":
    warnings.simplefilter("error")
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
