"""Runs `keyhole train` with own parts, in children of one process that has loaded what they need.

python -m tests.seams.killed_commands DIRECTORY: one run is killed once two rounds are stored, and
goes on; another makes its rounds in one piece.
"""

import os
import signal
import sys
from pathlib import Path

import keyhole.experiments.experiment
from keyhole.cli.main import main as keyhole
from keyhole.rounds import loop

KILLED_IN = 2
COMMAND = (
    "train tests.seams.own_task:FILMS --data tests.seams.own_task:few_ratings"
    " --keys tests.seams.own_parts:some --optimizer tests.seams.own_parts:Damped"
    " --engine tests.seams.own_parts:Reversed --metrics tests.seams.own_parts:norm --json --out"
)


def in_child(work):
    """Runs `work` in a child; returns how it ended, as `waitpid` has it."""
    child = os.fork()
    if not child:
        try:
            work()
        except SystemExit as ended:
            os._exit(int(ended.code or 0))
        os._exit(0)
    return os.waitpid(child, 0)[1]


def train(out):
    keyhole([*COMMAND.split(), str(out)])


def train_and_die(out):
    append = loop.append_records

    def dying(path, records):
        append(path, records)
        if len(path.read_text().splitlines()) == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)

    loop.append_records = dying
    train(out)


def main(directory):
    killed, whole = Path(directory, "killed"), Path(directory, "whole")
    assert in_child(lambda: train_and_die(killed)) == signal.SIGKILL
    assert in_child(lambda: train(killed)) == 0
    assert in_child(lambda: train(whole)) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
