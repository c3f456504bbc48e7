"""Publishers of one state, which are killed at random moments; the last is left alone."""

import random
import time

from tests.helpers import LONG
from tests.service.kills.fleet import DATA, Program
from tests.service.kills.kills import signature
from tests.service.small_rounds import check_current

EVENTS = ("rounds/.new-*", "rounds/.new-*/table-0/*", "rounds/*/manifest.json", "current.json")


def publisher(run, folder):
    """`keyhole publish` of the state of a run, as the next round in `folder / "rounds"`."""
    command = ("publish", run, folder / "rounds", *DATA[:2])
    return Program("publisher", folder / "log", *command, "--signing-key", folder / "signing")


def kill_publishers(run, folder, seed, count):
    """Starts and kills so many; returns the records of the tables of the round that the last one,
    which nobody kills, has published. After each kill the current round is whole, and none is lost.
    """
    rng, program, number = random.Random(seed), publisher(run, folder), -1
    for kill in range(count):
        program.start()
        event = rng.choice(EVENTS) if kill % 4 else None
        wait = rng.choice((0.002, 0.02)) if event else 5.0
        _await(program, folder / "rounds", event)
        time.sleep(rng.uniform(0, wait))
        print(f"publisher {kill} is killed after {event}, with round {number} there", flush=True)
        program.kill()
        found = check_current(folder / "rounds")
        assert found is None or found[0] >= number, "a round was lost"
        number = -1 if found is None else found[0]
    program.start()
    assert program.wait(LONG) == 0, program.told()
    found = check_current(folder / "rounds")
    assert found[0] == number + 1
    return found[1]


def _await(program, directory, event):
    """Waits for an event, or for the end of a program that was too quick."""
    if event is None:
        return
    before = signature(directory, event)
    while signature(directory, event) == before and program.ended() is None:
        time.sleep(0.001)
    assert program.ended() in (None, 0), program.told()
