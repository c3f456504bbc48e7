import subprocess

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root alone: sudo make test-all")
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)
