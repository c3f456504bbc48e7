"""Runs the commands of a page as somebody types them into a shell."""

import os
import signal
import socket
import subprocess
import sys

PROGRAM = "import sys; from keyhole.cli.main import main; main(sys.argv[1:])"
COMMANDS = {
    "keyhole": f"#!/bin/sh\nexec '{sys.executable}' -c '{PROGRAM}' \"$@\"\n",
    "python": f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n",
}


def without_test_settings(cache):
    """The environment of somebody who runs no tests, with a cache of its own."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {**usual, "KEYHOLE_CACHE": str(cache), "COLUMNS": "120"}


def run_as_typed(text, directory, seconds=540):
    """Runs a block of commands in a directory; the service has a port of its own, and what the
    commands leave running is ended. Returns the exit code and all that was printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    text = text.replace("keyhole serve rounds", f"keyhole serve rounds --port {port}")
    programs = directory / "programs"
    programs.mkdir()
    for name, script in COMMANDS.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    known = without_test_settings(directory / "cache")
    known["PATH"] = f"{programs}:{known['PATH']}"
    with (directory / "printed").open("w") as printed:
        process = subprocess.Popen(
            ["bash", "-c", text.replace("127.0.0.1:8100", f"127.0.0.1:{port}")],
            cwd=directory,
            env=known,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, (directory / "printed").read_text()
