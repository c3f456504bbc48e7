"""Why Random catches up with Top: the choice of keys when each client draws only once.

Tag prediction on the small real data, n = 10,000 and m = 100, as in tag_keys.sh. "Random, once"
is Random with one draw for each client, kept for all its rounds, as Top keeps its words. Reads
stackexchange in the folder KEYHOLE_DATA. Prints a table for docs/experiments.md.

    python runs/random_once.py
"""

from dataclasses import replace

import numpy as np

from keyhole.data import open_dataset
from keyhole.keys import random_own, top
from keyhole.keys.choice import choose_with
from keyhole.tasks.experiment import Experiment
from keyhole.tasks.sweeps import sweep_named
from keyhole.training.loop import Evaluation, start_run
from keyhole.training.randomness import generator

TRIALS, SHOWN = range(2), (50, 100, 150, 200)


def random_once(counts, keys_per_client, rng):
    """Random of the client's own keys, the same ones every time."""
    return random_own(counts, keys_per_client, generator(0, int(counts.keys.sum())))


def curve(experiment, choice, trial):
    choose = choose_with({"word": choice}, experiment.task.count_keys)
    clients = replace(experiment.clients, choose=choose)
    run = start_run(experiment.start(trial, None).state, clients, experiment.plan(trial))
    evaluation = Evaluation(experiment.task.metrics["validation"], every=50)
    return [
        record.metrics["recall_at_5"]
        for record in run.rounds(max(SHOWN), evaluation=evaluation)
        if record.metrics
    ]


def main():
    lines = sweep_named("tag-keys", "small").lines
    (arm,) = [line.arm for line in lines if (line.panel, line.label) == (lines[0].panel, "Top")]
    experiment = Experiment(arm, open_dataset("stackexchange"))
    print(f"{arm.name}, validation recall@5, trials {TRIALS.start}..{TRIALS.stop - 1}")
    print(f"| keys | {' | '.join(f'round {t}' for t in SHOWN)} |")
    print("|---" * (1 + len(SHOWN)) + "|")
    for name, choice in {"Top": top, "Random": random_own, "Random, once": random_once}.items():
        curves = np.array([curve(experiment, choice, trial) for trial in TRIALS])
        print(f"| {name} | {' | '.join(f'{value:.1%}' for value in curves.mean(0))} |", flush=True)


if __name__ == "__main__":
    main()
