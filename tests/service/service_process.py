"""A service in a process of its own, started as an operator starts it."""

import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass

from tests.helpers import LONG

COMMAND = [sys.executable, "-c", "from keyhole.cli.main import main; main()", "serve"]


@dataclass
class ServiceProcess:
    """A running `keyhole serve`."""

    process: subprocess.Popen
    url: str
    metrics: str  # the URL of its metrics, on a port of their own

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])


def start(directory, *options, port=0, env=None):
    """Starts `keyhole serve` and waits until it listens."""
    command = [*COMMAND, str(directory), "--port", str(port), *map(str, options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    line = process.stderr.readline()
    found = re.fullmatch(r"serving .* at (https?://\S+:\d+)\n", line)
    if found is None:
        rest = process.communicate(timeout=LONG)[1]
        raise AssertionError(f"the service did not start: {line}{rest}")
    shown = re.fullmatch(
        r"metrics at (http://127\.0\.0\.1:\d+/metrics)\n", process.stderr.readline()
    )
    return ServiceProcess(process, found[1], shown[1])


@contextmanager
def service(directory, *options, **settings):
    """A service for the time of a test; ends it without ceremony."""
    running = start(directory, *options, **settings)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.process.stderr.close()
