"""Makes posts from a seed: topics with words and tags of their own, few topics a user.

The world is drawn first: Zipf words that everybody uses, words and tags of each topic, words of
each tag, and which word likes to follow which. Then each user draws from a stream of its own: one
to three topics, a heavy-tailed number of posts, and for every post a topic, tags and words. A word
follows the one before it, or it is a common one, one of the topic or one of the post's first tag.
What tells tags apart is rare: most of it lies beyond the words that all topics share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.data.federated import Dataset, FederatedData, Ragged
from keyhole.data.synthetic import FACTS, DataStream, check_sizes, stream

MIN_POSTS, MAX_POSTS, POSTS_TAIL = 10, 100, 1.1  # Pareto: the share above x falls as x^-tail
MAX_TOPICS = 3  # of a user
MAX_TAGS = 5  # of a post
POST, SENTENCE, TITLE = (20, 80), (5, 20), (3, 8)  # fewest and most words

COMMON_OFFSET = 3.0  # flattens the head of Zipf's law
SHARED = 50  # the most common words belong to no topic
OWN_OF_TOPIC, OWN_OF_TAG = 25, 100  # a topic owns this part of all words, a tag that part
OWN_OFFSET = 4.0

FOLLOWS = 0.4  # how often a word follows from the one before it
FOLLOWERS = (0.6, 0.85, 1.0)  # which of the words that may follow does: distribution function
FOLLOWED = 1024  # words with followers of their own; rarer ones share them
TEXT_KINDS = (0.65, 0.83, 1.0)  # common, of the topic, of the tag: distribution function
TITLE_KINDS = (0.3, 0.6, 1.0)

CHUNK = 250  # users at a time, which bounds memory

# Uniform numbers of a user: number of topics, number of posts, the topics.
_USER_NUMBERS = 2 + MAX_TOPICS
# Of a post: topic, number of tags, of words, of title words; then tags, sentences and words.
_MAX_SENTENCES = POST[1] // SENTENCE[0]
_SECTIONS = np.cumsum([4, MAX_TAGS, _MAX_SENTENCES, 3 * POST[1], 3 * TITLE[1]])


@dataclass(frozen=True, eq=False)
class _World:
    """What all users have in common; words and tags have the numbers they were made with."""

    common_ends: Array
    own: tuple[Array, Array]  # words of each topic (topics, a), of each tag (tags, b)
    own_ends: tuple[Array, Array]
    followers: Array  # (topics, FOLLOWED, followers)
    tags: int

    @property
    def topics(self) -> int:
        return len(self.followers)


@dataclass(frozen=True, eq=False)
class _Chunk:
    """The posts of some users, and how many of these users use each word and tag."""

    counts: Array
    columns: Mapping[str, Ragged]
    users_of: Mapping[str, Array]


def make_posts(
    seed: int, *, users: int = 1000, words: int = 10_000, tags: int = 500, topics: int = 50
) -> Dataset:
    """Returns posts with tags, a function of the arguments alone.

    Of ten users in a row eight are in "train", one in "validation" and one in "test", so test posts
    are by people that training has not seen. The names of the words and tags of user i do not
    depend on `users`. Their numbers do, since they rank by number of users over all splits (titles
    count; ties go to what the world made first); what nobody uses comes last.

    Args:
        users: in all splits, 10 or more.
        words: size of the vocabulary, 200 or more.
        tags: `topics` or more; tag t belongs to topic t mod `topics`.
        topics: 3 or more.

    >>> data = make_posts(7, users=20, words=500, tags=40, topics=8)
    >>> {name: len(split) for name, split in data.splits.items()}
    {'train': 16, 'validation': 2, 'test': 2}
    >>> " ".join(data.names["words"][w] for w in data.splits["train"].client(0)["title"][0])
    'vipi nupi lipu wape kupe bipe pepa'
    """
    check_sizes(seed=(seed, 0), users=(users, 10), words=(words, 200))
    check_sizes(topics=(topics, 3), tags=(tags, topics))
    world = _make_world(seed, words, tags, topics)
    chunks = []
    for first in range(0, users, CHUNK):
        some = range(first, min(first + CHUNK, users))
        chunks.append(_write(world, [stream(seed, DataStream.POSTS_USER, i) for i in some]))
    made = {"words": _word_names(words), "tags": [f"tag{t}" for t in range(tags)]}
    orders = {
        name: np.argsort(-sum(chunk.users_of[name] for chunk in chunks), kind="stable")
        for name in made
    }
    data = FederatedData.of(
        [f"user{i}" for i in range(users)],
        np.concatenate([chunk.counts for chunk in chunks]),
        _join_columns(chunks, orders),
    )
    names = {name: [made[name][i] for i in order] for name, order in orders.items()}
    return Dataset("synthetic", "posts", _split(data), names, FACTS)


def _split(data: FederatedData) -> dict[str, FederatedData]:
    """By user and not by number of users, so that nobody changes sides when there are more."""
    turn = np.arange(len(data)) % 10
    parts = {"train": turn < 8, "validation": turn == 8, "test": turn == 9}
    return {name: data.subset(np.flatnonzero(is_in)) for name, is_in in parts.items()}


def _join_columns(chunks: Sequence[_Chunk], orders: Mapping[str, Array]) -> dict[str, Ragged]:
    """All posts, words and tags numbered by their place in the order."""
    numbers = {name: np.argsort(order) for name, order in orders.items()}  # the inverse
    numbers["title"] = numbers["words"]
    columns = {}
    for name in ("words", "title", "tags", "sentences"):
        values = np.concatenate([chunk.columns[name].values for chunk in chunks])
        lengths = np.concatenate([chunk.columns[name].lengths for chunk in chunks])
        columns[name] = _ragged(numbers[name][values] if name in numbers else values, lengths)
    return columns


def _make_world(seed: int, words: int, tags: int, topics: int) -> _World:
    """Draws what users have in common."""
    rng = stream(seed, DataStream.POSTS_WORLD)
    common_ends = _zipf_ends(words, COMMON_OFFSET)
    sizes = max(8, words // OWN_OF_TOPIC), max(8, words // OWN_OF_TAG)
    own = (
        SHARED + _below(_skew(rng.random((topics, sizes[0]))), words - SHARED),
        SHARED + _below(rng.random((tags, sizes[1])), words - SHARED),
    )
    own_ends = _zipf_ends(sizes[0], OWN_OFFSET), _zipf_ends(sizes[1], OWN_OFFSET)
    # The likeliest follower is the same in all topics and a common word, as in "of the"; the others
    # are words of the topic.
    shared = _rank(common_ends, rng.random((1, FOLLOWED, 1)))
    ranks = _rank(own_ends[0], rng.random((topics, FOLLOWED, len(FOLLOWERS) - 1)))
    topical = own[0][np.arange(topics)[:, None, None], ranks]
    shared = np.broadcast_to(shared, (topics, FOLLOWED, 1))
    return _World(common_ends, own, own_ends, np.concatenate([shared, topical], axis=2), tags)


def _write(world: _World, streams: Sequence[np.random.Generator]) -> _Chunk:
    """The posts of some users. Each draws its own numbers; what follows is done for all at once."""
    of_user = np.stack([rng.random(_USER_NUMBERS) for rng in streams])
    counts = _count_posts(of_user[:, 1])
    of_post = np.concatenate(
        [rng.random((n, _SECTIONS[-1])) for rng, n in zip(streams, counts, strict=True)]
    )
    user = np.repeat(np.arange(len(streams)), counts)
    single, tag, sentence, text, title = np.split(of_post, _SECTIONS[:-1], axis=1)
    topic = _choose_topic(world, of_user[user], single[:, 0])
    tags = _choose_tags(world, topic, tag, 1 + _below(single[:, 1], MAX_TAGS))
    sentences = _cut(sentence, _between(single[:, 2], POST))
    words = _say(world, topic, tags.values[tags.offsets[:-1]], text, TEXT_KINDS)
    words = _chain(world, topic, words, text, sentences)
    titles = _say(world, topic, tags.values[tags.offsets[:-1]], title, TITLE_KINDS)
    columns = {
        "words": _ragged_of(words, sentences.sum(axis=1)),
        "title": _ragged_of(titles, _between(single[:, 3], TITLE)),
        "tags": tags,
        "sentences": _ragged(sentences[sentences > 0], (sentences > 0).sum(axis=1)),
    }
    seen = {
        "words": _count_users(user, (columns["words"], columns["title"]), len(world.common_ends)),
        "tags": _count_users(user, (tags,), world.tags),
    }
    return _Chunk(counts, columns, seen)


def _count_posts(u: Array) -> Array:
    """Heavy-tailed: many users with few posts, few with many."""
    posts = MIN_POSTS * (1.0 - u) ** (-1.0 / POSTS_TAIL)
    return np.minimum(posts, MAX_POSTS).astype(np.int64)


def _choose_topic(world: _World, of_user: Array, u: Array) -> Array:
    """One of the user's topics for each post, the first more often than the others."""
    number = 1 + _below(of_user[:, 0], MAX_TOPICS)
    which = _below(_skew(u), number)
    chosen = np.take_along_axis(of_user[:, 2:], which[:, None], axis=1)[:, 0]
    return _below(_skew(chosen), world.topics)


