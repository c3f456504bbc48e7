"""Plain text to words and sentences."""

from __future__ import annotations

import re

__all__ = ["split_sentences", "split_words"]

# Letters and digits, held together by one of ' . + # - inside; c++ and c# keep their ends.
_WORD = re.compile(r"[^\W_]+(?:['.+#-][^\W_]+)*(?:\+\+|#)?")
# A full stop inside a word, as in node.js or 3.5, ends nothing.
_END = re.compile(r"[.!?]+(?=\W|$)|\n")


def split_words(text: str) -> list[str]:
    """Returns the words of a text in lower case.

    >>> split_words("Don't use C++ or node.js (v3.5)!")
    ["don't", 'use', 'c++', 'or', 'node.js', 'v3.5']
    """
    return _WORD.findall(_normal(text))


def split_sentences(text: str) -> tuple[list[str], list[int]]:
    """Returns the words of a text and the number of words of each sentence.

    A sentence ends at a line's end or at . ! or ? that no letter or digit follows.

    >>> split_sentences("It works. Does it? Yes")
    (['it', 'works', 'does', 'it', 'yes'], [2, 2, 1])
    """
    words: list[str] = []
    lengths = []
    for sentence in _END.split(_normal(text)):
        found = _WORD.findall(sentence)
        if found:
            words += found
            lengths.append(len(found))
    return words, lengths


def _normal(text: str) -> str:
    return text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")
