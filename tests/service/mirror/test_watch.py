"""`keyhole mirror push --watch` and `pull --watch`, as the processes of two operators."""

import signal
import subprocess
from contextlib import ExitStack

import pytest

from tests.cli.conftest import COMMAND
from tests.helpers import LONG
from tests.service.hand_made import content_of, write_round
from tests.service.sockets import wait_for

pytest.importorskip("obstore", reason="object stores: pip install 'keyhole[s3]'")


@pytest.mark.slow
def test_every_round_comes_over_while_both_watch_and_each_is_told_once(origin, edge, tmp_path):
    store, every = (tmp_path / "store").as_uri(), ("--watch", "--every", "0.05")
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        push, pull = (
            stack.enter_context(
                subprocess.Popen(
                    [*COMMAND, "mirror", *map(str, args), *every],
                    stdout=pipe,
                    stderr=pipe,
                    text=True,
                )
            )
            for args in (("push", origin, store), ("pull", store, edge))
        )
        names = []
        for number in (7, 8, 9):
            name = write_round(origin, number)
            wait_for(lambda name=name: name in current_of(edge), LONG)
            assert content_of(edge, name) == content_of(origin, name)
            names.append(name)
        for process in (push, pull):
            process.send_signal(signal.SIGINT)
            told, wrong = process.communicate(timeout=LONG)
            assert process.returncode == 0
            assert [line.split(" is current: ")[0] for line in told.splitlines()] == names
            assert "━" not in wrong  # a log is no place for bars
            assert set(wrong.splitlines()) <= {
                f"push to {store}: waiting for a round",
                f"pull from {store}: waiting for a round",
            }


def current_of(directory):
    path = directory / "current.json"
    return path.read_text() if path.exists() else ""
