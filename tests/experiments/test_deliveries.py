"""Every delivery trains the same model, bit for bit, and a run says who learned what."""

import pytest

from keyhole import tree
from keyhole.data.open import make_synthetic
from keyhole.delivery import delivery_names
from keyhole.errors import AttestationError, CostlyError, InputError
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import name_of, spec_of
from tests.helpers import assert_trees_equal

WORDS, TAGS, M, COHORT, ROUNDS = 2000, 50, 100, 3, 2  # two servers use buckets from m = 66 on


@pytest.fixture(scope="module")
def posts():
    return make_synthetic("posts", 0, users=12, words=WORDS, tags=TAGS)


def train(posts, delivery, **rest):
    arm = spec_of(
        "so_tag",
        sizes={"words": WORDS, "tags": TAGS},
        keys={"word": {"count": M}},
        rounds=ROUNDS,
        cohort={"size": COHORT},
        delivery=delivery,
        **rest,
    )
    run = Experiment(arm, posts, allow_simulation=True).start(0, None)
    records = list(run.rounds(ROUNDS))
    return run.state.model(), records


@pytest.fixture(scope="module")
def plain(posts):
    return train(posts, "pregenerated")


@pytest.mark.parametrize("delivery", [d for d in delivery_names() if d != "pregenerated"])
def test_every_delivery_trains_the_same_model(posts, plain, delivery):
    model, records = train(posts, delivery)
    assert_trees_equal(model, plain[0])
    assert [r.clients for r in records] == [r.clients for r in plain[1]]
    assert sum(r.unplaced_keys for r in records) == 0
    assert any(leaf.any() for leaf in tree.flatten(model).values())


def test_a_record_says_who_learned_what(plain):
    for record in plain[1]:
        assert record.seen_by["slice server"] == "keys and whose they are"
        assert record.seen_in_sum == {"server": "each update, its keys and whose they are"}


def test_a_private_delivery_hides_keys_from_servers_but_not_from_whoever_adds_updates_up(posts):
    for record in train(posts, "pir")[1]:
        assert set(record.seen_by.values()) == {"who takes part"}
        assert "keys" in record.seen_in_sum["server"]


def arm_with(delivery, m, **rest):
    sizes = {"words": WORDS, "tags": TAGS}
    return spec_of("so_tag", sizes=sizes, keys={"word": {"count": m}}, delivery=delivery, **rest)


def test_a_private_delivery_dearer_than_broadcast_is_refused(posts):
    Experiment(arm_with("pir", M), posts).check_worth()
    with pytest.raises(CostlyError, match="more than the whole model"):
        Experiment(arm_with("pir", 1500), posts).check_worth()


def test_an_enclave_without_hardware_is_refused_before_any_round(posts):
    with pytest.raises(AttestationError, match="simulated"):
        Experiment(arm_with("enclave", M), posts).check()


def test_the_delivery_is_part_of_an_arms_name():
    assert name_of(arm_with("pir", M)).endswith("-pir")
    assert not name_of(arm_with(None, M)).endswith("-pir")


@pytest.mark.parametrize("delivery", ["pir", "pir-one-server"])
def test_popular_keys_are_trained_and_others_counted(posts, plain, delivery):
    """All words are popular but those that no client of these has: nothing is dropped. Few are:
    what is dropped is in the record, and the model is another."""
    most, few = f"{WORDS - 100}", "150"
    model, records = train(posts, delivery, popular={"keys": {"word": most}})
    assert_trees_equal(model, plain[0])
    assert sum(r.unplaced_keys for r in records) == 0
    model, records = train(posts, delivery, popular={"keys": {"word": few}, "share": 0.9})
    assert all(r.unplaced_keys > 0 for r in records)
    assert all(set(r.seen_by.values()) == {"who takes part"} for r in records)
    leaves, others = tree.flatten(model).values(), tree.flatten(plain[0]).values()
    assert any((a != b).any() for a, b in zip(leaves, others, strict=True))


@pytest.mark.parametrize(
    ("delivery", "keys", "error"),
    [
        ("pregenerated", {"word": "200"}, "has no table of popular keys"),
        ("pir", {"tag": "200"}, "no table is asked"),
        ("pir", {"word": "1-"}, "popular keys that cannot be used"),
        ("pir", {"word": str(WORDS)}, "popular keys that cannot be used"),
        ("pir", {"word": str(M)}, "popular keys that cannot be used"),
    ],
)
def test_popular_keys_that_make_no_sense_are_refused_before_any_round(posts, delivery, keys, error):
    with pytest.raises(InputError, match=error):
        Experiment(arm_with(delivery, M, popular={"keys": keys}), posts).check()
