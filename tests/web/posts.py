"""Posts as the device in JavaScript has them, in the columns of the library."""

import numpy as np

from keyhole.data.federated import Dataset, FederatedData, Ragged


def columns_of(posts):
    """Words and tags of posts; none has a title."""
    columns = {name: ragged([post[name] for post in posts]) for name in ("words", "tags")}
    return {**columns, "title": ragged([[] for _ in posts])}


def ragged(rows):
    flat = np.array([value for row in rows for value in row], np.int64)
    return Ragged(flat, np.cumsum([0, *map(len, rows)]))


def dataset_of(posts, words, tags):
    """Posts of one client, on which it trains and is measured."""
    data = FederatedData.of(["phone"], np.array([len(posts)]), columns_of(posts))
    names = {"words": ["word"] * words, "tags": ["tag"] * tags}
    return Dataset("posts", "posts", dict.fromkeys(("train", "validation", "test"), data), names)
