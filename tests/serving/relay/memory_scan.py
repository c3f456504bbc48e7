"""Looking for bytes in all that a process can read of its own memory."""

import re
from pathlib import Path

import pytest

_AT_ONCE = 1 << 24


def found_in_memory(pid, needles):
    """Which of `needles` stand anywhere in the memory of a process; skips where that is barred."""
    left, found = set(needles), set()
    overlap = max(map(len, needles)) - 1
    try:
        memory = Path(f"/proc/{pid}/mem").open("rb", buffering=0)  # noqa: SIM115
    except PermissionError:
        pytest.skip("/proc/PID/mem of a child may not be read here")
    with memory:
        for start, stop in _readable(pid):
            tail = b""
            for at in range(start, stop, _AT_ONCE):
                try:
                    memory.seek(at)
                    piece = tail + memory.read(min(_AT_ONCE, stop - at))
                except (OSError, ValueError):  # of the kernel's own, or gone meanwhile
                    break
                found |= {needle for needle in left - found if needle in piece}
                tail = piece[-overlap:]
    return found


def _readable(pid):
    """All readable maps but libraries, which nobody writes to, and what the kernel puts there."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, access, _, _, _, *name = line.split(maxsplit=5)
        path = name[0] if name else ""
        is_library = "w" not in access and re.search(r"\.so(\.|$)", path)
        if access.startswith("r") and path not in ("[vvar]", "[vsyscall]") and not is_library:
            start, stop = span.split("-")
            yield int(start, 16), int(stop, 16)
