"""Parts that sweeps of runs/questions name as "parts:NAME", with runs/ on Python's path.

Choices of words by buckets, choices of clients whose memory differs, and slices in fewer bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from keyhole.data.open import open_dataset
from keyhole.delivery.clear import OnDemand
from keyhole.delivery.records import Coding
from keyhole.experiments.so_tag import Bags
from keyhole.keys.choice import Choice, KeyContext
from keyhole.keys.sampled import independent, nested, rolling
from keyhole.keys.structured import top, with_negatives

HALF, EIGHT, FOUR = (OnDemand(Coding(kind)) for kind in ("half", "uint8", "uint4"))
"""Slices in 16, 8 and 4 bits; updates are in 32."""

UNCORRECTED = with_negatives(top, 0.5)
"""Half of a client's words drawn from all others, whose logits nobody corrects."""


@dataclass(frozen=True)
class TwoClasses:
    """Every other client holds a quarter of what the others hold."""

    choice: Choice

    def __call__(self, context: KeyContext):
        held = context.max_keys // (4 if context.client % 2 else 1)
        return self.choice(replace(context, max_keys=held))


CLASSES_RANDOM, CLASSES_ROLLING, CLASSES_NESTED = map(TwoClasses, (independent, rolling, nested))


@dataclass(frozen=True)
class TopBuckets:
    """Takes whole buckets of words, those that occur most often in a client's data.

    Args:
        size: of a bucket.
        order: which words share one. "frequency": neighbours in frequency; "dealt": word k goes to
            bucket k mod B, which mixes frequent words with rare ones; "together": words that the
            same users write.
    """

    size: int
    order: str

    def __call__(self, context: KeyContext):
        places, buckets = self._places_in(context), context.space.num_keys // self.size
        of = places % buckets if self.order == "dealt" else places // self.size
        totals = np.bincount(of[context.counts.keys], context.counts.counts, minlength=buckets)
        chosen = np.argsort(-totals, kind="stable")[: context.max_keys // self.size]
        chosen = chosen[totals[chosen] > 0]
        return np.concatenate([np.flatnonzero(of == bucket) for bucket in chosen]).astype(np.int64)

    def _places_in(self, context: KeyContext):
        """Where each word stands in the order."""
        if self.order == "together":
            return self._together
        return np.arange(context.space.num_keys)

    @cached_property
    def _together(self):
        return np.argsort(order_by_users(words=10_000))


def order_by_users(words: int):
    """Words in an order in which neighbours have the same users: halved again and again along the
    direction in which their users differ most."""
    train = open_dataset("stackexchange").splits["train"]
    rng = np.random.default_rng(0)
    sketch = np.zeros((words, 64), np.float32)  # random projection of words x users
    for client in range(len(train)):
        own = np.unique(Bags.of(train.client(client), words, 1).word)
        sketch[own] += rng.standard_normal(64).astype(np.float32) / np.sqrt(len(own) + 1)
    sketch /= np.linalg.norm(sketch, axis=1, keepdims=True) + 1e-9
    return _halved(np.arange(words), sketch)


def _halved(group, sketch):
    """A group of words, likes with likes."""
    if len(group) <= 8:
        return group
    centred = sketch[group] - sketch[group].mean(axis=0)
    _, _, directions = np.linalg.svd(centred, full_matrices=False)
    ranked = group[np.argsort(centred @ directions[0], kind="stable")]
    half = len(ranked) // 2
    return np.concatenate([_halved(ranked[:half], sketch), _halved(ranked[half:], sketch)])


FREQUENCY_10, DEALT_10, TOGETHER_10 = (
    TopBuckets(10, order) for order in ("frequency", "dealt", "together")
)
FREQUENCY_50, DEALT_50, TOGETHER_50 = (
    TopBuckets(50, order) for order in ("frequency", "dealt", "together")
)
