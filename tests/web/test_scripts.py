"""Every script that a browser is given is one that it can read."""

import subprocess

import pytest

from tests.helpers import ROOT
from tests.web.node import needs_node

FOLDERS = ROOT / "clients" / "web", ROOT / "src" / "keyhole"
SCRIPTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.js"))


@needs_node
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_can_be_read(script):
    command = ["node", "--check", "--input-type=module"]
    done = subprocess.run(command, check=False, input=script.read_bytes(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
