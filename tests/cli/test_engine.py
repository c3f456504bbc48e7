"""`keyhole train --engine ray`: the same bytes, also after a kill; Ctrl-C; flags that disagree."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.conftest import COMMAND
from tests.helpers import LONG

TINY = ("--size", "neurons=16", "--size", "hidden=8", "--cohort", "5", "--m", "8")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--address", "127.0.0.1:1"], "--address goes with --engine ray"),
        (["--shards", "2"], "--shards goes with --engine ray"),
        (["--engine", "ray", "--shards", "0"], "0 is not in the range"),
        (["--engine", "ray", "--devices", "d"], "the devices of a service train themselves"),
        (["--engine", "ray", "--workers", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_engine_is_one_line(args, said, keyhole, few_writers, tmp_path):
    done = keyhole(
        "train", "emnist_2nn", *TINY, *args, "--data", few_writers, "--out", tmp_path / "runs"
    )
    assert done.returncode in (1, 2), done.stderr
    assert said in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("runs/*/trial-0"))


@pytest.mark.slow
def test_a_ray_that_does_not_answer_is_one_line(program, few_writers, tmp_path):
    args = ("--engine", "ray", "--address", "127.0.0.1:1", "--data", few_writers)
    done = program("train", "emnist_2nn", *TINY, *args, "--out", tmp_path / "runs")
    assert done.returncode in (1, 2), done.stderr
    assert "Ray does not answer" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("runs/*/trial-0"))


def start(environment, *args):
    """The command, to be interrupted."""
    return subprocess.Popen(
        [*COMMAND, "train", "emnist_2nn", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def wait_for_rounds(out, count, process):
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline and process.poll() is None:
        found = list(Path(out).glob("*/trial-0/records.jsonl"))
        if found and len(found[0].read_bytes().splitlines()) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"no {count} rounds: {process.communicate(timeout=10)}")


def stored(out):
    """The bytes of a finished run that tell no time."""
    (trial,) = Path(out).glob("*/trial-0")
    names = ["records.jsonl", *(p.relative_to(trial) for p in trial.glob("state/snapshot-*"))]
    return {str(name): (trial / name).read_bytes() for name in sorted(map(str, names))}


def family(pid):
    """Process numbers of everything that a process has started, and what that has."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(path.parent.name)] = int(fields[1])
    found, wave = set(), {pid}
    while wave := {child for child, parent in parents.items() if parent in wave} - found:
        found |= wave
    return found


def are_gone(pids, seconds):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.2)
    return False


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bytes(environment, program, few_writers, tmp_path):
    options = (*TINY, "--data", few_writers, "--rounds", 40)
    alone = program("train", "emnist_2nn", *options, "--out", tmp_path / "local")
    assert alone.returncode == 0, alone.stderr
    engine = "--engine", "ray", "--workers", 2, "--shards", 3
    ray = (*options, *engine, "--out", tmp_path / "ray")
    process = start(environment, *ray)
    try:
        wait_for_rounds(tmp_path / "ray", 3, process)
        children = family(process.pid)
        assert len(children) >= 3  # Ray's own processes and two workers
    finally:
        process.kill()
    # Its workers look for their cluster for a minute before they give up.
    assert are_gone(children, 120), "Ray ends with the process that started it"
    process.communicate(timeout=LONG)
    again = program("train", "emnist_2nn", *ray)
    assert again.returncode == 0, again.stderr
    assert stored(tmp_path / "ray") == stored(tmp_path / "local")


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done(environment, few_writers, tmp_path):
    args = (*TINY, "--data", few_writers, "--rounds", 100_000, "--out", tmp_path)
    process = start(environment, *args, "--engine", "ray", "--workers", 2)
    try:
        wait_for_rounds(tmp_path, 3, process)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all processes at once
        _, err = process.communicate(timeout=LONG)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "the same command resumes it" in err
