"""Aggregators as processes: what an operator starts, and what is left when one is killed."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from keyhole.cli.main import keyhole
from keyhole.service.access import Keyring, new_key
from keyhole.service.aggregator import Keyrings
from keyhole.service.reading import RoundsDirectory
from keyhole.service.sum_services import AggregatorClient
from keyhole.wire.http import HttpClient
from keyhole.wire.sockets import Retry
from tests.helpers import LONG, ROOT, eventually
from tests.service.sockets import held_port, make_certificates
from tests.service.sums.aggregators import (
    COHORT,
    Pair,
    facts_at,
    round_name,
    terms_of,
)

MAIN = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]
ROUND = round_name()


def key_file(path):
    path.write_text(new_key())
    path.chmod(0o600)
    return path


class Processes(Pair):
    """Both aggregators as `keyhole aggregator` starts them."""

    def __init__(self, directory, scheme="http"):
        super().__init__(directory)
        self.scheme = scheme
        self.peer_file = key_file(directory / "peer.key")
        self.peer_key = Keyring.load(self.peer_file)
        self.files = [
            [key_file(directory / f"{name}-{party}.key") for name in ("devices", "trainers")]
            for party in (0, 1)
        ]
        self.keys = [Keyrings(*map(Keyring.load, two), self.peer_key) for two in self.files]
        self.running = [None, None]

    def start(self, party, *options):
        devices, trainers = self.files[party]
        command = [
            *MAIN,
            *("aggregator", self.directory / str(party), "--party", party),
            *("--peer", self.urls[1 - party], "--peer-key", self.peer_file),
            *("--token-key", devices, "--trainer-key", trainers),
            *("--port", self.ports[party], *options),
        ]
        process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        line = process.stderr.readline()
        shown = rf"aggregating as party {party} at https?://[^\s#]+#([0-9a-f]{{64}})\n"
        assert bytes.fromhex(re.fullmatch(shown, line)[1]) == self.public(party), line
        self.running[party] = process

    def kill(self, party):
        """The process and its worker, as if the machine had gone."""
        process, self.running[party] = self.running[party], None
        if process is not None:
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            children = listed.read_text().split()
            process.kill()
            for child in children:
                os.kill(int(child), signal.SIGKILL)
            process.wait()
            process.stderr.close()
            self.close_lines()

    def stop(self, party):
        process, self.running[party] = self.running[party], None
        if process is not None:
            process.terminate()
            assert process.wait(LONG) == 0
            process.stderr.close()


@pytest.fixture
def pair(tmp_path):
    made = Processes(tmp_path)
    try:
        for party in (0, 1):
            made.start(party)
        yield made
    finally:
        made.close_lines()
        for party in (0, 1):
            made.kill(party)
        made.give_up_ports()


@pytest.mark.slow
def test_killed_aggregators_go_on_where_they_were(pair):
    """Killed with shares on the disk, and again while the sum is closing."""
    terms = terms_of(minimum=4)
    pair.open(ROUND, terms)
    rows = [pair.share(ROUND, terms, name, seed) for seed, name in enumerate(COHORT[:3])]
    for party in (0, 1):
        pair.kill(party)
        pair.start(party)
    assert [pair.trainer(party).status(ROUND).devices for party in (0, 1)] == [COHORT[:3]] * 2
    rows += [pair.share(ROUND, terms, name, seed + 3) for seed, name in enumerate(COHORT[3:])]
    pair.kill(1)
    pair.trainer(0).close_sum(ROUND)
    assert eventually(lambda: "other aggregator" in pair.trainer(0).status(ROUND).waiting)
    pair.kill(0)
    for party in (0, 1):
        pair.start(party)
    pair.trainer(1).close_sum(ROUND)
    pair.wait(ROUND)
    pair.check_sum(ROUND, terms, rows)
    before = pair.trainer(0).share(ROUND, facts_at(terms))
    pair.kill(0)
    pair.start(0)
    again = pair.trainer(0).share(ROUND, facts_at(terms))
    assert before.payload == again.payload
    for party in (0, 1):
        pair.close_lines()
        pair.stop(party)


def test_keys_and_urls_that_cannot_be_used_are_refused_before_a_port_is_taken(tmp_path):
    keys = [key_file(tmp_path / name) for name in ("a", "b", "c")]

    def run(*more, names=("token-key", "trainer-key", "peer-key"), files=keys, peer="http://x.y"):
        flags = [f for name, file in zip(names, files, strict=True) for f in (f"--{name}", file)]
        args = ["aggregator", tmp_path / "d", "--party", 0, "--peer", peer, *flags, *more]
        return CliRunner().invoke(keyhole, [str(arg) for arg in args])

    assert "travel in the clear" in str(run().exception)
    same = run(files=[keys[0], keys[0], keys[1]], peer="https://x.y")
    assert "one key for different callers" in str(same.exception)
    assert run("--peer-cert", keys[0], peer="https://x.y").exit_code == 2
    assert run("--party", 2).exit_code == 2
    keys[2].chmod(0o644)
    assert "read by others" in str(run(peer="https://x.y").exception)


@pytest.mark.slow
def test_aggregators_speak_tls_to_each_other_devices_and_trainers(tmp_path):
    folder = make_certificates(tmp_path)
    tls = ["--tls-cert", folder / "server.pem", "--tls-key", folder / "server.key"]
    pair = Processes(tmp_path, scheme="https")
    try:
        for party in (0, 1):
            pair.start(party, *tls, "--peer-ca", folder / "ca.pem")
        terms = terms_of(minimum=4)
        with ExitStack() as stack:
            lines = []
            for party in (0, 1):
                ring = pair.keys[party].trainers
                to = {"audience": "aggregator"}
                token = ring.issue("device", "trainer", now=time.time(), seconds=60, **to)
                client = HttpClient(pair.urls[party], ca=folder / "ca.pem", retry=Retry(attempts=3))
                lines.append(AggregatorClient(client, token, party))
                stack.callback(client.close)
                lines[party].open(ROUND, terms.encode(), COHORT)
            for line in lines:
                line.close_sum(ROUND)
            assert eventually(lambda: all(one.status(ROUND).failure for one in lines))
            kinds = {one.status(ROUND).failure.kind for one in lines}
            assert kinds == {"ThresholdError"}  # they have exchanged lists: both are empty
    finally:
        for party in (0, 1):
            pair.kill(party)
        pair.give_up_ports()


def cohort_of(rounds):
    """The devices of the round that a trainer publishes."""
    with closing(RoundsDirectory(rounds)) as directory:
        assert eventually(lambda: directory.current() is not None, seconds=240)
        return sorted(directory.current().cohort)


def token(key, device, audience="slices"):
    args = ["token", "issue", "--key", str(key), "--device", device, "--audience", audience]
    made = CliRunner().invoke(keyhole, args)
    assert made.exit_code == 0, made.output
    return made.stdout


@pytest.mark.slow
def test_a_private_run_of_programs_trains_and_says_who_learned_what(pair, tmp_path):
    """Slice service, trainer, devices and aggregators, all as an operator starts them."""
    rounds, service_key = tmp_path / "rounds", key_file(tmp_path / "service.key")
    rounds.mkdir()
    signing = tmp_path / "sign.key", tmp_path / "sign.pub"
    assert CliRunner().invoke(keyhole, ["token", "signing-key", *map(str, signing)]).exit_code == 0
    task = ["--data", "synthetic", "--size", "words=300", "--size", "tags=8", "--client-lr", "1"]
    task += ["--cohort", "3", "--m", "20"]
    tokens = []
    for party in (0, 1):
        tokens.append(tmp_path / f"trainer-{party}.token")
        tokens[-1].write_text(token(pair.files[party][1], "trainer", "aggregator"))
    urls = ",".join(pair.urls)
    sealed = ",".join(f"{url}#{tmp_path / str(p)}/seal.pub" for p, url in enumerate(pair.urls))
    with ExitStack() as stack:
        port = stack.enter_context(held_port())

        def launch(*args):
            log = stack.enter_context((tmp_path / f"log-{len(started)}").open("w"))
            command = [*MAIN, *map(str, args)]
            started.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT))
            stack.callback(started[-1].wait)
            stack.callback(started[-1].kill)
            return started[-1]

        started = []
        launch("serve", rounds, "--port", port, "--token-key", service_key, "--again", 0.2)
        trainer = launch(
            *("train", "so_tag", *task, "--rounds", 1, "--out", tmp_path / "runs"),
            *("--devices", rounds, "--round-seconds", 240),
            *("--aggregators", urls, "--min-clients", 3, "--signing-key", signing[0]),
            *("--aggregator-tokens", ",".join(map(str, tokens))),
        )
        for name in cohort_of(rounds):
            files, client = [], name.removeprefix("device-")
            for at, key in enumerate([service_key, pair.files[0][0], pair.files[1][0]]):
                files.append(tmp_path / f"{name}-{at}.token")
                files[-1].write_text(token(key, name, "aggregator" if at else "slices"))
            launch(
                *("device", f"http://127.0.0.1:{port}", "--task", "so_tag", "--client", client),
                *("--token-file", files[0], *task[:2], "--min-clients", 3),
                *("--trainer-key", signing[1]),
                *("--aggregators", sealed, "--aggregator-tokens", f"{files[1]},{files[2]}"),
            )
        assert trainer.wait(300) == 0, (tmp_path / "log-1").read_text()
    shown = (tmp_path / "log-1").read_text()
    assert "second server" in shown
    assert "trainer" in shown
