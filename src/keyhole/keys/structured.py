"""Chooses among the keys that occur in a client's own data, alone or with random others.

A client with fewer own keys than it may hold gets those it has, none included (section 4.1.1). The
three choices are compared in the ablation of section 5.2. `sampled_correction` says what the random
words of a client stand for in a sampled softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.errors import InputError
from keyhole.keys.choice import (
    Choice,
    KeyContext,
    KeyCounts,
    draw_distinct,
    facts_of,
    needs,
)
from keyhole.keys.sampled import every, independent, nested, rolling
from keyhole.parts import PartKind, pick
from keyhole.primitives.keyspace import Keys


def top(context: KeyContext) -> KeyArray:
    """Chooses the keys that occur most often: "Top" of section 5.2.

    The keys of a client are the same in every round.

    Returns:
        int64 (at most m,), the most frequent first, ties to the smaller key. The choice of m keys
        is the beginning of that of m + 1.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> top(KeyContext(counts, 3, np.random.default_rng(0))).tolist()
    [7, 9, 2]
    """
    # Keys rise, so a stable sort leaves ties to the smaller one.
    counts = context.counts.counts
    if counts.max(initial=0) < 1 << 15:
        counts = counts.astype(np.int16)  # in whose range NumPy sorts without comparing
    order = np.argsort(-counts, kind="stable")
    return context.counts.keys[order[: context.max_keys]]


def random_own(context: KeyContext) -> KeyArray:
    """Chooses at random among the client's own keys: "Random" of section 5.2.

    Returns:
        int64 (at most m,), in the order drawn.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> sorted(random_own(KeyContext(counts, 10, np.random.default_rng(0))).tolist())
    [2, 5, 7, 9]
    """
    own = context.counts.keys
    return own[draw_distinct(len(own), context.max_keys, context.rng)]


def random_top(context: KeyContext) -> KeyArray:
    """Chooses m at random among the 2m keys that occur most often: "Random Top" of section 5.2.

    Returns:
        int64 (at most m,), in the order drawn.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([5, 9, 9, 2, 7, 7]))
    >>> random_top(KeyContext(counts, 1, np.random.default_rng(0))).tolist()  # of 7 and 9
    [9]
    """
    candidates = top(replace(context, max_keys=2 * context.max_keys))
    return candidates[draw_distinct(len(candidates), context.max_keys, context.rng)]


@needs("users")
def tf_idf(context: KeyContext) -> KeyArray:
    """Chooses the keys that are frequent here and rare elsewhere, by count * log(N / users).

    N is the number of clients, users how many of them have the key in their data. Both are counted
    in the data of all clients, by the trainer, who publishes them with each round of devices: that
    says things about clients that no privacy account covers. `tf_idf_by` takes a table instead.

    Returns:
        int64 (at most m,), the heaviest first, ties to the more frequent, then the smaller key:
        `top` where all keys have as many users.

    Sparck Jones, A Statistical Interpretation of Term Specificity, 1972.
    """
    table, clients = context.known_users()
    return _by_tf_idf(context, table.of(context.counts.keys), clients)


def tf_idf_by(users: Array, clients: int) -> Choice:
    """Returns `tf_idf` with a table that all clients share, such as one from public data.

    Args:
        users: (K,), how many clients have each key.
        clients: N.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 4), np.array([0, 0, 0, 2, 3]))
    >>> choose = tf_idf_by(np.array([100, 9, 1, 50]), clients=100)
    >>> choose(KeyContext(counts, 2, np.random.default_rng(0))).tolist()  # everybody uses word 0
    [2, 3]
    """
    return lambda context: _by_tf_idf(context, users[context.counts.keys], clients)


def _by_tf_idf(context: KeyContext, users: Array, clients: int) -> KeyArray:
    own = context.counts
    weight = own.counts * np.log(clients / np.clip(users, 1, clients))
    return own.keys[np.lexsort((-own.counts, -weight))[: context.max_keys]]


@needs("norms")
def importance(context: KeyContext) -> KeyArray:
    """Chooses the keys whose rows moved most when they last moved: by the norm of the last update.

    The norms are those of the server's step, the same for all clients. A client whose data name
    keys chooses among its own, those that have not moved last, the more frequent first. Where data
    name none, as with neurons, it chooses among all keys and fills up with random ones. Rows that
    are never chosen never move: `with_negatives(importance, 0.2)` gives others a chance.

    Returns:
        int64 (at most m,).

    >>> from keyhole import KeySpace
    >>> from keyhole.keys import KeyTable
    >>> neurons = KeyCounts.none(KeySpace("neuron", 9))
    >>> norms = KeyTable(np.array([2, 5, 6]), np.array([0.1, 0.9, 0.5]))
    >>> importance(KeyContext(neurons, 2, np.random.default_rng(0), norms=norms)).tolist()
    [5, 6]
    """
    own, norms, m = context.counts, context.known_norms(), context.max_keys
    if len(own.keys):
        return own.keys[np.lexsort((-own.counts, -norms.of(own.keys)))[:m]]
    moved = norms.keys[np.argsort(-norms.values, kind="stable")[:m]]
    others = _draw_others(context.space.num_keys, moved, m - len(moved), context.rng)
    return np.concatenate([moved, others])


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


def num_negatives(max_keys: int, share: float) -> int:
    """How many of m keys are drawn at random."""
    return round(share * max_keys)


def check_share(share: float) -> None:
    """Raises InputError unless there is room for own keys."""
    if not 0 <= share < 1:
        raise InputError(
            f"share of random keys is out of range: got {share}; expected at least 0, below 1; "
            "leave room for the client's own keys"
        )


def always(first: Sequence[int], choice: Choice) -> Choice:
    """Returns a choice in which some keys come first at every client, such as the special words.

    They count towards `max_keys`; a client that may hold fewer gets the first of them.

    Args:
        first: the keys that all clients hold, each once, in order.
        choice: picks the rest; it does not see `first` among the client's own keys. It is asked for
            m keys, of which the first that are not in `first` fill up what is left.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([1, 1, 1, 9, 9, 5]))
    >>> always([0, 1], top)(KeyContext(counts, 3, np.random.default_rng(0))).tolist()
    [0, 1, 9]
    """

    @needs(*facts_of(choice))
    def choose(context: KeyContext) -> KeyArray:
        counts, given = context.counts, context.space.keys(first).array
        is_other = ~np.isin(counts.keys, given)
        others = KeyCounts(counts.space, counts.keys[is_other], counts.counts[is_other])
        chosen = choice(replace(context, counts=others))
        rest = chosen[~np.isin(chosen, given)]
        return np.concatenate([given, rest])[: context.max_keys]

    return choose


def with_negatives(choice: Choice, share: float) -> Choice:
    """Returns a choice of own keys followed by random others, for a sampled softmax.

    Where a client selects outputs too, its softmax runs over its own words only and never learns
    that other words are wrong (end of section 4.1.1). Random others stand for the words that
    were not chosen; `sampled_correction` says for how many each.

    Args:
        choice: picks the m - round(share m) keys that come first.
        share: which share of m are others, at least 0 and below 1. They are drawn uniformly and
            without replacement from all keys that `choice` did not pick.

    Raises:
        InputError: the share is out of range.

    >>> from keyhole import KeySpace
    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([1, 1, 1, 9, 9, 5]))
    >>> with_negatives(top, 0.5)(KeyContext(counts, 4, np.random.default_rng(0))).tolist()
    [1, 9, 85, 64]
    """
    check_share(share)

    @needs(*facts_of(choice))
    def choose(context: KeyContext) -> KeyArray:
        sampled = num_negatives(context.max_keys, share)
        chosen = choice(replace(context, max_keys=context.max_keys - sampled))
        others = _draw_others(context.space.num_keys, chosen, sampled, context.rng)
        return np.concatenate([chosen, others])

    return choose


def _draw_others(num_keys: int, taken: KeyArray, count: int, rng: np.random.Generator) -> KeyArray:
    """Keys that are not `taken`, drawn by their rank among those: no list of all keys is made."""
    ranks = draw_distinct(num_keys - len(taken), count, rng)
    # The i-th taken key, in rising order, has `key - i` free keys below it.
    free_below = np.sort(taken) - np.arange(len(taken))
    return ranks + np.searchsorted(free_below, ranks, side="right")


CHOICES: dict[str, Choice] = {
    "top": top,
    "random": random_own,
    "random-top": random_top,
    "independent": independent,
    "all": every,
    "rolling": rolling,
    "nested": nested,
    "importance": importance,
    "tf-idf": tf_idf,
}
"""Ways to choose keys that need no settings: the paper's sections 5.2 and 5.3, and others'."""


OF_OWN_KEYS: tuple[Choice, ...] = (top, random_own, random_top, tf_idf)
"""Those that choose among the keys in a client's data, and choose none where data name none."""


CHOICE = PartKind("choice of keys", "own-keys", takes=("context",))


def choice_named(name: str) -> Choice:
    """Returns the choice of that name, or your own that "module:NAME" names.

    Args:
        name: a key of `CHOICES`, in any case.

    Raises:
        InputError: there is no such choice, or what is named is none.

    >>> choice_named("Random-Top").__name__
    'random_top'
    """
    return pick(CHOICE, name, CHOICES)
