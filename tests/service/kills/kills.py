"""Random kills of a deployment, at moments that files show as well as at times.

Every kill has a round in which it comes at the latest: a kill that waits for an event that this
round does not bring comes when the round is stored. So all of them fall before the last round.
"""

import random
import time
from dataclasses import dataclass

from tests.helpers import LONG

# Changes of files that a kill may follow, whoever is killed: below the folder of the fleet.
EVENTS = (
    "rounds/rounds/.new-*",  # a round is being written
    "rounds/rounds/*/table-0/tree.bin",
    "rounds/rounds/*/manifest.sig",
    "rounds/current.json",
    "[01]/names/*",  # a sum is opened or forgotten
    "[01]/sums/*/opening",
    "[01]/uploads/*/device-*",  # a share has arrived
    "0/uploads/*/device-*",  # and is perhaps not at the other one yet
    "[01]/uploads/*/.closed",
    "[01]/uploads/*/.counted",
    "[01]/sums/*/list",
    "[01]/sums/*/receipt",
    "[01]/sums/*/counts",
    "[01]/ledger",
    "[01]/sums/*/share",
    "[01]/uploads/*/.removed",
    "ledger-device-*",
    "runs/*/trial-0/state/*",  # the log of the server's steps
    "runs/*/trial-0/records.jsonl",
)
VICTIMS = {"trainer": 3, "service": 4, "aggregator-0": 4, "aggregator-1": 4}  # weights
WHOM = ("all", "all", "worker", "parent")  # of a service and its workers


@dataclass(frozen=True)
class Kill:
    """A kill as it was drawn.

    Args:
        round: that the run is in, at the latest.
        event: of `EVENTS`; None for a time.
        seconds: after the event, or from when its turn comes.
    """

    victim: str
    whom: str
    round: int
    event: str | None
    seconds: float

    def __str__(self):
        when = "" if self.event is None else f" after {self.event}"
        return f"{self.victim} ({self.whom}), round {self.round}, {self.seconds:.3f} s{when}"


def draw(seed, count, rounds):
    """The kills of a run, spread over all rounds but the last."""
    rng, found = random.Random(seed), []
    for number in range(count):
        (victim,) = rng.choices(list(VICTIMS), list(VICTIMS.values()))
        whom = "all" if victim == "trainer" else rng.choice(WHOM)
        event = rng.choice(EVENTS) if rng.random() < 0.7 else None
        longest = rng.choice((0.002, 0.05)) if event else 1.5
        at = number * (rounds - 1) // count
        found.append(Kill(victim, whom, at, event, rng.uniform(0, longest)))
    return found


def carry_out(fleet, kills):
    """Kills one program after the other; each is started again at once."""
    programs = {program.name: program for program in fleet.programs}
    for number, kill in enumerate(kills):
        _reach(fleet, kill.round)
        _await(fleet, kill)
        print(f"kill {number}: {kill}, at round {fleet.made()}", flush=True)
        programs[kill.victim].kill(kill.whom)
        fleet.mend()


def to_the_end(fleet, seconds=LONG):
    """Waits for the trainer to end by itself."""
    until = time.monotonic() + seconds
    while fleet.trainer.ended() is None:
        assert time.monotonic() < until, f"the run does not end: {_logs(fleet)}"
        fleet.mend()
        time.sleep(0.1)
    assert fleet.trainer.ended() == 0, fleet.trainer.told()


def signature(folder, event):
    """What changes when an event comes."""
    found = []
    for path in folder.glob(event):
        try:
            state = path.stat()
        except FileNotFoundError:
            continue
        found.append((path.name, path.parent.name, state.st_mtime_ns, state.st_size, state.st_ino))
    return sorted(found)


def _reach(fleet, number):
    """Waits until so many rounds are stored."""
    until = time.monotonic() + LONG
    while fleet.made() < number:
        assert time.monotonic() < until, f"round {number} is not reached: {_logs(fleet)}"
        fleet.mend()
        time.sleep(0.02)


def _await(fleet, kill):
    """Waits for the moment of a kill, or for the end of its round."""
    if kill.event is not None:
        before = signature(fleet.folder, kill.event)
        while signature(fleet.folder, kill.event) == before:
            if fleet.made() > kill.round:
                return
            fleet.mend()
            time.sleep(0.001)
    until = time.monotonic() + kill.seconds
    while time.monotonic() < until and fleet.made() <= kill.round:
        time.sleep(min(0.01, max(0.0, until - time.monotonic())))


def _logs(fleet):
    return "\n".join(f"== {each.name}: {each.told()}" for each in fleet.programs)
