"""`keyhole status` and `keyhole watch`, as a stranger starts them."""

import json
import signal
import subprocess

import httpx
import pytest

from tests.cli.conftest import COMMAND
from tests.experiments.watch.watched import make_folder
from tests.helpers import LONG
from tests.service.sockets import held_port


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("watched"))


def test_status_shows_what_a_round_waits_for_and_how_far_runs_are(keyhole, folder):
    done = keyhole("status", folder)
    assert done.returncode == 0, done.stderr
    assert "rounds: round 4: 0 of 3 updates, 3 devices to come" in done.stdout
    assert "to come: device-1, device-2, device-3" in done.stdout
    assert "6 of 6, 1 empty" in done.stdout
    assert "top8-noise" in done.stdout
    told = json.loads(keyhole("status", folder, "--json").stdout)
    assert [run["short"] for run in told["runs"]] != []
    assert told["rounds"][0]["missing"] == ["device-1", "device-2", "device-3"]


def test_status_of_what_is_not_there_says_what_to_give(keyhole, folder, tmp_path):
    missing = keyhole("status", tmp_path / "nowhere")
    assert missing.returncode == 2
    assert "no such folder: got" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = keyhole("status", tmp_path / "empty")
    assert (empty.returncode, empty.stdout) == (0, "empty: no runs and no rounds yet\n")
    with held_port() as port:
        away = keyhole("status", f"http://127.0.0.1:{port}/metrics")
    assert away.returncode == 1
    assert "no status at" in away.stdout
    beyond = keyhole("status", "http://slices.example/metrics")
    assert beyond.returncode == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--host", "0.0.0.0"), "others could read what is sent"),
        (("--port", "99999"), "99999"),
        (("--prot", "1"), "No such option '--prot'; did you mean --port?"),
    ],
)
def test_watch_refuses_what_it_should_not_serve(keyhole, folder, flags, told):
    done = keyhole("watch", folder, *flags)
    assert done.returncode == 2
    assert told in done.stderr


@pytest.mark.slow
def test_watch_serves_until_it_is_interrupted(folder, environment):
    command = [*COMMAND, "watch", str(folder), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        line = process.stderr.readline()
        url = line.rsplit(" ", 1)[1].strip()
        assert line == f"watching {folder} at {url}\n"
        assert len(httpx.get(f"{url}/api/overview", timeout=LONG).json()["runs"]) == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_status_looks_again_until_it_is_interrupted(folder, environment):
    command = [*COMMAND, "status", str(folder), "--json", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        assert second["now"] > first["now"]
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG) == 0
