"""Sets up .venv for the targets of the Makefile, and shows how far it is.

`environment.py train` installs keyhole with what it needs to train; `environment.py full` adds what
services, tests, checks and benchmarks need. Everything comes from requirements.lock: pip refuses a
file whose hash is not there, and keyhole itself is built from this tree without a download. An
environment that is ready at that level or above is left as it is, one at a lower level is added to.
It uses the standard library alone: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from lock import LOCK, pick

TREE = Path(__file__).resolve().parent.parent
LEVELS = {"train": ("base", "build", "train"), "full": ("base", "build", "train", "serve", "dev")}
INPUTS = ("pyproject.toml", LOCK)
SECONDS_OF_SILENCE = 10  # a log gets a line at least this often

# Lines of pip that name a package file: NAME-VERSION-TAGS.whl, after a path or an address.
_FETCHED = re.compile(
    r"\s*(?:Processing|Downloading|Using cached) (?:\S*/)?([\w.]+)-([\w.!+]+)-\S+\.whl"
    r"(\.metadata)?(?: \((.+B)\))?"
)
_BUILDS = re.compile(r"\s*(?:Installing build dependencies|Building editable for|Building wheel)")
_INSTALLS = "Installing collected packages: "


def main(level: str) -> int:
    """Makes .venv ready for a level; returns the exit code."""
    step = next_step(TREE, level)
    if step == "nothing":
        return 0
    screen = Screen()
    screen.title(f"setting up .venv ({level}); this happens when dependencies change")
    try:
        code = set_up(TREE, level, step, screen)
    except KeyboardInterrupt:
        screen.title("interrupted: the next make starts anew")
        return 130
    return code


def next_step(tree: Path, level: str) -> str:
    """Returns what an environment needs: "nothing", "install" into it, or "create" it anew.

    The ready file is written last. An environment whose install was cut short has none; one whose
    Python is gone or that was copied from another tree does not match it.
    """
    ready = _ready(tree)
    known = ready.read_text().splitlines() if ready.is_file() else []
    if len(known) != 3 or known[0] != str(tree) or not _runs(tree):
        return "create"
    if known[1] in (level, "full") and known[2] == _digest(tree):
        return "nothing"
    return "install"


def mark_ready(tree: Path, level: str) -> None:
    """Writes the ready file: the tree, the level, and which dependencies were installed."""
    _ready(tree).write_text(f"{tree}\n{level}\n{_digest(tree)}\n")


def set_up(tree: Path, level: str, step: str, screen: Screen) -> int:
    """Creates the environment if it must, installs, and marks it ready; returns the exit code."""
    _ready(tree).unlink(missing_ok=True)
    venv = tree / ".venv"
    if step == "create" and (code := create(venv, screen)):
        return code
    (site,) = venv.glob("lib/python*/site-packages")
    for command in commands(tree, level):
        if code := install(command, tree, site, screen):
            return code
    mark_ready(tree, level)
    return 0


def commands(tree: Path, level: str) -> list[list[str]]:
    """Returns the calls of pip that fill an environment: what was locked, then keyhole itself."""
    venv = tree / ".venv"
    wanted = venv / f"{level}.lock"
    wanted.write_text("".join(each.requirement() for each in pick(tree, LEVELS[level])))
    # Python compiles what is imported when it is imported: a fraction of what is installed.
    options = ["--no-compile", "--disable-pip-version-check", "--progress-bar", "off"]
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", *options]
    return [
        [*pip, "--no-deps", "--require-hashes", "-r", str(wanted)],
        [*pip, "--no-index", "--no-deps", "--no-build-isolation", "-e", "."],
    ]


def create(venv: Path, screen: Screen) -> int:
    """Makes an empty environment; returns the exit code."""
    screen.show("create .venv")
    making = subprocess.Popen([sys.executable, "-m", "venv", "--clear", str(venv)])
    while True:
        try:
            return making.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            screen.tick()


def install(command: list[str], tree: Path, site: Path, screen: Screen) -> int:
    """Runs pip and shows each package; returns the exit code.

    Args:
        command: pip with its arguments.
        tree: where it runs.
        site: where packages arrive: pip says nothing while it unpacks them.
        screen: where progress is shown. If pip fails, its errors are shown in full.
    """
    screen.show("start pip")
    with tempfile.TemporaryFile("w+") as errors:
        pip = subprocess.Popen(
            command, cwd=tree, stdout=subprocess.PIPE, stderr=errors, text=True, errors="replace"
        )
        try:
            total = _follow(pip, site, screen)
        finally:
            pip.terminate()  # where it has ended, this does nothing
            code = pip.wait()
        screen.title(f"{total} packages installed" if code == 0 else "pip failed:")
        if code:
            errors.seek(0)
            sys.stderr.writelines(line for line in errors if not is_noise(line))
    return code


def _follow(pip: subprocess.Popen[str], site: Path, screen: Screen) -> int:
    """Shows what pip does until it ends; returns how many packages it installed."""
    seen, total = _installed(site), 0
    for line in _lines_or_ticks(pip):
        if line is None:
            screen.tick()
        elif line.startswith(_INSTALLS):
            total = len(line.split(", "))
        elif said := describe(line):
            screen.show(said)
        for package in sorted(_installed(site) - seen) if total else []:
            seen.add(package)
            screen.count(total, package)
    pip.wait()
    return total


def describe(line: str) -> str | None:
    """Returns what a line of pip's output tells of the progress, without addresses.

    >>> describe("  Downloading http://host/a/jaxlib-0.10.2-cp311-cp311-linux.whl (83.4 MB)")
    'fetch jaxlib 0.10.2 (83.4 MB)'
    >>> describe("Looking in indexes: http://host/simple")
    """
    if found := _FETCHED.match(line):
        name, version, metadata, size = found.groups()
        if metadata:
            return f"find {name} {version}"
        return f"fetch {name} {version}" + (f" ({size})" if size else "")
    return "build keyhole" if _BUILDS.match(line) else None


def is_noise(line: str) -> bool:
    """Whether a line of pip's errors is about a place that merely lacks a package, or a new pip."""
    return line.startswith(("WARNING: Location", "[notice]"))


