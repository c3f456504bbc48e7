"""Many short texts in two arrays, so that names of words and clients can stay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import numpy as np

from keyhole.data.federated import Ragged

__all__ = ["Texts", "encode_texts"]


class Texts(Sequence[str]):
    """A list of texts that are decoded when they are asked for.

    Args:
        rows: the UTF-8 bytes of each text, uint8.

    >>> names = Texts(encode_texts(["the", "naïve", ""]))
    >>> len(names), names[1], names[:2]
    (3, 'naïve', ['the', 'naïve'])
    """

    def __init__(self, rows: Ragged) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Text `at`, or the texts of a slice as a list."""
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        number = at + len(self) if at < 0 else at
        if not 0 <= number < len(self):
            raise IndexError(f"text {at} of {len(self)}")  # what ends a loop over a sequence
        return bytes(self._rows[number]).decode()


def encode_texts(texts: Iterable[str]) -> Ragged:
    """Returns the UTF-8 bytes of each text."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    return Ragged(np.frombuffer(b"".join(encoded), np.uint8), offsets)
