"""The device in JavaScript chooses the keys and makes the update that Python makes of its posts."""

import numpy as np
import pytest

from keyhole.data.readers.json_files import split_words
from keyhole.experiments.so_tag import SO_TAG, Bags, _localize
from keyhole.experiments.specs import DEFAULTS
from keyhole.keys.choice import KeyContext, KeyCounts
from keyhole.keys.structured import top
from keyhole.models.logistic import sparse_scores, sparse_sgd
from keyhole.primitives.keyspace import KeySpace
from keyhole.rounds.evaluate import recall_at
from tests.web.node import Node, needs_node
from tests.web.posts import columns_of

pytestmark = needs_node

WORDS, TAGS, COUNT = 60, 7, 12
SPEC = {"words": WORDS, "tags": TAGS, "count": COUNT, "isAll": False}


@pytest.fixture(scope="module")
def node():
    with Node() as process:
        yield process


def some_posts(seed, count=30):
    """Posts with repeats, and with words and tags that the model does not have."""
    rng = np.random.default_rng(seed)
    return [
        {
            "words": rng.zipf(1.3, rng.integers(1, 30)).clip(1, 2 * WORDS).tolist(),
            "tags": rng.integers(0, 2 * TAGS, rng.integers(0, 4)).tolist(),
        }
        for _ in range(count)
    ]


def bags_of(posts):
    return Bags.of(columns_of(posts), WORDS, TAGS)


def chosen_by_python(posts):
    counts = KeyCounts.of(KeySpace("word", WORDS), bags_of(posts).word)
    return top(KeyContext(counts, COUNT, np.random.default_rng(0)))


@pytest.mark.parametrize("seed", range(3))
def test_words_are_chosen_as_in_python(node, seed):
    posts = some_posts(seed)
    assert node.call("chooseWords", posts, SPEC) == chosen_by_python(posts).tolist()


@pytest.mark.parametrize("seed", range(3))
def test_an_update_is_that_of_python_to_a_millionth(node, seed):
    """Python adds four rows at a time and has an e^x of its own: the two differ by roundings."""
    rng, posts = np.random.default_rng(seed), some_posts(seed)
    keys = chosen_by_python(posts)
    examples = _localize(bags_of(posts), {"word": KeySpace("word", WORDS).keys(keys)})
    own = node.call("localize", posts, SPEC, keys.tolist())
    assert [each["places"] for each in own] == [row[row >= 0].tolist() for row in examples["words"]]
    start = {
        "kernel": rng.standard_normal((COUNT, TAGS)).astype(np.float32),
        "bias": rng.standard_normal(TAGS).astype(np.float32),
    }
    batches = [rng.permutation(30)[:8].tolist() for _ in range(5)]
    update, loss = sparse_sgd(start, examples, np.array(batches), 0.5)
    shown = {"kernel": list(start["kernel"]), "bias": start["bias"]}
    made = node.call("train", shown, own, batches, 0.5)
    np.testing.assert_allclose(np.stack(made["kernel"]), update["kernel"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(made["bias"], update["bias"], rtol=1e-4, atol=1e-6)
    assert made["loss"] == pytest.approx(loss, rel=1e-5)
    scores = sparse_scores(start, examples["words"])
    expected = recall_at(5, scores, *np.nonzero(examples["tags"]))
    assert node.call("recallAt5", shown, own) == pytest.approx(expected)


@pytest.mark.parametrize(("batch", "epochs", "most"), [(4, 2, 100), (100, 1, 7), (3, 3, 9)])
def test_every_epoch_visits_each_example_once(node, batch, epochs, most):
    spec = {"batch": batch, "epochs": epochs, "most": most}
    batches = node.call("drawBatches", 10, spec)
    visits = [example for step in batches for example in step]
    drawn = set(visits)
    assert len(drawn) == min(10, most)
    assert sorted(visits) == sorted(list(drawn) * epochs)
    assert max(map(len, batches)) <= batch


TEXT = "Don\u2019t use C++, C# or node.js (v3.5)! _Stra\xdfe_ \u0130zmir 5\xbd #Node.JS # #c++"


def test_words_of_a_text_are_those_of_python(node):
    assert node.call("splitWords", TEXT) == split_words(TEXT)


def test_a_line_is_a_post_and_its_tags_are_no_words(node):
    names = {"words": ["use", "c++", "node.js"], "tags": ["c#", "node.js", "c++"]}
    found = node.call("readPosts", f"{TEXT}\n \nC++ it is, use it\r\n", names)
    assert found["posts"] == [
        {"words": [0, 1, 2], "tags": [1, 2]},
        {"words": [1, 0], "tags": []},
    ]
    assert (found["words"], found["tagged"]) == (3, 1)


def test_the_task_is_the_one_that_the_library_ships():
    """What clients/web/keyhole/tags.js takes for granted of it."""
    spec = DEFAULTS[SO_TAG.name]
    assert (spec.client.momentum, spec.client.clip_norm) == (0.0, None)
    assert spec.keys["word"].choice == "top"
    assert spec.for_devices()["version"] == 6
