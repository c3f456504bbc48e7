"""`--log json`: standard error of a service, a trainer and a device has JSON, and nothing else."""

import json
import signal
import subprocess
from contextlib import ExitStack

import pytest

from keyhole.cli.bars import progress_bars
from keyhole.cli.screen import Notices
from keyhole.logs import writing_logs
from tests.cli.conftest import COMMAND
from tests.helpers import LONG
from tests.service.sockets import wait_for

TRAINING = "--sampling check-in --cohort 1 --rounds 2 --m 8 --size words=300 --size tags=9"


def lines_of(path):
    """The lines of a log, each of which is an object; without one that is not complete yet."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if "\n" in line]


def event_in(path, event):
    return next((line for line in lines_of(path) if line["event"] == event), None)


def test_what_people_are_told_is_no_line_for_machines_unless_it_is_said_how(capsys):
    for kind, shown in (("json", False), ("text", True)):
        notices = Notices()
        with writing_logs(kind):
            notices.tell("device-7 waits")
            notices.tell("slices of key 81 are wrong", logged="a slice server lies")
            notices.tell("slices of key 81 are wrong", logged="a slice server lies")
            with progress_bars() as bars:
                bars.add_task("copy", total=1, completed=1, note="")
        told = capsys.readouterr().err
        assert ("device-7" in told, "key 81" in told, "copy" in told) == (shown,) * 3
    with writing_logs("json"):
        Notices().tell("slices of key 81 are wrong", logged="a slice server lies")
    (line,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (line["level"], line["event"]) == ("warning", "notice")
    assert line["text"] == "a slice server lies"


@pytest.mark.slow
def test_service_trainer_and_device_write_nothing_else_to_standard_error(
    tmp_path, keyhole, environment
):
    keyhole("token", "new-key", tmp_path / "key")
    token = keyhole("token", "issue", "--key", tmp_path / "key", "--device", "phone-1").stdout
    (tmp_path / "token").write_text(token)
    rounds = tmp_path / "rounds"
    rounds.mkdir()
    with ExitStack() as stack:

        def start(name, *args):
            command = [*COMMAND, *map(str, args), "--log", "json", "--log-level", "debug"]
            process = subprocess.Popen(
                command,
                stdout=subprocess.DEVNULL,
                stderr=stack.enter_context((tmp_path / name).open("w")),
                env=environment,
                cwd=tmp_path,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        serve = start("service", "serve", rounds, "--port", 0, "--token-key", tmp_path / "key")
        told = wait_for(lambda: event_in(tmp_path / "service", "listening"))["text"]
        url = told.partition("; ")[0].rpartition(" ")[2]
        assert told == f"serving {rounds} at {url}; metrics at {told.rpartition(' ')[2]}"
        means = ("--token-file", tmp_path / "token", "--task", "so_tag", "--client", 0)
        device = start("device", "device", url, *means)
        wait_for(lambda: event_in(tmp_path / "device", "waiting"))
        trainer = start("trainer", "train", "so_tag", "--devices", rounds, *TRAINING.split())
        assert trainer.wait(LONG) == 0
        for process in (device, serve):
            process.send_signal(signal.SIGINT)
            process.wait(LONG)
    for name, events in {
        "service": {"listening"},
        "trainer": {"listening", "round opened", "round closed"},
        "device": {"waiting", "update sent"},
    }.items():
        assert events <= {line["event"] for line in lines_of(tmp_path / name)}
        assert {line["part"] for line in lines_of(tmp_path / name)} == {name}
