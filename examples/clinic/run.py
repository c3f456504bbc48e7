"""Eight clinics train one model, and nobody sees a patient, a code or an update of one of them.

    python examples/clinic/run.py [FOLDER]

Every clinic is a process with a file of its own and a name that the trainer has never heard. Codes
are fetched by private retrieval from two slice servers, updates go in shares to two aggregators,
and so do the metrics that clinics measure on visits that they keep out of training. The trainer has
no visit at all. On the way one clinic dies, one stops for a while, and one comes late.

Two operators would run the servers; here all are on one machine, and both slice servers read one
folder.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
PROGRAM = "import sys; from keyhole.cli.main import main; main(sys.argv[1:])"
CLINICS = ["st-anne", "north", "harbour", "old-mill", "lindenhof", "riverside", "hill.7", "ward_3"]
DIES, STOPS, LATE = "north", "harbour", "ward_3"
ROUNDS = 4


class Place:
    """A folder with the processes that run in it."""

    def __init__(self, folder, stack):
        self.folder, self._stack, self._started = folder, stack, {}
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }

    def run(self, *args):
        """Runs a command to its end; returns what it printed."""
        command = [sys.executable, "-c", PROGRAM, *map(str, args)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"keyhole {args[0]} failed: {done.stderr}")
        return done.stdout

    def start(self, name, *args):
        """Starts a command that goes on; what it prints goes to NAME.log."""
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *map(str, args)],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        self._started[name] = process
        return process

    def url_of(self, name):
        """The address that a service shows once it listens."""
        return self.wait_for(name, " at http").rpartition(" ")[2]

    def wait_for(self, name, text, seconds=300):
        """The first line of a log that has a text."""
        until, log = time.monotonic() + seconds, self.folder / f"{name}.log"
        while time.monotonic() < until:
            is_over = self._started[name].poll() is not None
            for line in log.read_text().splitlines():
                if text in line and "metrics" not in line:
                    return line
            if is_over:
                break
            time.sleep(0.2)
        sys.exit(f"{name} did not say {text!r}: {log.read_text()}")

    def token(self, key, name, *more):
        """Issues a token; returns its file."""
        path = self.folder / f"{name}.{key}.token"
        path.write_text(self.run("token", "issue", "--key", f"{key}.key", "--device", name, *more))
        path.chmod(0o600)
        return path.name


def start_servers(place):
    """Two slice servers and two aggregators; returns their addresses, aggregators with keys."""
    for key in ("first", "second", "peer", "trainer-0", "trainer-1", "sums-0", "sums-1"):
        place.run("token", "new-key", f"{key}.key")
    place.run("token", "signing-key", "sign.key", "sign.pub")
    (place.folder / "rounds").mkdir()
    for server, key in enumerate(("first", "second")):
        way = ("--token-key", f"{key}.key", "--pir", server, "--again", 1)
        place.start(f"slices-{server}", "serve", "rounds", "--port", 0, *way)
    ports = [free_port(), free_port()]
    for party in (0, 1):
        keys = ("--token-key", f"sums-{party}.key", "--trainer-key", f"trainer-{party}.key")
        peer = ("--peer", f"http://127.0.0.1:{ports[1 - party]}", "--peer-key", "peer.key")
        where = ("--party", party, "--port", ports[party])
        place.start(f"sums-{party}", "aggregator", f"sums-{party}", *where, *peer, *keys)
    for party in (0, 1):
        place.wait_for(f"sums-{party}", " at http")
    slices = [place.url_of(f"slices-{server}") for server in (0, 1)]
    return slices, [f"http://127.0.0.1:{port}" for port in ports]


def free_port():
    """A port that nobody listens at."""
    import socket

    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def start_clinic(place, name, slices, sums):
    """A clinic: its file, its tokens at both slice servers, and what it insists on."""
    from clinic_task import write_visits

    write_visits(place.folder / f"{name}.npz", seed=1 + CLINICS.index(name))
    tokens = [place.token(f"sums-{party}", name, "--audience", "aggregator") for party in (0, 1)]
    pinned = ",".join(f"{url}#sums-{party}/seal.pub" for party, url in enumerate(sums))
    return place.start(
        name,
        *("device", slices[0], "--token-file", place.token("first", name)),
        *("--second", slices[1], "--second-token-file", place.token("second", name)),
        *("--task", "clinic_task:TASK", "--data", f"{name}.npz", "--hold-out", 0.2),
        *("--aggregators", pinned, "--aggregator-tokens", ",".join(tokens)),
        *("--trainer-key", "sign.pub", "--min-clients", 3),
        *("--ledger", f"{name}.ledger"),
    )


def start_trainer(place, sums):
    """The trainer: no data, no names of clinics."""
    tokens = [place.token(f"trainer-{p}", "trainer", "--audience", "aggregator") for p in (0, 1)]
    return place.start(
        "trainer",
        *("train", "clinic_task:TASK", "--devices", "rounds", "--out", "runs"),
        *("--sampling", "check-in", "--cohort", 4, "--over-selection", 1.25),
        *("--rounds", ROUNDS, "--round-seconds", 60, "--evaluators", 4, "--evaluate-every", 2),
        *("--keys", "top", "--m", 60, "--client-lr", 1.0, "--mean-over", "choosers"),
        *("--delivery", "pir", "--force", "--signing-key", "sign.key"),
        *("--aggregators", ",".join(sums), "--aggregator-tokens", ",".join(tokens)),
    )


def main(folder):
    with ExitStack() as stack:
        place = Place(folder, stack)
        slices, sums = start_servers(place)
        print(f"slice servers at {', '.join(slices)}; aggregators at {', '.join(sums)}")
        trainer = start_trainer(place, sums)
        here = {name: start_clinic(place, name, slices, sums) for name in CLINICS if name != LATE}
        print(f"{len(here)} clinics check in; the trainer has no visit and knows no name")
        place.wait_for("trainer", "round 0 closed")
        here[DIES].kill()
        here[STOPS].send_signal(signal.SIGSTOP)
        print(f"after round 0 {DIES} dies, {STOPS} stops, and {LATE} comes")
        start_clinic(place, LATE, slices, sums)
        place.wait_for("trainer", "round 2 closed")
        here[STOPS].send_signal(signal.SIGCONT)
        print(f"after round 2 {STOPS} goes on")
        trainer.wait()
        if trainer.returncode:
            sys.exit((place.folder / "trainer.log").read_text())
    return show(folder)


def show(folder):
    """What came of it, from the records of the run."""
    import keyhole as kh

    (run,) = (folder / "runs").iterdir()
    records = kh.open_run(run).records()
    for record in records:
        told = "".join(f"; {name} {value:.3f}" for name, value in record.metrics.items())
        print(f"{record.told}{told}")
    for what, seen in (("codes", records[-1].seen_by), ("updates", records[-1].seen_in_sum)):
        print(f"who learned what of {what}")
        for party, learned in seen.items():
            print(f"  {party}: {learned}")
    print(f"accuracy on visits that only clinics have: {records[-1].metrics['accuracy']:.3f}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(Path(made)))