def _choose_tags(world: _World, topic: Array, u: Array, number: Array) -> Ragged:
    """Up to `number` tags of the topic for each post, the topic's first more often than its last.

    A tag that is drawn twice counts once.
    """
    of_topic = (world.tags - 1 - topic) // world.topics + 1
    tags = topic[:, None] + world.topics * _below(_skew(u), of_topic[:, None])
    is_new = np.arange(MAX_TAGS) < number[:, None]
    for i in range(1, MAX_TAGS):
        is_new[:, i] &= (tags[:, :i] != tags[:, i : i + 1]).all(axis=1)
    return _ragged(tags[is_new], is_new.sum(axis=1))


def _cut(u: Array, words: Array) -> Array:
    """Lengths of the sentences that add up to `words`, 0 where there are no more."""
    ends = np.minimum(np.cumsum(_between(u, SENTENCE), axis=1), words[:, None])
    return np.diff(ends, axis=1, prepend=0)


def _say(world: _World, topic: Array, tag: Array, u: Array, kinds: Sequence[float]) -> Array:
    """Words that follow from none before them, (posts, most words).

    Args:
        u: three numbers for each word; the first is the chain's.
        kinds: distribution function of common words, words of the topic and words of the tag.
    """
    kind = np.searchsorted(kinds, u[:, 1::3], side="right")
    words = _rank(world.common_ends, u[:, 2::3])
    for i, owner in enumerate((topic, tag)):
        post, at = np.nonzero(kind == i + 1)
        words[post, at] = world.own[i][owner[post], _rank(world.own_ends[i], u[post, 3 * at + 2])]
    return words


