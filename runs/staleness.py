"""Recall against staleness: what old slices do to training (an open question of the paper).

The demo's posts and 100 keys a client, 30 updates a step, 60 steps, with more and more clients at
work at once: the more there are, the older an update is when it counts. Prints a table for
docs/experiments.md.

    python runs/staleness.py
"""

from dataclasses import replace

import numpy as np

from keyhole.experiments.experiment import Experiment
from keyhole.experiments.sweeps import DEMO_COHORT, demo_arms, demo_data
from keyhole.rounds.loop import start_run
from keyhole.rounds.machine import Buffering, fade

STEPS, SEEDS = 60, range(3)
ARM = "top 100 words"


def slow(rng):
    return rng.exponential()


def never_fade(_):
    return 1.0


def run(concurrency, weight, experiment):
    buffering = Buffering(concurrency, DEMO_COHORT, 10_000, weight, slow) if concurrency else None
    plan = replace(experiment.run_parts(0), buffering=buffering)
    made = start_run(experiment.start(0, None).state, experiment.clients, plan)
    records = list(made.rounds(STEPS))
    ages = [age for record in records[STEPS // 2 :] for age in record.staleness]
    return experiment.task.metrics["test"](made.state)["recall_at_5"], np.mean(ages)


def main():
    print(
        f"{ARM}, {DEMO_COHORT} updates a step, {STEPS} steps, seeds {SEEDS.start}..{SEEDS.stop - 1}"
    )
    print("| clients at work | mean staleness | old updates fade | all count alike |")
    print("|---|---|---|---|")
    arms = [Experiment(demo_arms(STEPS, seed)[ARM], demo_data(seed)) for seed in SEEDS]
    for concurrency in (0, 30, 60, 120, 240, 480):
        cells = []
        for weight in (fade, never_fade):
            results = [run(concurrency, weight, arm) for arm in arms]
            recalls, ages = zip(*results, strict=True)
            cells.append(f"{np.mean(recalls):.1%} ± {np.std(recalls):.1%}")
        name = concurrency or "synchronous"
        print(f"| {name} | {np.mean(ages):.1f} | {cells[0]} | {cells[1]} |", flush=True)


if __name__ == "__main__":
    main()
