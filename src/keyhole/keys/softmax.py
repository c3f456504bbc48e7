"""Sampled softmax: what the random words of a client stand for in its loss (section 4.1.1)."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np

from keyhole.errors import InputError
from keyhole.keys.counts import KeyCounts
from keyhole.primitives.keyspace import Keys

__all__ = ["check_share", "num_negatives", "sampled_correction"]


def sampled_correction(
    keys: Keys, counts: KeyCounts, share: float, first: Sequence[int] = ()
) -> tuple[int, float]:
    r"""Returns how many keys of a client are not sampled, and what to add to the logits of the
    rest.

    With n words of which `own` were chosen and s drawn from the n - own others, each drawn word
    stands for (n - own) / s words. Its logit is raised by the logarithm of that, so that

    $$\hat Z = \sum_{j \le own} e^{o_j} + \frac{n - own}{s} \sum_{j > own} e^{o_j}$$

    Over the draw of the s words:

    - unbiased: $\hat Z$, the partition function of the softmax over all n words, at given logits.
    - not unbiased: the loss $\log \hat Z - o_{label}$ and its gradient. The logarithm is concave,
      so the loss is too small on average, by about Var($\hat Z$) / 2 $Z^2$, which falls as 1 / s:
      they are consistent, and exact where s = n - own.
    - not corrected: words of the client that it did not choose are no targets of its loss unless
      they are drawn, and its inputs lack them.

    Args:
        keys: what the client selected with `with_negatives(choice, share)`.
        counts: what it chose from.
        share: as given to `with_negatives`.
        first: as given to `always`, where `choice` is one of those.

    Returns:
        own, and log((n - own) / s), which is 0.0 where nothing was drawn or nothing is missing.
        `choice` is taken to choose as many of the client's own keys as it may, as the
        structured ones do.

    >>> from keyhole import KeySpace
    >>> word = KeySpace("word", 100)
    >>> counts = KeyCounts.of(word, np.array([1, 1, 1, 9, 9, 5]))
    >>> own, correction = sampled_correction(word.keys([1, 9, 85, 64]), counts, share=0.5)
    >>> own, round(float(np.exp(correction)), 6)  # each of two stands for 49
    (2, 49.0)

    Waghmare et al., Efficient Image Representation Learning with Federated Sampled Softmax, 2022.
    """
    n, selected = keys.space.num_keys, len(keys)
    if selected == n:
        return n, 0.0
    # A client with enough own keys filled its part of m; one with too few chose all it had.
    had = len(np.union1d(np.asarray(first, np.int64), counts.keys))
    own = min(had, selected - num_negatives(selected, share))
    sampled = selected - own
    return own, log((n - own) / sampled) if sampled else 0.0


def num_negatives(keys_per_client: int, share: float) -> int:
    """How many of m keys are drawn at random."""
    return round(share * keys_per_client)


def check_share(share: float) -> None:
    """Raises InputError unless there is room for own keys."""
    if not 0 <= share < 1:
        raise InputError(
            "share of random keys is out of range",
            got=share,
            allowed="at least 0, below 1",
            fix="leave room for the client's own keys",
        )