def _chain(world: _World, topic: Array, words: Array, u: Array, sentences: Array) -> Array:
    """Lets some words follow from the one before them, but none across the end of a sentence."""
    u = u[:, ::3]
    follower = np.searchsorted(np.multiply(FOLLOWERS, FOLLOWS), u, side="right")
    follows = follower < len(FOLLOWERS)
    ends = np.cumsum(sentences, axis=1)
    post, at = np.nonzero(ends < POST[1])
    follows[post, ends[post, at]] = False
    words = words.copy()
    for i in range(1, POST[1]):
        post = np.flatnonzero(follows[:, i])
        before = words[post, i - 1] % FOLLOWED
        words[post, i] = world.followers[topic[post], before, follower[post, i]]
    return words


def _count_users(user: Array, columns: Sequence[Ragged], count: int) -> Array:
    """By how many users each number is used, int64 (count,)."""
    is_used = np.zeros((user[-1] + 1, count), bool)
    for column in columns:
        is_used[user[column.row_numbers], column.flat] = True
    return np.asarray(is_used.sum(axis=0), np.int64)


def _word_names(count: int) -> list[str]:
    """Made-up words of two syllables or more."""
    syllables = [a + b for a in "ptkbdgmnlrsvfzhjw" for b in "aeiou"]
    base = len(syllables)
    names = []
    for i in range(count):
        name = syllables[i % base] + syllables[i // base % base]
        while (i := i // base) >= base:
            name += syllables[i // base % base]
        names.append(name)
    return names


def _zipf_ends(count: int, offset: float) -> Array:
    """The distribution function of ranks r = 0..count - 1 that are as likely as 1 / (r + offset).

    >>> _zipf_ends(3, offset=1.0).round(3).tolist()
    [0.545, 0.818, 1.0]
    """
    ends: Array = np.cumsum((np.arange(count) + offset) ** -1.0)
    ends /= ends[-1]
    return ends


def _rank(ends: Array, u: Array) -> Array:
    """The ranks that numbers uniform in [0, 1) stand for."""
    return np.searchsorted(ends, u, side="right")


def _skew(u: Array) -> Array:
    """Moves uniform numbers towards 0: half of them are below a quarter."""
    return u * u


def _below(u: Array, count: int | Array) -> Array:
    """Whole numbers from 0 to count - 1."""
    return (u * count).astype(np.int64)


def _between(u: Array, bounds: tuple[int, int]) -> Array:
    """Whole numbers between two bounds, both included."""
    return bounds[0] + _below(u, bounds[1] - bounds[0] + 1)


def _ragged(values: Array, lengths: Array) -> Ragged:
    """Rows of these lengths, int32."""
    return Ragged(values.astype(np.int32), np.concatenate([[0], np.cumsum(lengths)]))


def _ragged_of(matrix: Array, lengths: Array) -> Ragged:
    """The first values of each row of a matrix."""
    return _ragged(matrix[np.arange(matrix.shape[1]) < lengths[:, None]], lengths)
