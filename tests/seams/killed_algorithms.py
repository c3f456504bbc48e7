"""Runs of the examples that keep states, each killed in its third round.

python -m tests.seams.killed_algorithms DIRECTORY starts them from one process.
"""

import os
import signal
import sys
from pathlib import Path

from keyhole.server.client_states import ClientStates
from keyhole.server.store import Store
from tests.helpers import load_example

ROUNDS, KILLED_IN = 5, 2
EXAMPLES = {  # and where each dies
    "scaffold": (Store, "commit"),  # states are on the disk, and their step is not
    "personal_head": (ClientStates, "commit"),  # the step is stored, and older states are there
}


def train(name, data, out, rounds=ROUNDS):
    return load_example(name).run(True, data, rounds, out)


def die_in(kind, method):
    """Lets the third call of a method end the process without a word."""
    usual, calls = getattr(kind, method), []

    def deadly(self, *args):
        calls.append(args)
        if len(calls) > KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(self, *args)

    setattr(kind, method, deadly)


def main(directory):
    for name, place in EXAMPLES.items():
        child = os.fork()
        if not child:
            die_in(*place)
            train(name, load_example(name).make_data(), Path(directory, name))
            os._exit(0)  # not reached
        assert os.waitpid(child, 0)[1] == signal.SIGKILL


if __name__ == "__main__":
    main(*sys.argv[1:])
