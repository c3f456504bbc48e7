"""Freed memory stays with the process that asked for it."""

import subprocess
import sys

import pytest

CODE = """
import resource, sys
import numpy as np
from keyhole.arrays import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def churn():
    for _ in range(200):
        np.zeros(1 << 20, np.uint8).fill(1)
churn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
churn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_faults(how):
    done = subprocess.run(
        [sys.executable, "-c", CODE, how], capture_output=True, text=True, check=True, timeout=300
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_blocks_that_were_freed_are_used_again_without_page_faults():
    """200 blocks of 256 pages would fault 51,200 times; kept, they hardly fault at all."""
    assert count_faults("keep") < 1000
