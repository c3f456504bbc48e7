"""Runs the commands of a page as somebody types them into a shell."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

PROGRAM = "import sys; from keyhole.cli.main import main; main(sys.argv[1:])"
COMMANDS = {
    "keyhole": f"#!/bin/sh\nexec '{sys.executable}' -c '{PROGRAM}' \"$@\"\n",
    "python": f"#!/bin/sh\nexec '{sys.executable}' \"$@\"\n",
}


def without_test_settings(cache):
    """The environment of somebody who runs no tests, with a cache of its own."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {**usual, "KEYHOLE_CACHE": str(cache), "COLUMNS": "120"}


def with_free_ports(text):
    """The commands, with ports of this machine that are free in place of the usual ones."""
    with socket.socket() as one, socket.socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        service, page = one.getsockname()[1], other.getsockname()[1]
    for command, option in {
        "keyhole serve rounds": f" --port {service}",
        "keyhole watch": f" --port {page}",
        "keyhole new films": f" && sed -i s/8100/{service}/ films/keyhole.toml",
    }.items():
        text = text.replace(command, command + option)
    for usual, free in {8100: service, 8150: page}.items():
        text = text.replace(f"127.0.0.1:{usual}", f"127.0.0.1:{free}")
    return text


def run_as_typed(text, directory, seconds=540):
    """Runs a block of commands in a directory; the service and the page have ports of their own,
    and what the commands leave running is ended. Returns the exit code and all that was printed."""
    text = with_free_ports(text)
    programs = directory / "programs"
    programs.mkdir()
    for name, script in COMMANDS.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    known = without_test_settings(directory / "cache")
    known["PATH"] = f"{programs}:{known['PATH']}"
    with (directory / "printed").open("w") as printed:
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=directory,
            env=known,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        finally:
            with suppress(ProcessLookupError):  # nothing was left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, (directory / "printed").read_text()
