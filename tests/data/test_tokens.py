"""Words and sentences of plain text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.readers.json_files import split_sentences, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Don\N{RIGHT SINGLE QUOTATION MARK}t", ["don't"]),
        ("C++, C# and .NET", ["c++", "c#", "and", "net"]),
        ("node.js v3.5", ["node.js", "v3.5"]),
        ("co-founder's -- a_b", ["co-founder's", "a", "b"]),
        ("Café naïve 日本", ["café", "naïve", "日本"]),
        ("'quoted' (x) ...", ["quoted", "x"]),
        ("", []),
    ],
)
def test_words(text, words):
    assert split_words(text) == words


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("One two. Three! Four five six?", [2, 1, 3]),
        ("a line\nand another", [2, 2]),
        ("node.js costs 3.5 dollars", [4]),
        ('He said "stop." And left...', [3, 2]),
        ("...", []),
    ],
)
def test_sentences(text, lengths):
    assert split_sentences(text)[1] == lengths


@given(st.text())
def test_sentences_add_up_to_the_words(text):
    words, lengths = split_sentences(text)
    assert sum(lengths) == len(words)
    assert all(length > 0 for length in lengths)
    assert all(word == word.lower() and not word.isspace() for word in words)
