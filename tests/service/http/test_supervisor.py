"""The process above the workers: it outlives them, and ends when they cannot even start."""

import os
import re
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest

from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.publishing import Publisher
from keyhole.service.transport import next_wait
from keyhole.wire import messages as wire
from tests.service.memory_rounds import WIDTH, WORDS, layout
from tests.service.service_process import COMMAND, service
from tests.service.sockets import LONG, metric, wait_for

MODEL = {
    "w": np.arange(WORDS * WIDTH, dtype=np.float32).reshape(WORDS, WIDTH),
    "b": np.ones(5, np.float32),
}

# A service whose workers start as a file in the directory says.
SCRIPT = """
import sys, time
from pathlib import Path
from keyhole.errors import StorageError
from keyhole.service.app import App
from keyhole.service.transport import Listen, run
from tests.service.memory_rounds import MemoryRounds

mode = Path(sys.argv[1])

def make(metrics):
    with mode.with_name("starts").open("a") as starts:
        starts.write("x")
    if mode.read_text() == "hang":
        time.sleep(600)
    if mode.read_text() == "fail":
        raise StorageError("no model: got none; expected one; make one")
    if mode.read_text() == "crash":
        raise ZeroDivisionError
    rounds = MemoryRounds()
    rounds.open(0)
    return App(rounds, metrics=metrics)

tell = lambda url, page: print("serving x at", url, page, file=sys.stderr, flush=True)
run(make, Listen(), on_listen=tell)
"""


@pytest.fixture
def script(tmp_path):
    """Starts the script; ends it without ceremony."""
    started = []

    def start(mode):
        (tmp_path / "mode").write_text(mode)
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "mode")]
        pipe = {"stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, start_new_session=True, **pipe))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def starts(tmp_path):
    return len((tmp_path / "starts").read_text()) if (tmp_path / "starts").exists() else 0


def workers_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]


def publish(directory):
    with Publisher(directory) as publisher:
        state = ServerState.dense(layout(), MODEL, SGD(1.0))
        return publisher.publish_state(state, number=0).id


def test_a_file_that_shrinks_under_its_readers_does_not_end_the_service(tmp_path):
    """Whoever touches what is gone gets SIGBUS, which no code catches."""
    name = publish(tmp_path)
    query = wire.encode_query([wire.Ask(1, np.array([1, 39]))])
    binary = {"content-type": "application/octet-stream"}
    with service(tmp_path, "--log-level", "error") as running:

        def ask():
            path = f"{running.url}/v1/rounds/{name}/slices"
            return httpx.post(path, content=query, headers=binary, timeout=LONG)

        assert ask().content.endswith(MODEL["w"][[1, 39]].tobytes())  # behind a proof
        (before,) = workers_of(running.process.pid)
        os.truncate(tmp_path / "rounds" / name / "table-1" / "seg-0.bin", 0)
        with pytest.raises(httpx.TransportError):
            ask()
        answer = wait_for(ask)
        assert answer.status_code == 507
        assert answer.json()["error"]["kind"] == "StorageError"
        assert workers_of(running.process.pid) != [before]
        assert running.process.poll() is None
        publish(tmp_path)  # the same round again
        wait_for(lambda: ask().content.endswith(MODEL["w"][[1, 39]].tobytes()))
        assert "SIGBUS" in running.process.stderr.readline()


def test_a_worker_that_cannot_start_ends_the_service_in_one_line(tmp_path):
    command = [*COMMAND, str(tmp_path), "--port", "0", "--on-demand"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "holds no run: got no trial-N/run.json" in line


@pytest.mark.parametrize("mode", ["fail", pytest.param("crash", marks=pytest.mark.slow)])
def test_a_start_that_fails_is_not_tried_for_ever(script, tmp_path, mode):
    process = script(mode)
    said = process.communicate(timeout=LONG)[1].splitlines()
    expected = {"fail": "StorageError: no model", "crash": "a worker ends before it can answer"}
    assert expected[mode] in said[-1]
    assert process.returncode == 1
    assert starts(tmp_path) == 1


@pytest.mark.slow
def test_a_worker_that_cannot_be_replaced_yet_is_tried_again(script, tmp_path):
    process = script("serve")
    url, page = re.findall(r"http://\S+", process.stderr.readline())
    (worker,) = workers_of(process.pid)
    (tmp_path / "mode").write_text("fail")
    os.kill(worker, signal.SIGKILL)
    assert "SIGKILL" in process.stderr.readline()
    wait_for(lambda: starts(tmp_path) > 2)
    assert "no model" in process.stderr.readline()
    (tmp_path / "mode").write_text("serve")
    wait_for(lambda: httpx.get(url + "/healthz", timeout=LONG).status_code == 200)
    assert metric(page, "keyhole_requests_in_flight") == 0


def test_those_who_die_early_are_replaced_ever_later():
    wait, waits = 0.0, []
    for _ in range(12):
        wait = next_wait(wait, lived=1.0)
        waits.append(wait)
    assert waits == sorted(waits)
    assert waits[-1] == 30.0
    assert next_wait(30.0, lived=3600.0) == waits[0] < 1.0


@pytest.mark.parametrize(
    ("sent", "mode"),
    [
        (signal.SIGINT, "serve"),
        pytest.param(signal.SIGTERM, "hang", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, "hang", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, "serve", marks=pytest.mark.slow),
    ],
)
def test_a_signal_to_all_processes_ends_the_service_without_a_word(script, tmp_path, sent, mode):
    """As Ctrl-C in a terminal does; also while workers are still starting."""
    process = script(mode)
    wait_for(lambda: starts(tmp_path) == 1)
    if mode == "serve":
        assert "serving" in process.stderr.readline()
    (worker,) = workers_of(process.pid)
    os.killpg(process.pid, sent)
    assert process.wait(LONG) == 0
    assert process.stderr.read() == ""
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


def test_queries_compile_nothing_after_the_warm_up(tmp_path):
    """In a process of its own: here other tests have compiled what it takes."""
    name = publish(tmp_path)
    code = f"""
import asyncio, numpy as np
from keyhole.crypto import merkle_loops
from keyhole.server import row_loops as row_kernels
from keyhole.server import table_loops as index
from keyhole.service.answers import answer_query
from keyhole.service.reading import RoundsDirectory
from keyhole.service.transport import warm_up
from keyhole.wire.messages import Ask

def compiled():
    kernels = [each for module in (index, merkle_loops, row_kernels)
               for each in vars(module).values() if hasattr(each, "signatures")]
    return {{each.__name__: each.signatures for each in kernels if each.signatures}}

warm_up()
before = compiled()
with RoundsDirectory({str(tmp_path)!r}).hold({name!r}) as held:
    for table in held.tables:
        asks, fetch = [Ask(0, np.array([0, 0]))], lambda table, *rest: table.fetch(*rest)
        asyncio.run(answer_query(asks, [table], fetch))
assert compiled() == before, (before, compiled())
assert {{"copy_rows", "find_siblings"}} <= before.keys(), before
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG)
