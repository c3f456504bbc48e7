"""Plain SGD of the tag model over the words that occur: the cost does not depend on the number of
keys.

`logistic.py` has the loss it descends, and `tests/models/test_logistic.py` holds the two together.
"""

from __future__ import annotations

import numba
import numpy as np

from keyhole.errors import ShapeError
from keyhole.models.model import Batch
from keyhole.types import Array, Tree

__all__ = ["sparse_sgd"]


def sparse_sgd(params: Tree, examples: Batch, batches: Array, client_lr: float) -> Tree:
    """Returns the parameters after one gradient step per batch.

    Args:
        params: "kernel" float32 (m, tags) and "bias" float32 (tags,).
        examples: "words" int32 (n, most words), -1 for none, and "tags" float32 (n, tags).
        batches: examples of each step, int64 (steps, batch size), -1 for none.
        client_lr: gamma.

    Raises:
        ShapeError: a word is beyond the rows of the kernel.
    """
    kernel = np.array(params["kernel"], np.float32, order="C")
    bias = np.array(params["bias"], np.float32)
    words = np.ascontiguousarray(examples["words"], np.int32)
    tags = np.ascontiguousarray(examples["tags"], np.float32)
    if words.max(initial=-1) >= len(kernel):
        raise ShapeError(
            "a word is no row of this client's kernel",
            got=f"place {words.max()}",
            allowed=f"-1..{len(kernel) - 1}",
            fix="count words among the client's own keys and leave out the rest",
        )
    _descend(kernel, bias, words, tags, batches, np.float32(client_lr))
    return {"kernel": kernel, "bias": bias}


@numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc", "nsz"})
def _descend(
    kernel: Array, bias: Array, words: Array, tags: Array, batches: Array, client_lr: np.float32
) -> None:
    """Steps in place. The scores of a whole batch are computed before any row moves."""
    batch_size, num_tags = batches.shape[1], bias.shape[0]
    errors = np.empty((batch_size, num_tags), np.float32)
    seen = np.full(kernel.shape[0], -1, np.int64)  # which example last used a word
    visit = 0
    for batch in batches:
        count = 0
        for example in batch:
            if example < 0:
                continue
            error = errors[count]
            error[:] = bias
            for word in words[example]:
                if word >= 0 and seen[word] != visit:
                    seen[word] = visit
                    error += kernel[word]
            visit += 1
            count += 1
            for t in range(num_tags):
                error[t] = np.float32(1) / (np.float32(1) + np.exp(-error[t])) - tags[example, t]
        step = client_lr / np.float32(max(count, 1))
        count = 0
        for example in batch:
            if example < 0:
                continue
            error = errors[count]
            count += 1
            for t in range(num_tags):
                error[t] *= step
                bias[t] -= error[t]
            for word in words[example]:
                if word >= 0 and seen[word] != visit:
                    seen[word] = visit
                    for t in range(num_tags):
                        kernel[word, t] -= error[t]
            visit += 1
