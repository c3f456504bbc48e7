"""Runs with own parts, each of which kills its process in the middle of a round.

python -m tests.seams.killed DIRECTORY SEAM... starts them from one process, which has loaded what
they need.
"""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from keyhole.rounds.loop import resume_run, start_run
from tests.seams.own import part

ROUNDS, KILLED_IN = 4, 2


def deadly(clients, run):
    """The clients, one of which ends the process without a word once two rounds are stored."""

    def data(client):
        if run and len(run[0].records) == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return clients.data(client)

    return replace(clients, data=data)


def start(name, directory):
    """Makes two rounds, and dies in the third."""
    state, clients, plan, how = part(name)
    run = []
    run.append(start_run(state, deadly(clients, run), plan, Path(directory)))
    list(run[0].rounds(ROUNDS, **how))


def main(directory, *names):
    for name in names:
        child = os.fork()
        if not child:
            start(name, Path(directory, name))
            os._exit(0)  # not reached
        assert os.waitpid(child, 0)[1] == signal.SIGKILL


def resume(name, directory, variant=0):
    state, clients, plan, how = part(name, variant)
    run = resume_run(state, clients, plan, Path(directory))
    assert len(run.records) == KILLED_IN
    list(run.rounds(ROUNDS, **how))
    run.close()
    return run


if __name__ == "__main__":
    main(*sys.argv[1:])
