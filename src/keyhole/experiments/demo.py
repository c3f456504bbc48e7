"""Sets up the demo: tag prediction on synthetic posts, with and without select."""

from __future__ import annotations

from keyhole.data.federated import Dataset
from keyhole.data.open import make_synthetic
from keyhole.experiments.specs import spec_of
from keyhole.rounds.spec import RunSpec

WORDS, TAGS, USERS, TOPICS = 4000, 100, 600, 20
COHORT = 30


def demo_arms(rounds: int, seed: int) -> dict[str, RunSpec]:
    """Returns the lines of the comparison by what a client's keys are; no select comes first."""

    def arm(words: int | None) -> RunSpec:
        return spec_of(
            "so_tag",
            sizes={"words": WORDS, "tags": TAGS},
            keys={"word": {"count": words}},
            client={"lr": 2.0},
            server={"lr": 0.3},
            cohort={"size": COHORT},
            rounds=rounds,
            evaluate_every=min(2, rounds),  # a demo of one round has a point to draw
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
