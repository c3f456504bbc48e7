"""Sets up the demo: tag prediction on synthetic posts, with and without select."""

from __future__ import annotations

from dataclasses import replace

from keyhole.data.federated import Dataset
from keyhole.data.synthetic import make_synthetic
from keyhole.experiments.arms import Arm, arm_of
from keyhole.experiments.so_tag import SO_TAG

WORDS, TAGS, USERS, TOPICS = 4000, 100, 600, 20
COHORT = 30


def demo_arms(rounds: int, seed: int) -> dict[str, Arm]:
    """Returns the lines of the comparison by what a client's keys are; no select comes first."""
    settings = replace(
        SO_TAG.settings,
        client_lr=2.0,
        server_lr=0.3,
        cohort=COHORT,
        rounds=rounds,
        evaluate_every=min(2, rounds),  # a demo of one round has a point to draw
    )

    def arm(words: int | None) -> Arm:
        return arm_of(
            "so_tag",
            sizes={"words": WORDS, "tags": TAGS},
            keys_per_client={"word": words},
            settings=settings,
            seed=seed,
        )

    return {
        "no select": arm(None),
        "all own words": arm(WORDS),
        "top 100 words": arm(100),
        "top 30 words": arm(30),
    }


def demo_data(seed: int) -> Dataset:
    """Returns the posts that the demo trains on, made from a seed."""
    return make_synthetic("posts", seed, users=USERS, words=WORDS, tags=TAGS, topics=TOPICS)
