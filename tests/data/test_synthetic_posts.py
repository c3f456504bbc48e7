"""Laws of the synthetic posts: ranks by users, topics that can be told, words that follow."""

import numpy as np
import pytest

from keyhole.data.posts import _word_names, make_posts

TOPICS = 20


@pytest.fixture(scope="module")
def data():
    return make_posts(3, users=200, words=5000, tags=200, topics=TOPICS)


def everybody(data):
    return [part.client(i) for part in data.splits.values() for i in range(len(part))]


def topic_of(data, tags):
    """The topic of each post: tags are named by their number in the world, t mod topics."""
    first = tags.values[tags.offsets[:-1]]
    return np.array([int(data.names["tags"][t].removeprefix("tag")) % TOPICS for t in first])


def count_users(clients, columns, count):
    users = np.zeros(count, np.int64)
    for client in clients:
        users[np.unique(np.concatenate([client[name].flat for name in columns]))] += 1
    return users


@pytest.mark.parametrize(("names", "columns"), [("words", ("words", "title")), ("tags", ("tags",))])
def test_numbers_rank_by_users(data, names, columns):
    users = count_users(everybody(data), columns, len(data.names[names]))
    assert np.all(np.diff(users) <= 0)
    assert users[0] > users[-1]
    assert len(set(data.names[names])) == len(users)


def test_columns_keep_the_contract(data):
    posts = data.splits["train"].columns
    assert sorted(posts) == ["sentences", "tags", "title", "words"]
    assert {column.values.dtype for column in posts.values()} == {np.dtype(np.int32)}
    assert {column.offsets.dtype for column in posts.values()} == {np.dtype(np.int64)}
    assert len({len(column) for column in posts.values()}) == 1
    assert posts["words"].lengths.min() >= 20
    assert posts["words"].lengths.max() <= 80
    assert posts["title"].lengths.min() >= 3
    assert posts["tags"].lengths.min() >= 1
    assert posts["tags"].lengths.max() <= 5


def test_sentences_add_up_to_the_post(data):
    posts = data.splits["train"].columns
    sums = np.add.reduceat(posts["sentences"].values, posts["sentences"].offsets[:-1])
    assert np.array_equal(sums, posts["words"].lengths)
    assert posts["sentences"].values.min() >= 1
    assert posts["sentences"].values.max() <= 20


def test_splits_are_by_user(data):
    ids = [set(part.client_ids) for part in data.splits.values()]
    assert [len(part) for part in ids] == [160, 20, 20]
    assert len(set.union(*ids)) == 200


def test_tags_of_a_post_differ_and_share_a_topic(data):
    tags = data.splits["train"].columns["tags"]
    topic = topic_of(data, tags)
    for row in range(0, len(tags), 7):
        made = [int(data.names["tags"][t].removeprefix("tag")) for t in tags[row]]
        assert len(set(made)) == len(made)
        assert {t % TOPICS for t in made} == {topic[row]}


def test_users_have_few_topics_and_very_unequal_numbers_of_posts(data):
    topics = [len(np.unique(topic_of(data, client["tags"]))) for client in everybody(data)]
    assert set(topics) == {1, 2, 3}
    counts = data.splits["train"].counts
    assert counts.min() >= 10
    assert counts.max() == 100
    assert counts.mean() > 1.3 * np.median(counts)  # a tail: the mean lies far above the middle


def test_common_words_are_zipf_like(data):
    """The tenth word is several times as frequent as the hundredth, that as the thousandth."""
    counts = np.bincount(data.splits["train"].columns["words"].values)
    ordered = np.sort(counts)[::-1]
    assert ordered[9] > 3 * ordered[99] > 6 * ordered[999]
    assert (
        ordered[0] < 0.1 * counts.sum()
    )  # no word is so common that naming it always is an answer


def guess_topics(data, first, last):
    """How often words first..last of unseen users' posts tell the topic, by naive Bayes."""
    train, test = data.splits["train"], data.splits["test"]
    counts = np.ones((TOPICS, last - first))
    for i in range(len(train)):
        add_words(counts, *tell(data, train.client(i)), first)
    log_odds = np.log(counts / counts.sum(axis=1, keepdims=True))
    hits = []
    for i in range(len(test)):
        topic, words = tell(data, test.client(i))
        seen = np.zeros((len(topic), last - first))
        add_words(seen, np.arange(len(topic)), words, first)
        hits.append((seen @ log_odds.T).argmax(axis=1) == topic)
    return np.concatenate(hits).mean()


def tell(data, client):
    return topic_of(data, client["tags"]), client["words"]


def add_words(table, rows, words, first):
    row, word = rows[words.row_numbers], words.flat - first
    is_in = (word >= 0) & (word < table.shape[1])
    np.add.at(table, (row[is_in], word[is_in]), 1)


def test_rare_words_tell_topics_and_common_ones_do_not(data):
    """So a larger vocabulary helps, and a client's choice of words matters."""
    common, rare, all_words = (
        guess_topics(data, *bounds) for bounds in ((0, 50), (1000, 5000), (0, 5000))
    )
    assert common < 0.5 < rare < all_words


def test_a_word_tells_the_next_one(data):
    """Always naming the likeliest follower beats always naming the most common word fourfold."""
    posts = data.splits["train"].columns["words"].values[:100_000]
    before, after = posts[:-1], posts[1:]
    pair, counts = np.unique(before.astype(np.int64) * 5000 + after, return_counts=True)
    order = np.argsort(counts, kind="stable")
    follower = np.zeros(5000, np.int64)
    follower[pair[order] // 5000] = pair[order] % 5000  # the largest count is written last
    unseen = data.splits["train"].columns["words"].values[100_000:]
    hits = np.mean(follower[unseen[:-1]] == unseen[1:])
    assert hits > 4 * np.mean(unseen == np.bincount(posts).argmax())


def test_a_users_own_words_are_several_hundred():
    """At the default sizes, so that 100 and 300 keys are fewer than a client could use."""
    data = make_posts(3, users=100)
    own = [len(np.unique(client["words"].flat)) for client in everybody(data)]
    assert min(own) > 200
    assert np.median(own) > 400
    assert max(own) > 1000


@pytest.mark.parametrize("sizes", [{"words": 100_000}, {"words": 200}, {"tags": 53}])
def test_other_sizes_work_too(sizes):
    data = make_posts(3, users=10, **sizes)
    words, tags = sizes.get("words", 10_000), sizes.get("tags", 500)
    assert (len(data.names["words"]), len(data.names["tags"])) == (words, tags)
    assert max(client["words"].flat.max() for client in everybody(data)) < words
    assert max(client["tags"].flat.max() for client in everybody(data)) < tags


def test_names_of_words_differ():
    names = _word_names(30_000)
    assert len(set(names)) == 30_000
    assert all(len(name) in (4, 6) for name in names)
