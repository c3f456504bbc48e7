"""Looking for bytes in all that a process can read of its own memory."""

import re
from pathlib import Path

import pytest

_AT_ONCE = 1 << 24
_MAP = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)\n(?:\w+:.*\n)*?Rss: +(\d+) kB\n"
    r"(?:\w+:.*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)


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
    """All readable maps but libraries, which nobody writes to, what the kernel puts there, and
    those of which not a page was ever touched."""
    for found in _MAP.finditer(Path(f"/proc/{pid}/smaps").read_text()):
        start, stop, access, path, held, swapped = found.groups()
        is_library = "w" not in access and re.search(r"\.so(\.|$)", path)
        is_used = int(held) + int(swapped) and path not in ("[vvar]", "[vsyscall]")
        if access.startswith("r") and is_used and not is_library:
            yield int(start, 16), int(stop, 16)
