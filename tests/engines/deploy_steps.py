"""The steps of docs/deploy.md, with the addresses and folders of a test."""

import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "deploy.md").read_text()
HERE = Path(sys.executable).parent
KEYHOLE = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]


def commands(step):
    """The command lines of a step, in order."""
    text = re.search(rf"^### {step}\. .*?(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)[0]
    found = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    joined = "".join(found).replace("\\\n", " ")
    return [line for line in joined.splitlines() if line and not line.startswith("#")]


class Machine:
    """A folder that stands for all machines of the page, and the programs on them."""

    def __init__(self, folder, stack, changes):
        self.folder, self._stack, self._changes = folder, stack, changes
        for name in ("etc", "srv", "logs"):
            (folder / name).mkdir(exist_ok=True)
        cache = folder / "cache"
        self._environment = {**os.environ, "KEYHOLE_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}

    def put_in(self, text):
        """The text with the folders and addresses of this machine."""
        changes = {
            "/etc/keyhole": self.folder / "etc",
            "/srv/": f"{self.folder}/srv/",
            **self._changes,
        }
        for old, new in changes.items():
            text = text.replace(old, str(new))
        return text

    def words(self, line):
        """A command line with what this machine has; a program that is installed beside Python."""
        words = shlex.split(self.put_in(line))
        if words[0] == "keyhole":
            return [*KEYHOLE, *words[1:]]
        beside = HERE / words[0]
        return [str(beside) if beside.exists() else words[0], *words[1:]]

    def run(self, line, seconds=240):
        """Runs a command to its end; returns what it printed."""
        words = self.words(line)
        target = words[-1] if ">" in words else None
        words = words[:-2] if target else words
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        if target:
            (self.folder / target).write_text(done.stdout)
        return done.stdout

    def start(self, line, name):
        """Starts a program that goes on; it ends with the test."""
        log = (self.folder / "logs" / name).open("w")
        process = subprocess.Popen(
            self.words(line), cwd=self.folder, env=self._environment, stdout=log, stderr=log
        )
        self._stack.callback(log.close)
        self._stack.callback(_end, process)
        return process

    def log(self, name):
        return (self.folder / "logs" / name).read_text()

    def wait(self, what, seconds=120):
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                shown = [f"{p.name}: {p.read_text()[-1500:]}" for p in self.folder.glob("logs/*")]
                raise AssertionError("\n".join(shown))
            time.sleep(0.1)


def _end(process):
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def machine(folder, changes=None):
    with ExitStack() as stack:
        yield Machine(folder, stack, changes or {})
