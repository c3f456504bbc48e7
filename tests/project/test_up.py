"""`keyhole up` and `keyhole run --deploy`: all parties of a project, as processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pytest

from keyhole.project.new import write_project
from keyhole.project.spec import FILE
from tests.project.test_spec import PRIVATE

KEYHOLE = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]
WITHIN = 240  # seconds, on a machine that does much else


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@pytest.fixture
def folder(tmp_path):
    write_project(tmp_path / "films")
    return tmp_path / "films"


def rewrite(folder, changes):
    text = (folder / FILE).read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / FILE).write_text(text)


@contextmanager
def up(folder, end=signal.SIGTERM):
    """The parties, once all are up, until the signal; yields what they print."""
    process = subprocess.Popen(
        [*KEYHOLE, "up"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines, ready = [], Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if " are up; " in line:
                ready.set()
        ready.set()

    reader = Thread(target=read)
    reader.start()
    try:
        assert ready.wait(WITHIN), lines
        assert process.poll() is None, lines
        yield lines
    finally:
        process.send_signal(end)
        process.wait(WITHIN)
        reader.join(WITHIN)
        process.stdout.close()
    if end == signal.SIGTERM:
        assert process.returncode == 0, lines
        assert lines[-1] == "all have ended\n"


def run(folder, *args):
    return subprocess.run(
        [*KEYHOLE, "run", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN,
        env={**os.environ, "COLUMNS": "80"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("is_private", [False, True])
def test_a_try_out_trains_with_devices_that_the_trainer_has_no_data_of(folder, is_private):
    ports = iter(free_ports(4))
    changes = {"127.0.0.1:8100": f"127.0.0.1:{next(ports)}", "rounds = 20": "rounds = 3"}
    if is_private:
        own = PRIVATE
        for port in ("8200", "8110", "8210"):
            own = own.replace(port, str(next(ports)))
        changes |= {
            "devices = 3": f"devices = 3{own}",
            'task = "task:TASK"': 'task = "task:TASK"\ndelivery = "pir"',
        }
    rewrite(folder, changes)
    with up(folder) as lines:
        done = run(folder, "--deploy")
        assert done.returncode == 0, (done.stderr, lines)
        again = run(folder, "--deploy", "--rounds", "4")
        assert again.returncode == 0, (again.stderr, lines)
        closed = [line for line in again.stderr.splitlines() if " closed (" in line]
        assert len(closed) == 1, "rounds that an earlier trainer has told of"
        assert again.stderr.count("resumed after round 2") == 1
    (records,) = folder.glob("runs/*/trial-0/records.jsonl")
    assert records.read_text().count("\n") == 4
    assert any(line.startswith("device-2") and "round" in line for line in lines)


def test_a_port_that_is_taken_is_named_before_anything_starts(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        rewrite(folder, {"127.0.0.1:8100": f"127.0.0.1:{port}"})
        done = subprocess.run(
            [*KEYHOLE, "up"], cwd=folder, capture_output=True, text=True, check=False
        )
    assert done.returncode != 0
    assert f"127.0.0.1:{port}" in done.stderr
    if Path("/proc/net/tcp").exists():
        assert f"by process {os.getpid()} (" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "kits").exists()


def test_training_with_devices_needs_a_kit(folder):
    done = run(folder, "--deploy")
    assert done.returncode != 0
    assert "the trainer has no kit" in done.stderr


@pytest.mark.slow
def test_an_option_of_a_project_is_told_where_one_is_misspelt(folder):
    said = "No such option '--deply'; did you mean --deploy? See keyhole run --help"
    assert run(folder, "--deply").stderr.strip().endswith(said)


def test_nothing_is_left_of_a_try_out_that_was_killed(folder):
    (port,) = free_ports(1)
    rewrite(folder, {"127.0.0.1:8100": f"127.0.0.1:{port}", "devices = 3": "devices = 1"})
    with up(folder, end=signal.SIGKILL):
        pass
    deadline = time.monotonic() + WITHIN
    while is_taken(port):
        assert time.monotonic() < deadline, "its service still listens"
        time.sleep(0.1)
    with up(folder):
        pass


def is_taken(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
