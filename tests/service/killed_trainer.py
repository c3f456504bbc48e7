"""Trainers over the service that kill themselves; run as a script: [--asynchronous] DIRECTORY RUN
ROUNDS.

DIRECTORY is what somebody else serves, RUN the run's own. The first dies while it waits for devices
in round 0, the second with round 1 closed, the third before round 2 is committed; each goes on with
the RUN that is there. The last prints the model in hex. Asynchronous rounds have one client at work
at a time.
"""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

from keyhole.delivery.clear import Pregenerated
from keyhole.rounds.loop import resume_run, start_run
from keyhole.rounds.machine import Buffering
from keyhole.service.inbox import SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from tests.helpers import ROOT
from tests.rounds import toy


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_every_moment(directory, path, rounds, *flags):
    """Trainers that go on with one run, each a process, of which three kill themselves; returns
    what the last one prints."""
    command = [sys.executable, "-m", "tests.service.killed_trainer", *flags]
    done = subprocess.run(
        [*command, str(directory), str(path), str(rounds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def die_in_a_fork(*arguments):
    """A trainer that shares what this process has imported, and nothing else."""
    child = os.fork()
    if child == 0:
        main(*arguments)
        os._exit(1)  # it has outlived its moment
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, "the trainer did not die"


def main(plan, directory, path, rounds, last, moment):
    spool = UpdateSpool(directory / "updates")
    with Publisher(directory) as publisher:
        kind = Served(publisher, SpoolInbox(spool), poll=0.005, named=True)
        begin = resume_run if path.exists() else start_run
        run = begin(toy.make_state(), toy.make_clients(), plan, path, kind)
        list(run.rounds(last))
        if moment == "waiting":
            kind.on_arrival = lambda waiting: die() if waiting.here else None
        elif moment == "closed":
            owner, name = (spool, "close") if plan.buffering is None else (publisher, "close_round")
            close = getattr(owner, name)
            setattr(owner, name, lambda *given: die(close(*given)))
        elif moment == "commit":
            run._commit = die
        list(run.rounds(rounds))
        run.close()
    print(toy.model_bytes(run.state).hex())


if __name__ == "__main__":
    warnings.simplefilter("error")
    *flags, directory, path, rounds = sys.argv[1:]
    buffering = Buffering(1, 2) if flags else None
    plan = toy.make_plan(delivery=Pregenerated(), buffering=buffering)
    places = plan, Path(directory), Path(path), int(rounds)
    for last, moment in enumerate(["waiting", "closed", "commit"]):
        die_in_a_fork(*places, last, moment)
    main(*places, int(rounds), "never")
