"""Laws of the synthetic writers: letters one can read, a style per writer, uneven classes."""

import numpy as np
import pytest

from keyhole.data.writers import (
    CHARACTERS,
    CLASS_CONCENTRATION,
    FONTS,
    _distance,
    _knot_weights,
    _render,
    make_writers,
)


@pytest.fixture(scope="module")
def data():
    return make_writers(3, writers=60)


def pictures(data, split):
    """Pixels (n, 784), labels (n,) and the writer of each (n,)."""
    part = data.splits[split]
    pixels = part.columns["pixels"].reshape(-1, 784).astype(np.float32)
    return pixels, part.columns["label"], np.repeat(np.arange(len(part)), part.counts)


def test_columns_keep_the_contract(data):
    for part in data.splits.values():
        pixels, label = part.columns["pixels"], part.columns["label"]
        assert pixels.shape == (part.num_examples, 28, 28)
        assert label.shape == (part.num_examples,)
        assert pixels.dtype == label.dtype == np.uint8
        assert label.max() < 62
    assert "".join(data.names["classes"]) == CHARACTERS


def test_each_writer_tests_on_a_tenth(data):
    train, test = data.splits["train"], data.splits["test"]
    assert train.client_ids == test.client_ids
    total = train.counts + test.counts
    assert total.min() >= 20
    assert total.max() <= 200
    assert np.array_equal(test.counts, total // 10)


def test_paper_is_white_and_every_image_has_ink(data):
    pixels = data.splits["train"].columns["pixels"]
    border = np.concatenate([pixels[:, 0], pixels[:, -1]], axis=1)
    assert np.median(border) == 255
    assert np.all(pixels.min(axis=(1, 2)) < 128)
    assert np.all(pixels.mean(axis=(1, 2)) > 50)


def test_classes_are_as_uneven_as_a_dirichlet_law_makes_them(data):
    """Two images of a writer have the same label with probability (a + 1) / (62 a + 1).

    That is 0.038 at a = 0.7, and 1 / 62 = 0.016 if classes were even. Over 60 writers the mean has
    a standard error of about 0.001.
    """
    chances = []
    for i in range(len(data.splits["train"])):
        n = np.bincount(data.splits["train"].client(i)["label"])
        chances.append((n * (n - 1)).sum() / (n.sum() * (n.sum() - 1)))
    a = CLASS_CONCENTRATION
    assert np.mean(chances) == pytest.approx((a + 1) / (62 * a + 1), rel=0.15)


def test_a_writer_is_nearer_to_itself_than_to_others(data):
    """Pairs of images of one character: by one writer, and by two."""
    pixels, label, writer = pictures(data, "train")
    same, other = [], []
    for character in range(62):
        at = np.flatnonzero(label == character)
        x, w = pixels[at] / 255, writer[at]
        square = (x * x).sum(axis=1)
        distance = square[:, None] + square[None, :] - 2 * (x @ x.T)
        is_pair = np.triu(np.ones_like(distance, bool), 1)
        is_same = w[:, None] == w[None, :]
        same.append(distance[is_pair & is_same])
        other.append(distance[is_pair & ~is_same])
    assert np.concatenate(same).mean() < 0.7 * np.concatenate(other).mean()


def test_characters_can_be_read_but_not_all_of_them(data):
    """Nearest mean image of a class: far above chance, 1/62, far from perfect."""
    pixels, label, _ = pictures(data, "train")
    means = np.stack([pixels[label == c].mean(axis=0) for c in range(62)])
    seen, truth, _ = pictures(data, "test")
    guess = ((means * means).sum(axis=1)[None, :] - 2 * (seen @ means.T)).argmin(axis=1)
    assert 0.3 < np.mean(guess == truth) < 0.8


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i > 3)) for i, name in enumerate(FONTS)]
)
def test_a_font_draws_62_different_characters(name):
    """A font without a glyph would draw the same box for many."""
    glyphs = _render(name)
    assert len(np.unique(glyphs.reshape(62, -1), axis=0)) == 62
    for glyph in glyphs:
        tall, wide = (np.ptp(np.flatnonzero(glyph.any(axis=axis))) + 1 for axis in (1, 0))
        assert 47 <= max(tall, wide) <= 51  # 20 pixels, 2.5 times as fine, less a faint tip


def test_distances_are_those_of_the_definition():
    target = np.zeros((9, 9), bool)
    target[2, 3] = target[7, 7] = True
    y, x = np.mgrid[:9, :9]
    nearest = np.minimum(np.hypot(y - 2, x - 3), np.hypot(y - 7, x - 7))
    assert np.allclose(_distance(target), nearest, rtol=1e-6)  # all are within reach


def test_a_bend_by_equal_shifts_is_a_shift():
    assert np.allclose(_knot_weights().sum(axis=1), 1.0, atol=1e-6)
