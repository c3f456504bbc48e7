"""Small datasets for the tests of tasks, made by hand."""

import numpy as np

from keyhole.data.federated import Dataset, FederatedData, Ragged


def posts():
    """Two users to train on, one of each other split; words and tags are written out."""
    train = FederatedData.of(
        ["ann", "ben"],
        [2, 1],
        {
            "words": Ragged.of([[0, 1, 1, 9], [2, 0], [3, 3]]),
            "title": Ragged.of([[4], [], []]),
            "tags": Ragged.of([[0, 7], [1], []]),
            "sentences": Ragged.of([[3, 1], [2], [2]]),
        },
    )
    names = {"words": [f"w{i}" for i in range(10)], "tags": [f"t{i}" for i in range(8)]}
    return Dataset("hand", "posts", dict.fromkeys(("train", "validation", "test"), train), names)


def writers(count=6, images=12):
    """Writers whose characters are one bright row each: learnable at once."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 4, count * images).astype(np.uint8)
    pixels = np.full((count * images, 28, 28), 255, np.uint8)
    pixels[np.arange(len(label)), 5 * label] = 0
    data = FederatedData.of(
        [f"w{i}" for i in range(count)], [images] * count, {"pixels": pixels, "label": label}
    )
    return Dataset("hand", "writers", {"train": data, "test": data}, {"classes": list("0123")})
