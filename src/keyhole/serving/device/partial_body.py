"""What has arrived of a body, so that a cut one goes on where it ended."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keyhole.errors import ServiceError

__all__ = ["PartialBody", "fresh_buffer"]


def fresh_buffer(length: int) -> memoryview:
    """Bytes to be written, which nobody has set to zero first."""
    return np.empty(length, np.uint8).data


class PartialBody:
    """What has arrived of a body that is fetched in one or more goes."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")
        self._count = 0
        self._tag = ""

    @property
    def whole(self) -> memoryview:
        """The body, once all of it is there."""
        return self._buffer

    @property
    def headers(self) -> dict[str, str]:
        """Asks for the rest, if the service can tell whether it is the rest of the same."""
        if not (self._tag and self._count):
            return {}
        return {"range": f"bytes={self._count}-", "if-range": self._tag}

    def place(self, status: int, headers: Mapping[str, str], length: int) -> memoryview:
        """Where the body of an answer goes."""
        total = len(self._buffer)
        if status == 206:
            expected = f"bytes {self._count}-{total - 1}/{total}"
            if headers.get("content-range") != expected or length != total - self._count:
                self._count = 0
                raise _wrong_range()
            return self._buffer[self._count :]
        self._buffer, self._count = fresh_buffer(length), 0
        tag = headers.get("etag", "")
        self._tag = "" if tag.startswith("W/") else tag  # a weak tag does not vouch for bytes
        return self._buffer

    def add(self, count: int) -> None:
        """Takes note of how many bytes have arrived."""
        self._count += count


def _wrong_range() -> ServiceError:
    return ServiceError(
        "the answer continues another one",
        got="a range that was not asked for",
        allowed="the rest of the body",
        fix="check what stands between the device and the service",
    )
