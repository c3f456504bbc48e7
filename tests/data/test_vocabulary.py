"""Words ranked by users: a hand-computed case, and the same numbers after the second pass."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.columns import Lexicon, renumber_file

TEXTS = st.lists(st.lists(st.sampled_from("abcdefgh")), max_size=8)


def test_users_are_counted_and_not_words():
    """zeta: users 1, 2, 3. eta: 1, 3. alpha (5 times) and beta: user 2 alone, so by alphabet."""
    lexicon = Lexicon()
    users = ["zeta eta", "beta alpha alpha alpha alpha alpha zeta", "eta zeta"]
    numbers = [lexicon.number(text.split()) for text in users]
    for row in numbers:
        lexicon.count_user(row)
    words, ranks = lexicon.rank()
    assert words == ["zeta", "eta", "alpha", "beta"]
    assert ranks[numbers[1]].tolist() == [3, 2, 2, 2, 2, 2, 0]


def test_a_word_that_nobody_is_counted_for_comes_last():
    lexicon = Lexicon()
    lexicon.number(["aaa"])
    lexicon.count_user(lexicon.number(["zzz"]))
    assert lexicon.rank()[0] == ["zzz", "aaa"]


@given(TEXTS)
def test_ranks_agree_with_a_plain_count(texts):
    lexicon = Lexicon()
    numbers = []
    for text in texts:
        numbers.append(lexicon.number(text))
        lexicon.count_user(numbers[-1])
    words, ranks = lexicon.rank()
    users = Counter(word for text in texts for word in set(text))
    assert words == sorted(users, key=lambda word: (-users[word], word))
    for text, row in zip(texts, numbers, strict=True):
        assert [words[rank] for rank in ranks[row]] == text


def test_more_words_than_there_was_room_for():
    lexicon = Lexicon()
    lexicon.count_user(lexicon.number(["a"]))
    lexicon.count_user(lexicon.number(map(str, range(5000))))
    assert lexicon.rank()[0][:2] == ["0", "1"]
    assert len(lexicon.rank()[0]) == 5001


def test_a_file_is_renumbered_block_by_block(tmp_path):
    path = tmp_path / "numbers.npy"
    np.save(path, np.array([0, 2, 1, 1, 0], np.int32))
    renumber_file(path, np.array([5, 6, 7], np.int32), block=2)
    assert np.load(path).tolist() == [5, 7, 6, 6, 5]
