"""A recommender in PyTorch: 200,000 items, of which a client holds the 100 it meets most.

Each person likes or skips items; whether an item is liked depends on the item, with noise. Prints
the AUC and the bytes of a client with 100 items and with all of them, and draws `recommender.png`.
Needs the extras `torch` and `data`. `--small` runs it in seconds.
"""

import sys

import numpy as np
import pandas as pd
import torch

import keyhole as kh

ITEMS, PEOPLE, ROUNDS = (2_000, 200, 10) if "--small" in sys.argv else (200_000, 2_000, 50)


class Net(torch.nn.Module):
    def __init__(self, item):
        super().__init__()
        self.items = torch.nn.Embedding(item, 32)
        self.score = torch.nn.Linear(32, 1)

    def forward(self, batch):
        return self.score(self.items(batch["item"]))[:, 0]


def loss(outputs, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"])


def auc(outputs, examples):
    ranks, liked = outputs.argsort().argsort() + 1.0, examples["label"] > 0
    most = liked.sum() * (liked.sum() + 1) / 2
    return float((ranks[liked].sum() - most) / (liked.sum() * (~liked).sum()))


rng = np.random.default_rng(0)
frame = pd.DataFrame({"user": rng.integers(PEOPLE, size=100 * PEOPLE)})
frame["item"] = np.minimum(rng.zipf(1.2, len(frame)) - 1, ITEMS - 1)  # some are met by many
frame["label"] = (rng.normal(size=ITEMS)[frame["item"]] > rng.normal(0, 0.5, len(frame))) * 1.0

data = kh.data.from_pandas(frame, client="user", inputs={"item": "item"}, target="label")
cut = kh.Cut(kh.KeySpace("item", ITEMS), {"items.weight": 0})
task = kh.Task(kh.torch.Model(Net, loss, cuts=[cut]), data.hold_out(0.1), metrics={"auc": auc})
settings: dict = {"cohort": 20, "client_lr": 0.5, "evaluate_every": ROUNDS // 5, "progress": False}
few = kh.train(task, rounds=ROUNDS, m=100, mean_over="choosers", **settings)
full = kh.train(task, rounds=ROUNDS, m="all", mean_over="choosers", **settings)
for name, run in {"100 items": few, "all items": full}.items():
    moved = run.curve("auc", against="bytes")[0][-1] / ROUNDS / 1e3
    print(f"{name}: auc {run.metrics['auc']:.3f}, {moved:,.1f} kB per client and round")
kh.compare(full, few).plot("auc", against="bytes", path="recommender.png")
