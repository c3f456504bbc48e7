"""Words numbered by how many users use them: counted as they come, ranked at the end.

Words get a number when they are first met, so text can go to disk before the ranking is known; a
second pass over the numbers on disk puts the ranks in their place. Memory holds the words that
differ, never the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from keyhole.types import Array

__all__ = ["Lexicon", "renumber_file"]

_BLOCK = 1 << 22  # numbers that are renumbered at a time


class Lexicon:
    """The words met so far and the number of users of each.

    >>> lexicon = Lexicon()
    >>> for text in ("b a", "c a a"):  # two users
    ...     lexicon.count_user(lexicon.number(text.split()))
    >>> words, ranks = lexicon.rank()
    >>> words, ranks.tolist()  # "b" came first and is second now
    (['a', 'b', 'c'], [1, 0, 2])
    """

    def __init__(self) -> None:
        self._numbers = _Numbers()
        self._users = np.zeros(1024, np.int64)

    def number(self, words: Iterable[str]) -> Array:
        """Returns the provisional number of each word, int32; new words get the next ones."""
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32)

    def count_user(self, numbers: Array) -> None:
        """Counts one user for each different number: all that one user has written."""
        if len(self._numbers) > len(self._users):
            self._users = np.pad(self._users, (0, len(self._numbers)))
        self._users[np.unique(numbers)] += 1

    def rank(self) -> tuple[list[str], Array]:
        """Returns the words by falling number of users, then by alphabet; and the place of each.

        Returns:
            words: words[r] is the word of rank r.
            ranks: int32, ranks[number] is the rank of the word with this provisional number.
        """
        words = list(self._numbers)
        users = self._users.tolist()
        order = sorted(range(len(words)), key=lambda i: (-users[i], words[i]))
        ranks = np.empty(len(words), np.int32)
        ranks[order] = np.arange(len(words), dtype=np.int32)
        return [words[i] for i in order], ranks


class _Numbers(dict[str, int]):
    """Gives a word that is not there the next number."""

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        return number


def renumber_file(path: Path, ranks: Array, block: int = _BLOCK) -> None:
    """Replaces every number in a .npy file by its rank, in place and block by block."""
    numbers = np.load(path, mmap_mode="r+")
    for start in range(0, len(numbers), block):
        numbers[start : start + block] = ranks[numbers[start : start + block]]
    numbers.flush()
