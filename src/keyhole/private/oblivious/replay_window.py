"""What a gateway remembers so that no request is answered twice."""

from __future__ import annotations

from keyhole.errors import InputError, ReplayError

__all__ = ["MOST_REMEMBERED", "ReplayWindow"]

MOST_REMEMBERED = 1 << 18
"""Requests that are remembered by default: some 30 MB."""


class ReplayWindow:
    """The `enc` of the requests that were answered last (RFC 9458, section 6.5).

    A relay may copy a request and send it again. What it gets is sealed to the client as before, so
    it learns nothing; but it must not make the gateway work again and again, nor count a key twice.

    Bounded by number, not by age: a request older than the last `most` ones is answered again, for
    as long as its round is there and its key is not removed, and each process remembers for itself.
    Slices are only read, so an answer too many does no harm. A Date inside of requests would bound
    their age (section 6.5.1), and is not sent: it shows a client's clock (section 6.8), and clocks
    that differ would tell which requests belong together, which this way is there to hide.

    Args:
        most: how many are remembered.

    Raises:
        InputError: fewer than one.
    """

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        if most < 1:
            raise InputError(
                "a window that remembers nothing",
                got=most,
                allowed="1 or more",
                fix="raise it",
            )
        self._most = most
        self._seen: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def admit(self, enc: bytes) -> None:
        """Lets in a request that has been opened: what does not open costs no place here.

        Raises:
            ReplayError: it has been here before.
        """
        if enc in self._seen:
            raise ReplayError(
                "a request that was answered before",
                got="the same one again",
                allowed="each request once",
                fix="seal a new request",
            )
        self._seen[enc] = None
        if len(self._seen) > self._most:
            del self._seen[next(iter(self._seen))]  # the oldest: dicts keep their order
