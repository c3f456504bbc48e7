"""Runs that keep the best model, each killed at one moment of a round that is the best.

python -m tests.front.killed_best DIRECTORY: for each moment a folder with the run that went on,
and `whole`, which was never killed.
"""

import os
import signal
import sys
from pathlib import Path

from keyhole.front.train import train
from keyhole.rounds import loop
from keyhole.server import snapshots
from tests.front.test_best import HOW, KILLED_IN, MOMENTS, rising_and_falling


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before_the_model(out):
    usual = snapshots.save_snapshot

    def dying(path, snapshot):
        if path.name == "best.khs" and snapshot.state.steps == KILLED_IN:
            die()
        usual(path, snapshot)

    snapshots.save_snapshot = dying
    go_on(out)


def before_the_record(out):
    usual = loop.append_records

    def dying(path, records):
        if records[-1].round + 1 == KILLED_IN:
            die()
        usual(path, records)

    loop.append_records = dying
    go_on(out)


def after_the_record(out):
    usual = loop.append_records

    def dying(path, records):
        usual(path, records)
        if records[-1].round + 1 == KILLED_IN:
            die()

    loop.append_records = dying
    go_on(out)


def go_on(out):
    train(rising_and_falling(), out=out, **HOW)


def in_child(work, out):
    child = os.fork()
    if not child:
        work(out)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(directory):
    for moment in MOMENTS:
        out = Path(directory, moment)
        assert in_child(globals()[moment], out) == signal.SIGKILL
        assert in_child(go_on, out) == 0
    assert in_child(go_on, Path(directory, "whole")) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