class Screen:
    """Shows progress: on one line of a terminal, or as lines of a log."""

    def __init__(self) -> None:
        self._out = sys.stdout
        self._is_terminal = self._out.isatty()
        self._text, self._done = "", 0
        self._since = self._spoke = time.monotonic()

    def title(self, text: str) -> None:
        """Shows a line that stays."""
        self._write(text, stays=True)

    def show(self, text: str) -> None:
        """Shows what is being done now."""
        if text != self._text:
            self._text, self._since = text, time.monotonic()
            self._write(text)

    def count(self, total: int, package: str) -> None:
        """Shows that one more package of a total is installed."""
        self._done += 1
        self.show(f"installed {self._done}/{total} {package}")

    def tick(self) -> None:
        """Shows that the work goes on, and for how long it has been at the same thing."""
        now = time.monotonic()
        if self._is_terminal or now - self._spoke >= SECONDS_OF_SILENCE:
            self._write(f"{self._text} ({now - self._since:.0f} s ago)")

    def _write(self, text: str, *, stays: bool = False) -> None:
        self._spoke = time.monotonic()
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._out.write("\r\033[K" + text[:width] + ("\n" if stays else ""))
        else:
            self._out.write(text + "\n")
        self._out.flush()


def _lines_or_ticks(process: subprocess.Popen[str]) -> Iterator[str | None]:
    """Yields the lines of a process, and None for each second without one."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                lines.put(line.rstrip("\n"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            yield None
            continue
        if line is None:
            yield None  # what arrived since the last line is still to be seen
            return
        yield line


def _installed(site: Path) -> set[str]:
    """Name and version of what is installed; pip writes RECORD last.

    What begins with "~" is being removed.
    """
    found = (path.parent.name for path in site.glob("[!~]*.dist-info/RECORD"))
    return {name[: -len(".dist-info")].replace("-", " ") for name in found}


def _ready(tree: Path) -> Path:
    return tree / ".venv" / ".ready"


def _runs(tree: Path) -> bool:
    """Whether the environment's Python starts; it is a link, which may lead nowhere."""
    python = tree / ".venv" / "bin" / "python"
    return python.exists() and subprocess.run([python, "-c", ""], check=False).returncode == 0


def _digest(tree: Path) -> str:
    return hashlib.sha256(b"".join((tree / name).read_bytes() for name in INPUTS)).hexdigest()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
