"""A whole deployment as its operators start it, each program a process that can be killed.

Slice service, trainer, two aggregators, four devices and a publisher, over loopback: slices with
proofs, manifests that the trainer signs, shares that are sealed, rows that fewer than two clients
sent dropped, and a ledger at each aggregator and each device.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from keyhole.errors import ServiceError
from keyhole.service.access import Keyring, new_key
from keyhole.service.sum_files import sealing_key
from keyhole.wire.signing import SigningKey
from tests.helpers import LONG, ROOT
from tests.service.kills.people import PEOPLE
from tests.service.sockets import held_port

MAIN = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]
TASK = (
    *("tests.service.kills.people:MEDIANS", "--size", "films=2000", "--m", 8),
    *("--cohort", PEOPLE, "--client-lr", 0.125),
)
DATA = ("--data", "tests.service.kills.people:few", "--seed", 5)
PER_KEY = ("--min-clients-per-key", 2)
DEVICES = [f"device-{client}" for client in range(PEOPLE)]


def children_of(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Program:
    """A `keyhole` command that can be killed and started again; what it prints is kept."""

    def __init__(self, name, log, *command):
        self.name, self.log, self.starts = name, log, 0
        self._command = [*MAIN, *map(str, command)]
        self._process = None

    def start(self):
        with self.log.open("a") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=ROOT)
        self.starts += 1

    @property
    def is_running(self):
        return self._process is not None and self._process.poll() is None

    def ended(self):
        """How it ended by itself; None as long as it lives, and if it was killed."""
        return None if self._process is None else self._process.poll()

    def wait(self, seconds=LONG):
        return self._process.wait(seconds)

    def kill(self, whom="all"):
        """SIGKILL to the program and the workers that it has started ("all"), to the workers
        alone, or to the program alone: its workers have to end by themselves."""
        if not self.is_running:
            return
        family = [self._process.pid, *children_of(self._process.pid)]
        ends = [os.pidfd_open(pid) for pid in family]
        struck = {"all": family, "worker": family[1:], "parent": family[:1]}[whom]
        for pid in struck:
            os.kill(pid, signal.SIGKILL)
        gone = ends[1:] if whom == "worker" else ends
        for end in gone:
            assert select.select([end], [], [], LONG)[0], f"{self.name}: a worker does not end"
        for end in ends:
            os.close(end)
        if whom != "worker":
            self._process.wait()
            self._process = None

    def told(self):
        """The last of what it printed."""
        return self.log.read_text()[-3000:]


def secret_file(path, text):
    path.touch(0o600)
    path.write_text(text)
    return path


class Fleet:
    """All programs of a run that trains so many rounds.

    Args:
        folder: where everything is.
        rounds: that the trainer makes.
    """

    def __init__(self, folder, rounds):
        self.folder, self.rounds, self._stack = folder, rounds, ExitStack()
        self.ports = [self._stack.enter_context(held_port()) for _ in range(3)]
        self.service_url, *self.sum_urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        for name in ("rounds", "runs", "keys", "logs"):
            (folder / name).mkdir()
        names = "service", "peer", "devices-0", "devices-1", "trainers-0", "trainers-1"
        self._keys = {name: secret_file(folder / "keys" / name, new_key()) for name in names}
        signing = SigningKey.fresh()
        secret_file(folder / "keys" / "signing", signing.encode())
        (folder / "keys" / "signing.pub").write_text(signing.public.encode())
        self.sealed = ",".join(
            f"{url}#{sealing_key(folder / str(party)).public.hex()}"
            for party, url in enumerate(self.sum_urls)
        )
        self.service = self._program("service", *self._serve())
        self.aggregators = [self._program(f"aggregator-{p}", *self._aggregate(p)) for p in (0, 1)]
        self.trainer = self._program("trainer", *self._train())
        self.devices = [self._program(name, *self._device(name)) for name in DEVICES]
        self.programs = [self.service, *self.aggregators, *self.devices, self.trainer]

    def __enter__(self):
        for program in self.programs:
            program.start()
        return self

    def __exit__(self, *_):
        for program in self.programs:
            program.kill()
        self._stack.close()

    def made(self):
        """How many rounds are stored."""
        found = list(self.folder.glob("runs/*/trial-0/records.jsonl"))
        return found[0].read_bytes().count(b"\n") if found else 0

    def mend(self):
        """Starts again what was killed, and what has given up since others were away for so long:
        on a machine that is busy a start may take as long. Nothing may end in another way."""
        for program in self.programs:
            ended = program.ended()
            if program.is_running or (program is self.trainer and ended == 0):
                continue
            assert ended in (None, ServiceError.exit_code), (
                f"{program.name} ended with {ended}: {program.told()}"
            )
            program.start()

    def _program(self, name, *command):
        return Program(name, self.folder / "logs" / name, *command)

    def _token(self, key, name, audience="slices"):
        ring, path = Keyring.load(self._keys[key]), self.folder / "keys" / f"{name}-at-{key}"
        made = ring.issue("device", name, now=time.time(), seconds=86_400, audience=audience)
        return secret_file(path, made)

    def _tokens(self, whose, name):
        """At both aggregators."""
        files = [self._token(f"{whose}-{party}", name, "aggregator") for party in (0, 1)]
        return ",".join(map(str, files))

    def _serve(self):
        keys = ("--token-key", self._keys["service"], "--again", 0.2)
        return "serve", self.folder / "rounds", "--port", self.ports[0], *keys

    def _aggregate(self, party):
        return (
            *("aggregator", self.folder / str(party), "--party", party),
            *("--peer", self.sum_urls[1 - party], "--peer-key", self._keys["peer"]),
            *("--token-key", self._keys[f"devices-{party}"]),
            *("--trainer-key", self._keys[f"trainers-{party}"], "--port", self.ports[1 + party]),
        )

    def _train(self):
        return (
            *("train", *TASK, *DATA, *PER_KEY, "--rounds", self.rounds),
            *("--out", self.folder / "runs", "--devices", self.folder / "rounds"),
            *("--named-cohorts", "--signing-key", self.folder / "keys" / "signing"),
            *("--aggregators", ",".join(self.sum_urls), "--min-clients", PEOPLE),
            *("--aggregator-tokens", self._tokens("trainers", "trainer")),
        )

    def _device(self, name):
        return (
            *("device", self.service_url, "--task", TASK[0], *DATA, *PER_KEY),
            *("--client", name.removeprefix("device-"), "--cache", self.folder / f"cache-{name}"),
            *("--token-file", self._token("service", name), "--min-clients", PEOPLE),
            *("--trainer-key", self.folder / "keys" / "signing.pub"),
            *("--ledger", self.folder / f"ledger-{name}", "--aggregators", self.sealed),
            *("--aggregator-tokens", self._tokens("devices", name)),
        )
