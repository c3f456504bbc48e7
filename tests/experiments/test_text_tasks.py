"""The text tasks: from posts to what a model takes, by hand."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.data.federated import FederatedData, Ragged
from keyhole.errors import InputError
from keyhole.experiments import all_tasks
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.so_tag import Bags
from keyhole.experiments.so_word import LENGTH, Tokens, cut_sentences
from keyhole.experiments.specs import spec_of
from keyhole.primitives.keyspace import KeySpace
from tests.experiments.small import posts, writers

TASKS = all_tasks()


def test_a_bag_holds_each_known_word_once_and_the_title():
    bags = Bags.of(posts().splits["train"].client(0), words=5, tags=4)
    assert list(zip(bags.post.tolist(), bags.word.tolist(), strict=True)) == [
        (0, 0), (0, 1), (0, 4), (1, 0), (1, 2),
    ]  # fmt: skip
    assert np.argwhere(bags.tags).tolist() == [[0, 0], [1, 1]]  # tag 7 is outside the four


def test_words_that_were_not_selected_are_left_out():
    task = TASKS["so_tag"].on(posts(), {"words": 5, "tags": 4})
    keys = KeySpace("word", 5).keys([4, 0])
    examples = task.localize(task.data(0), {"word": keys})
    assert [sorted(p for p in row if p >= 0) for row in examples["words"].tolist()] == [[0, 1], [1]]


def test_a_client_counts_the_posts_that_have_a_word():
    task = TASKS["so_tag"].on(posts(), {"words": 5, "tags": 4})
    counts = task.count_keys(task.data(0))["word"]
    assert dict(zip(counts.keys.tolist(), counts.counts.tolist(), strict=True)) == {
        0: 2, 1: 1, 2: 1, 4: 1,
    }  # fmt: skip


def test_a_vocabulary_beyond_the_data_is_refused():
    with pytest.raises(InputError, match=r"got 11; expected 1\.\.10 words"):
        TASKS["so_tag"].on(posts(), {"words": 11})


def test_a_task_refuses_data_of_another_kind():
    with pytest.raises(InputError, match="a dataset of writers"):
        TASKS["so_tag"].on(writers())


def test_a_sentence_of_twenty_words_has_no_end_and_one_more_is_cut():
    tokens = Tokens(words=50)
    for length in (LENGTH, LENGTH + 1):
        words = np.arange(length)
        columns = {"words": Ragged.of([words]), "sentences": Ragged.of([[length]])}
        (sentence,) = cut_sentences(columns, tokens)
        assert sentence.tolist() == [tokens.begin, *range(1, LENGTH + 1)]


def test_a_short_sentence_ends_and_is_padded():
    tokens = Tokens(words=50)
    columns = {"words": Ragged.of([[7, 49, 50]]), "sentences": Ragged.of([[3]])}
    (sentence,) = cut_sentences(columns, tokens)
    assert sentence[:5].tolist() == [tokens.begin, 8, 50, tokens.unknown, tokens.end]
    assert set(sentence[5:].tolist()) == {0}


def test_the_special_tokens_come_first_and_unselected_words_are_unknown():
    task = TASKS["so_word"].on(posts(), {"words": 5, "neurons": 8, "width": 8, "heads": 2})
    word, neuron = task.model.layout.spaces
    special = task.always["word"]
    assert special.tolist() == [0, 6, 7, 8]
    keys = {
        "word": word.keys([*special, 2]),
        "neuron": neuron.keys([0]),
    }  # the token of word 1 is 2
    examples = task.localize(task.data(0), keys)
    # ann's first sentence: words 0 1 1, of which word 0 was not selected
    assert examples["tokens"][0, :6].tolist() == [2, 1, 4, 4, 3, 0]


def test_special_tokens_are_not_counted_as_words():
    task = TASKS["so_word"].on(posts(), {"words": 5, "neurons": 8, "width": 8, "heads": 2})
    counts = task.count_keys(task.data(0))
    assert counts["word"].keys.tolist() == [1, 2, 3]  # tokens of words 0, 1, 2; 9 is unknown
    assert len(counts["neuron"].keys) == 0


@pytest.mark.slow
def test_a_client_without_a_sentence_teaches_nothing():
    data = posts()
    empty = {name: Ragged.of([[]]) for name in ("words", "title", "tags", "sentences")}
    lone = FederatedData.of(["cem"], [1], empty)
    data = replace(data, splits={**data.splits, "train": lone})
    sizes = {"words": 5, "neurons": 8, "width": 8, "heads": 2, "embedding": 4}
    changes = {"rounds": 1, "cohort.size": 1, "keys.word.count": 5, "keys.neuron.count": 8}
    made = Experiment(spec_of("so_word", changes, sizes=sizes), data)
    before = made.start(0, None).state.model()
    run = made.start(0, None)
    (record,) = run.rounds(1)
    assert record.refused == []
    assert np.array_equal(before["embedding"], run.state.model()["embedding"])


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ({"keys.word.count": 3}, "expected 4 or more"),
        ({"sizes": {"width": 9, "heads": 2, "words": 5}}, "heads do not divide"),
        ({"sizes": {"embedding": 7, "words": 5}}, "an even number"),
        (
            {"keys.word": {"choice": "independent", "count": 6}, "client.negatives": 0.5},
            "negatives need own keys",
        ),
    ],
)
def test_what_the_transformer_cannot_be_is_refused_at_once(rest, said):
    rest.setdefault("sizes", {"words": 5})
    with pytest.raises(InputError, match=said):
        Experiment(spec_of("so_word", rest), posts()).check()


def test_data_without_a_validation_split_is_refused():
    data = posts()
    data = replace(data, splits={"train": data.splits["train"], "test": data.splits["test"]})
    with pytest.raises(InputError, match="no validation split"):
        TASKS["so_tag"].on(data, {"words": 5})
