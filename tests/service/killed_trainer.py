"""A trainer over the service that kills itself; run as a script:
[--asynchronous] DIRECTORY RUN ROUNDS ROUND MOMENT.

DIRECTORY is what somebody else serves, RUN the run's own; ROUND is the one in which it dies, at
MOMENT: waiting for devices, with the round closed, or before it is committed. A RUN that is there
goes on. Ends by printing the model in hex. Asynchronous rounds have one client at work at a time.
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
    """Trainers that go on with one run in processes of their own, of which three kill themselves;
    returns what the last one prints."""

    def train(last, moment):
        command = [sys.executable, "-m", "tests.service.killed_trainer", *flags]
        return subprocess.run(
            [*command, str(directory), str(path), str(rounds), str(last), moment],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=ROOT,
        )

    for last, moment in enumerate(["waiting", "closed", "commit"]):
        killed = train(last, moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = train(rounds, "never")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def main(plan, directory, path, rounds, last, moment):
    spool = UpdateSpool(directory / "updates")
    with Publisher(directory) as publisher:
        kind = Served(publisher, SpoolInbox(spool), poll=0.005)
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
    *flags, directory, path, rounds, last, moment = sys.argv[1:]
    buffering = Buffering(1, 2) if flags else None
    plan = toy.make_plan(delivery=Pregenerated(), buffering=buffering)
    main(plan, Path(directory), Path(path), int(rounds), int(last), moment)
