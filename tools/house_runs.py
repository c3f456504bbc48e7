"""What `house.py` counts by running the package: files that a round passes, modules loaded.

Commands run as children of this script, in the Python that runs it and on the `src` beside it.
"""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

# --- What a change of names or flags touches.

PACKAGE = "keyhole"
COMMAND = "keyhole.cli.main"  # has `main(args)`
TASK_MODULE = "keyhole.experiments.so_tag"

# Where a round begins in each process, by `__qualname__`: functions that run while one of these
# does, or since one of those was called, are passed by the round.
IN_PROCESS, TRAINER, DEVICE, SERVICE = "run_round", "Served.next", "take_part", "App.__call__"
DURING = {IN_PROCESS, TRAINER, DEVICE}
SINCE = {SERVICE}  # works on after its call has returned an awaitable

SIZES = ["--size", "words=200", "--size", "tags=20"]
TRAIN = ["train", "so_tag", *SIZES, "--rounds", "1", "--m", "20"]
ARMS = {  # a secure sum opens with two clients or more
    "in process": ["--cohort", "2"],
    "private": ["--cohort", "2", "--delivery", "pir", "--aggregation", "secure-sparse", "--force"],
}
CLIENT = ["--task", "so_tag", "--rounds", "1"]  # of `device`; and what it fetches:
FETCH = ["--table", "word", "--slices", "1,2"]

# ---

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / PACKAGE
SECONDS = 900  # for one command, on a machine that is busy with others


def child(kind: str, out: Path, args: Sequence[str]) -> None:
    """Runs a command of the package and writes what it passed, or loaded, to a file."""
    if kind == "passed":
        follow(out)
    try:
        if kind == "import":
            import_module(args[0])
        else:
            import_module(COMMAND).main(list(args))
    finally:
        if kind != "passed":
            loaded = sorted(n for n in sys.modules if n.partition(".")[0] == PACKAGE)
            out.write_text("\n".join(loaded))


def follow(out: Path) -> None:
    """Writes each file in which a function of a round is called, in every thread and in forks."""
    root, seen, inside = f"{SOURCE}{os.sep}", set[str](), 0
    file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(line: str) -> None:
        if line not in seen:
            seen.add(line)
            os.write(file, f"{line}\n".encode())

    def watch(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(root):
            return
        name = code.co_qualname
        if name in DURING or (name in SINCE and event == "call"):
            inside += 1 if event == "call" else -1
            tell(f"start {name}")
        is_function = code.co_flags & inspect.CO_OPTIMIZED and not name.endswith("comp>")
        if inside and event == "call" and is_function:
            tell(code.co_filename.removeprefix(root))

    threading.setprofile(watch)
    sys.setprofile(watch)


def start(kind: str, out: Path, *args: str, **options: Any) -> subprocess.Popen[str]:
    """Starts this script as a child, on the source beside it."""
    command = [sys.executable, str(Path(__file__).resolve()), kind, str(out), *args]
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, env=env, text=True, **options)


def finish(process: subprocess.Popen[str]) -> str:
    """What a child printed; raises RuntimeError where it failed, or has not ended in time."""
    try:
        out, err = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        _, err = process.communicate()
        err = f"not done after {SECONDS} seconds: {err}"
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, process.args))}: {err}")
    return out


def loaded(directory: Path, kind: str, *args: str) -> list[str]:
    """Modules of the package that a command loads."""
    out = directory / "loaded"
    finish(start(kind, out, *args))
    return out.read_text().split()


def passed(out: Path, *begun: str) -> list[str]:
    """Files that a round passed; it must have begun with each of these functions."""
    lines = set(out.read_text().splitlines())
    starts = {line.removeprefix("start ") for line in lines if line.startswith("start ")}
    if starts != set(begun):
        raise RuntimeError(
            f"a round began with {sorted(starts)}, not {begun}: adapt the names at the top"
        )
    return sorted(line for line in lines if not line.startswith("start "))


def run_code() -> dict[str, Any]:
    """All that is counted by running the package."""
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        rounds = {}
        for i, (arm, options) in enumerate(ARMS.items()):
            out = here / f"passed-{i}"
            finish(start("passed", out, *TRAIN, *options, "--out", str(here / f"run-{i}")))
            rounds[arm] = passed(out, IN_PROCESS)
        rounds["served"], fetch = run_served(here)
        modules = {
            "clear fetch": fetch,
            "task": loaded(here, "import", TASK_MODULE),
            "help": loaded(here, "loaded", "--help"),
        }
    return {"files_passed": rounds, "modules_loaded": modules}


def run_served(here: Path) -> tuple[list[str], list[str]]:
    """Files that a round of a trainer, a service and a device passes; modules of a device."""
    out, key, rounds, token = here / "passed", here / "key", here / "rounds", here / "token"
    rounds.mkdir()
    finish(start("loaded", here / "loaded", "token", "new-key", str(key)))
    where = ["--cohort", "1", "--devices", str(rounds), "--out", str(here / "run")]
    with ending(start("passed", out, *TRAIN, *where)) as trainer:
        device = wait_for_cohort(rounds, trainer)
        issue = ["token", "issue", "--key", str(key), "--device", f"device-{device}"]
        token.write_text(finish(start("loaded", here / "loaded", *issue)))
        serve = ["serve", str(rounds), "--port", "0", "--token-key", str(key)]
        with ending(start("passed", out, *serve)) as service:
            assert service.stderr is not None
            url = service.stderr.readline().split()[-1]
            to = ["device", url, "--token-file", str(token)]
            finish(start("passed", out, *to, *CLIENT, "--client", device))
            finish(trainer)
            files = passed(out, TRAINER, DEVICE, SERVICE)
            fetched = ["--out", str(here / "slices.npz")]
            return files, loaded(here, "loaded", *to, *FETCH, *fetched)


@contextmanager
def ending(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Ends a child with the block."""
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=SECONDS)


def wait_for_cohort(rounds: Path, trainer: subprocess.Popen[str]) -> str:
    """The number of the device that the first published round asks for."""
    for _ in range(10 * SECONDS):
        texts = (p.read_text() for p in rounds.rglob("cohort.json"))
        found = re.search(r"device-(\d+)", "".join(texts))
        if found:
            return found[1]
        if trainer.poll() is not None:
            finish(trainer)
        time.sleep(0.1)
    raise RuntimeError("no round was published")


if __name__ == "__main__":
    child(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
