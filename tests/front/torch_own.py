"""A task in PyTorch that commands find by its name."""

import numpy as np
import torch

import keyhole as kh

ITEMS, PEOPLE = 40, 4


class Net(torch.nn.Module):
    def __init__(self, item):
        super().__init__()
        self.items = torch.nn.Embedding(item, 4)
        self.out = torch.nn.Linear(4, 1)

    def forward(self, batch):
        return self.out(self.items(batch["item"]))[:, 0]


def loss(outputs, batch):
    return torch.nn.functional.binary_cross_entropy_with_logits(outputs, batch["label"])


def accuracy(outputs, examples):
    return float(((outputs > 0) == (examples["label"] > 0)).mean())


def make_data():
    rng = np.random.default_rng(0)
    items = {str(n): rng.integers(ITEMS, size=12) for n in range(PEOPLE)}
    rows = {n: {"item": each, "label": (each % 2).astype("f4")} for n, each in items.items()}
    return kh.data.from_dict(rows, inputs={"item": "item"}, target="label").hold_out(0.3)


DATA = make_data()
CUT = kh.Cut(kh.KeySpace("item", ITEMS), {"items.weight": 0})
TASK = kh.Task(kh.torch.Model(Net, loss, cuts=[CUT]), DATA, metrics={"accuracy": accuracy})


class Tuned(Net):
    """Its vectors are frozen; a number for each item is trained."""

    def __init__(self, item):
        super().__init__(item)
        self.bias = torch.nn.Embedding(item, 1)

    def forward(self, batch):
        return super().forward(batch) + self.bias(batch["item"])[:, 0]


OF_BOTH = kh.Cut(CUT.space, {"items.weight": 0, "bias.weight": 0})
FROZEN = kh.Task(
    kh.torch.Model(Tuned, loss, cuts=[OF_BOTH], frozen=["items.*"]),
    DATA,
    metrics={"accuracy": accuracy},
)
