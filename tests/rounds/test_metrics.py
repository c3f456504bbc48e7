"""Metrics against cases computed by hand."""

import numpy as np
import pytest

from keyhole.rounds.evaluate import accuracy, masked_accuracies, recall_at


def test_recall_counts_true_tags_over_all_examples():
    """Example 0: tags 0 and 4 are true, the best two are 4 and 1: one of two. Example 1: tag 2 is
    true and best. Two of three tags in all; the mean of the two recalls would be 3/4."""
    scores = np.array([[0.1, 0.8, 0.3, 0.0, 0.9], [0.0, 0.1, 0.7, 0.2, 0.3]])
    assert recall_at(2, scores, np.array([0, 0, 1]), np.array([0, 4, 2])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("tag", "is_found"), [(0, True), (1, True), (2, False), (3, False)])
def test_of_equal_scores_the_smaller_tag_comes_first(tag, is_found):
    """Four tags tie for two places."""
    scores = np.full((1, 4), 0.5)
    assert recall_at(2, scores, np.array([0]), np.array([tag])) == float(is_found)


def test_recall_agrees_with_sorting():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (50, 12)) / 4.0  # many ties
    example, tag = np.nonzero(rng.random((50, 12)) < 0.3)
    best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
    found = [t in best[i] for i, t in zip(example, tag, strict=True)]
    assert recall_at(5, scores, example, tag) == np.mean(found)


def test_recall_without_a_true_tag_is_not_a_number():
    assert np.isnan(recall_at(5, np.zeros((2, 3)), np.empty(0, int), np.empty(0, int)))


def test_three_maskings_by_hand():
    """0 is pad, 7 is oov, 9 is eos. Right: 1, 7, 9 of 1 2 7 9; pad never counts."""
    target = np.array([[1, 2, 7, 9, 0, 0]])
    predicted = np.array([[1, 3, 7, 9, 0, 5]])
    masks = {"pad": np.array([0]), "oov": np.array([0, 7]), "eos": np.array([0, 7, 9])}
    found = masked_accuracies(predicted, target, masks)
    assert found == {"pad": 3 / 4, "oov": 2 / 3, "eos": 1 / 2}


def test_accuracy_of_nothing_is_not_a_number():
    assert np.isnan(accuracy(np.empty(0), np.empty(0)))


def test_a_model_that_diverged_has_no_recall():
    assert np.isnan(recall_at(5, np.full((1, 9), np.nan), np.array([0]), np.array([7])))
