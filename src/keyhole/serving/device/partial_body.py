"""What has arrived of a body, so that a cut one goes on where it ended."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from keyhole.errors import ServiceError

__all__ = ["PartialBody", "fresh_buffer", "refuse_longer"]


_FURTHER = 1 << 16  # bytes that count as having got further


def fresh_buffer(length: int) -> memoryview:
    """Bytes to be written, which nobody has set to zero first.

    Raises:
        ServiceError: there is no room for so many.
    """
    try:
        return np.empty(length, np.uint8).data
    except MemoryError as error:
        raise ServiceError(
            "the answer does not fit into memory",
            got=f"{length} bytes",
            allowed="what this device has room for",
            fix="ask for less at a time, with a smaller most_answer",
        ) from error


def refuse_longer(what: str, length: int, most: int) -> None:
    """Refuses what a manifest describes before anything is asked for or allocated.

    Raises:
        ServiceError: it has more than `most` bytes.
    """
    if length > most:
        raise ServiceError(
            f"{what} is longer than this device takes",
            got=f"{length} bytes",
            allowed=f"{most} bytes",
            fix="raise most_answer, if the service is to be trusted with the memory",
        )


class PartialBody:
    """What has arrived of a body that is fetched in one or more goes."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")
        self._count = self._furthest = 0
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

    def add(self, status: int, count: int) -> bool:
        """Takes note of how many bytes have arrived; returns whether the body has got further.

        Bytes that came once before are no progress: else a service that cuts every answer, and
        resumes none, would be asked for ever.
        """
        if status not in (200, 206):
            return False  # of an error, which is no part of the body
        self._count += count
        if self._count < self._furthest + _FURTHER:
            return False
        self._furthest = self._count
        return True


def _wrong_range() -> ServiceError:
    return ServiceError(
        "the answer continues another one",
        got="a range that was not asked for",
        allowed="the rest of the body",
        fix="check what stands between the device and the service",
    )
