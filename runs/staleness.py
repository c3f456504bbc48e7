"""Accuracy against staleness: what old slices do to training (an open question of the paper).

The demo task, 30 updates a step, 60 steps, with more and more clients at work at once: the more
there are, the older an update is when it counts. Prints a table for docs/experiments.md.

    python runs/staleness.py
"""

import numpy as np

from keyhole.tasks.demo import ARMS, COHORT, accuracy, make_users, start_arm
from keyhole.training.buffering import Buffering, fade

STEPS, SEEDS = 60, range(3)
ARM = ARMS[2]


def slow(rng):
    return rng.exponential()


def never_fade(_):
    return 1.0


def run(concurrency, weight, seed, users):
    buffering = Buffering(concurrency, COHORT, 10_000, weight, slow) if concurrency else None
    made = start_arm(ARM, users, seed, buffering)
    records = list(made.rounds(STEPS))
    ages = [age for record in records[STEPS // 2 :] for age in record.staleness]
    return accuracy(made.state, users), np.mean(ages)


def main():
    print(
        f"{ARM.name}, {COHORT} updates a step, {STEPS} steps, seeds {SEEDS.start}..{SEEDS.stop - 1}"
    )
    print("| clients at work | mean staleness | old updates fade | all count alike |")
    print("|---|---|---|---|")
    worlds = {seed: make_users(seed) for seed in SEEDS}
    for concurrency in (0, 30, 60, 120, 240, 480):
        cells = []
        for weight in (fade, never_fade):
            results = [run(concurrency, weight, seed, users) for seed, users in worlds.items()]
            accuracies, ages = zip(*results, strict=True)
            cells.append(f"{np.mean(accuracies):.1%} ± {np.std(accuracies):.1%}")
        name = concurrency or "synchronous"
        print(f"| {name} | {np.mean(ages):.1f} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
