"""`examples/flower/local.py`: one command trains, ends what it has started, and stays here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from keyhole.rounds.record import read_records
from tests.engines.flower.deployment import deployment
from tests.engines.flower.outward import outward, started, variables
from tests.engines.flower.test_secure_rounds import private_services
from tests.helpers import LONG, ROOT

KEYHOLE = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]
TASK = ["so_tag", "--m", "10", "--size", "words=500", "--rounds", "2", "--cohort", "2"]
LOCAL = [sys.executable, str(ROOT / "examples" / "flower" / "local.py"), "--out", "on-flower"]
PARTS = ("flower-superlink", "flower-supernode", "flwr-serverapp", "flwr-clientapp", "serve")


class Command:
    """The script in a folder of its own."""

    def __init__(self, folder, *args):
        self.folder, self.args, self.last = folder, [*TASK, *args], None
        self.env = {
            **os.environ,
            **variables(folder / "notes"),
            "KEYHOLE_CACHE": str(folder / "cache"),
            "JAX_PLATFORMS": "cpu",
        }

    def start(self, *command):
        self.last = subprocess.Popen(
            [*(command or LOCAL), *self.args],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return self.last

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.last.terminate()  # a test that has failed leaves it running
        self.last.communicate()

    def finish(self, process, seconds=2 * LONG):
        """The exit code, and what was printed."""
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise AssertionError(process.communicate()[0]) from None
        return process.returncode, printed

    def processes(self, part=""):
        """Command lines of what it has started and that lives."""
        home = f"{self.folder}/on-flower"
        found = [path for path in Path("/proc").iterdir() if path.name.isdigit()]
        lines = [_read(path / "cmdline") for path in found if home in _read(path / "environ")]
        return [line for line in lines if part in line]

    def wait_for_a_client(self, process, seconds=LONG):
        """Until a round is under way."""
        until = time.monotonic() + seconds
        while not self.processes("flwr-clientapp"):
            assert time.monotonic() < until, self.processes()
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.2)


def _read(path):
    try:
        return path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""  # it has ended


def tables_of(folder):
    """Numbers of the last model and of its optimizer, for 500 words and 500 tags; what the file has
    before them tells of the run."""
    last = max(folder.glob("**/state/snapshot-*"))
    return last.name, last.read_bytes()[-2 * 500 * 500 * 4 :]


def ended(records):
    return [(record.closed, len(record.staleness)) for record in records]


@pytest.mark.slow
def test_one_command_trains_and_goes_on_where_it_was_stopped(tmp_path):
    with Command(tmp_path, "--over-selection", "1", "--rehearse") as command:
        process = command.start()
        command.wait_for_a_client(process)
        process.send_signal(signal.SIGTERM)
        assert command.finish(process)[0] == 143
        code, printed = command.finish(command.start())
        assert code == 0, printed
        command.args = TASK
        alone = command.finish(command.start(*KEYHOLE, "train", "--out", "alone"))
        assert alone[0] == 0, alone[1]
    assert ended(read_records(tmp_path / "on-flower/run/records.jsonl")) == [("goal", 2)] * 2

    # The model of a rehearsal is that of a run in one process, byte for byte.
    name, tables = tables_of(tmp_path / "alone")
    assert tables_of(tmp_path / "on-flower") == (name, tables)
    assert len(set(tables)) > 100

    # All processes were watched, and none of them looked beyond this machine.
    assert started(tmp_path / "notes", *PARTS) == list(PARTS)
    assert outward(tmp_path / "notes") == []


@pytest.mark.slow
def test_a_task_makes_asynchronous_rounds(tmp_path):
    with Command(tmp_path, "--concurrency", "4") as command:
        code, printed = command.finish(command.start())
        assert code == 0, printed
    assert ended(read_records(tmp_path / "on-flower/run/records.jsonl")) == [("goal", 2)] * 2


@pytest.mark.slow
def test_a_task_makes_secure_rounds_with_noise(tmp_path):
    with deployment(tmp_path, 2, before=private_services) as made:
        made.write_task(*TASK, "--over-selection", "1", "--dp-noise", "0.5", "--dp-clip", "1")
        made.start_run()
        made.wait((made.run / "result.json").exists, 300.0)
        records = made.records()
    assert [len(record.staleness) for record in records] == [2, 2]
    for record in records:
        assert record.seen_by["second server"] == "who takes part"
        assert record.privacy["noise_multiplier"] == 0.5
    assert records[0].privacy["epsilon"] < records[1].privacy["epsilon"]
    # No update has been at a slice server.
    assert list((made.rounds / "updates").glob("*/*")) == []


def test_a_process_that_looks_beyond_this_machine_is_noted(tmp_path):
    code = "import socket; s = socket.socket(); s.settimeout(0.01); s.connect_ex(('192.0.2.1', 9))"
    env = {**os.environ, **variables(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=LONG)
    assert outward(tmp_path) == ["socket.connect 192.0.2.1"]
