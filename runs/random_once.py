"""Why Random catches up with Top: the choice of keys when each client draws only once.

Tag prediction on the small real data, n = 10,000 and m = 100, as in tag_keys.sh. "Random, once"
is Random with one draw for each client, kept for all its rounds, as Top keeps its words. Reads
stackexchange in the folder KEYHOLE_DATA. Prints a table for docs/experiments.md.

    python runs/random_once.py
"""

import numpy as np

from keyhole.data.open import open_dataset
from keyhole.experiments.experiment import Experiment
from keyhole.experiments.specs import name_of
from keyhole.experiments.sweeps import sweep_named
from keyhole.keys.structured import random_own, top
from keyhole.sampling import generator

ARM = "so_tag-top100-words"
TRIALS, SHOWN = range(2), (50, 100, 150, 200)


def random_once(counts, keys_per_client, rng):
    """Random of the client's own keys, the same ones every time."""
    return random_own(counts, keys_per_client, generator(0, int(counts.keys.sum())))


def curve(experiment, trial):
    records = []
    experiment.run(trial, on_round=records.append)
    return [records[t - 1].metrics["recall_at_5"] for t in SHOWN]


def main():
    lines = sweep_named("tag-keys", "small").lines
    (spec,) = [line.spec for line in lines if name_of(line.spec) == ARM]
    dataset = open_dataset("stackexchange")
    print(f"{ARM}, validation recall@5, trials {TRIALS.start}..{TRIALS.stop - 1}")
    print(f"| keys | {' | '.join(f'round {t}' for t in SHOWN)} |")
    print("|---" * (1 + len(SHOWN)) + "|")
    for name, choice in {"Top": top, "Random": random_own, "Random, once": random_once}.items():
        experiment = Experiment(spec, dataset, parts={"keys.word.choice": choice})
        means = np.mean([curve(experiment, trial) for trial in TRIALS], axis=0)
        print(f"| {name} | {' | '.join(f'{value:.1%}' for value in means)} |", flush=True)


if __name__ == "__main__":
    main()
