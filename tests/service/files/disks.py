"""A disk that can be full."""

import os

PAGE = 4096


def leave_room(disk, pages):
    """Fills a disk up to a number of pages, with a file named filler."""
    found = os.statvfs(disk)
    room = found.f_bavail * found.f_frsize - pages * PAGE
    descriptor = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT)
    if room > 0:
        os.posix_fallocate(descriptor, 0, room)
    os.close(descriptor)
