"""What the command-line tests share: the command, and data that is quick to read."""

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest

from keyhole.cli.main import main

COMMAND = [sys.executable, "-c", "from keyhole.cli.main import main; main()"]


@pytest.fixture(autouse=True)
def threads_as_they_are(monkeypatch):
    """Other tests of this process may have started JAX, which fixes the number of its threads."""
    monkeypatch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    return {**os.environ, "KEYHOLE_CACHE": str(tmp_path_factory.mktemp("cache")), "COLUMNS": "120"}


@pytest.fixture(scope="session")
def program(environment):
    """Runs the command in a process of its own, as people do."""

    def run(*args, cwd=None):
        return subprocess.run(
            [*COMMAND, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env=environment,
            cwd=cwd,
        )

    return run


@pytest.fixture(scope="session")
def keyhole(environment):
    """Runs the command in this process, which has imported and compiled what it takes; returns
    what `program` returns."""

    def run(*args, cwd=None):
        out, err = io.StringIO(), io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("keyhole.rounds.cores.use_one_thread", lambda: None)
            for name in ("KEYHOLE_CACHE", "COLUMNS"):
                patch.setenv(name, environment[name])
            if cwd is not None:
                patch.chdir(cwd)
            with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
                main([str(arg) for arg in args])
        code = ended.value.code or 0
        return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())

    return run


@pytest.fixture(scope="session")
def few_writers(tmp_path_factory):
    """A file of handwriting in the format of femnist.npz: eight writers, twelve images each."""
    writers, images = 8, 12
    rng = np.random.default_rng(0)
    count = writers * images
    path = tmp_path_factory.mktemp("data") / "few.npz"
    np.savez(
        path,
        images=rng.integers(0, 256, (count, 28, 28), np.uint8),
        labels=rng.integers(0, 62, count).astype(np.uint8),
        client=np.repeat(np.arange(writers, dtype=np.uint16), images),
        split=np.tile(np.repeat([0, 1], [images - 2, 2]).astype(np.uint8), writers),
        writer=np.array([f"w{i}" for i in range(writers)]),
        complete=np.ones(writers, bool),
        classes=np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")),
    )
    return path
