"""A program: servers whose tables can no longer be read meet every bad query.

    python -m tests.delivery.pir.forbidden_rows

For each scheme there are two processes. Once the servers stand, the memory of their tables is taken
away from them (mprotect with PROT_NONE): a process that reads one row ends by SIGSEGV. The first is
sent all bad queries, and some of them once more after a good one. The second is sent a good query,
which shows that rows are out of reach. Printed, for each: the scheme, which process, how it ended
(0, or the signal as a negative number), and how many queries were refused.
"""

import ctypes
import gc
import mmap
import os
import resource
import traceback
from types import FunctionType, ModuleType

import numpy as np

from tests.delivery.pir.bad_queries import bad_queries, replayed
from tests.delivery.pir.schemes import SCHEMES, seeded, small_table_of

# Rows are longer than a page, so that each has bytes in a page that holds nothing but the table.
SHAPE = (mmap.PAGESIZE, 2)


def arrays_of(start):
    """Every array that an object holds, however deep."""
    seen, found, waiting = set(), [], [start]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, ModuleType | type):
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            found.append(item)
            waiting.append(item.base)
        elif isinstance(item, FunctionType):
            waiting.append(item.__closure__)  # not its module, which holds everything
        else:
            waiting += gc.get_referents(item)
    return found


def forbid(array):
    """Takes the whole pages of an array away; returns how many bytes that are."""
    start, page = array.ctypes.data, mmap.PAGESIZE
    first, last = -(-start // page) * page, (start + array.nbytes) // page * page
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return last - first


def forbid_tables(table):
    """Takes away every array as large as half a table: copies and other forms of it too."""
    table_bytes = table.records.nbytes
    large = {
        array.ctypes.data: array
        for array in arrays_of(table.servers)
        if array.nbytes >= table_bytes // 2 and array.flags.c_contiguous
    }
    forbidden = sum(forbid(array) for array in large.values())
    assert forbidden >= table_bytes - 2 * mmap.PAGESIZE, "no table was found"


def send_bad(scheme, table):
    """Returns how many were refused."""
    good = table.query([5], seeded(9)).messages()
    cases = [*bad_queries(scheme, table), *replayed(table)]
    # Some of them after a good one, which must not be answered either.
    mixed = [(server, [good[server], *bad], error) for server, bad, error in cases[::16]]
    forbid_tables(table)
    for server, queries, error in [*cases, *mixed]:
        try:
            table.servers[server].answer(queries)
        except error:
            continue
        raise RuntimeError("a bad query was answered")
    return len(cases) + len(mixed)


def send_good(_, table):
    messages = table.query([5]).messages()
    forbid_tables(table)
    table.replies(messages)
    raise RuntimeError("rows were answered from that nobody can read")


def run(send, scheme, table):
    """Runs `send` in a process of its own; returns how it ended and what it told."""
    hear, tell = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.write(tell, str(send(scheme, table)).encode())
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(tell)
    with os.fdopen(hear) as heard:
        text = heard.read()
    _, status = os.waitpid(process, 0)
    return os.waitstatus_to_exitcode(status), text or "0"


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for scheme in SCHEMES:
        table = small_table_of(scheme, *SHAPE)
        table.retrieve([5])  # what is compiled or worked out on first use
        for send in (send_bad, send_good):
            print(scheme, send.__name__, *run(send, scheme, table), flush=True)


if __name__ == "__main__":
    main()
