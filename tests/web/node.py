"""Calls the device of clients/web in Node; bytes and numbers of 32 bits travel in JSON."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from tests.helpers import ROOT

CLIENT = ROOT / "clients" / "web"
_ANSWER = ROOT / "tests" / "web" / "answer.mjs"

needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason="node is not installed: it runs the device of clients/web"
)


class RefusedError(Exception):
    """What the device raised: its kind, and one line."""

    def __init__(self, kind, line):
        super().__init__(line)
        self.kind = kind


class Node:
    """A process that has the modules of the device loaded, as long as the context lasts."""

    def __enter__(self):
        command = ["node", str(_ANSWER)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        self._process.wait(timeout=10)
        self._process.stdout.close()

    def call(self, name, *args):
        """What a function of the device returns; RefusedError where it raises."""
        self._process.stdin.write(json.dumps({"call": name, "args": args}, default=_sent) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline(), object_hook=_read)
        if "error" in told:
            raise RefusedError(told["kind"], told["error"])
        return told.get("found")


def _sent(value):
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, np.ndarray):
        return {"f4": value.tolist()} if value.dtype == np.float32 else value.tolist()
    raise TypeError(type(value))


def _read(told):
    if told.keys() == {"hex"}:
        return bytes.fromhex(told["hex"])
    return np.array(told["f4"], np.float32) if told.keys() == {"f4"} else told
