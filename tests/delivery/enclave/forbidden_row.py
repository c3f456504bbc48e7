"""A program: the oblivious select meets a table of which one row cannot be read.

    python -m tests.delivery.enclave.forbidden_row

Every row is a page of its own. For each row in turn that page is taken away (mprotect with
PROT_NONE), in a process of its own, which then selects keys that are not that row: a process that
reads the row ends by SIGSEGV, and one that passes over it does not. Printed, for each: the row,
what was selected, and how the process ended (0, or the signal as a negative number).
"""

import mmap
import os
import resource

import numpy as np

from keyhole.delivery.enclave.program import oblivious_select
from tests.delivery.pir.forbidden_rows import forbid

NUM_KEYS = 29  # tiles of eight rows, and some that are left
WORDS = mmap.PAGESIZE // 8


def selections(row):
    """Keys that do not name the row: none at all, one far away, and all others."""
    others = [key for key in range(NUM_KEYS) if key != row]
    return {
        "nothing": [-1],
        "one": [(row + 16) % NUM_KEYS],
        "others": [*others, -1],
    }


def ended(rows, row, keys):
    """How a process ends that selects keys without a row."""
    if (process := os.fork()) == 0:
        forbid(rows[row])
        oblivious_select(rows, np.array(keys, np.int64))
        os._exit(0)
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status)


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    memory = mmap.mmap(-1, NUM_KEYS * mmap.PAGESIZE)  # begins with a page
    rows = np.frombuffer(memory, np.uint64).reshape(NUM_KEYS, WORDS)
    rows[:] = np.arange(NUM_KEYS, dtype=np.uint64)[:, None]
    oblivious_select(rows, np.arange(3))  # what is compiled on first use
    for row in range(NUM_KEYS):
        for name, keys in selections(row).items():
            print(row, name, ended(rows, row, keys), flush=True)


if __name__ == "__main__":
    main()
