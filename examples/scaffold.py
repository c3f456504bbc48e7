"""SCAFFOLD with select: control variates in NumPy, of clients and of the server, under keys.

Clients value 200 items, each its own few, often or rarely, and in its own way. One that takes many
local steps ends where it alone is best off, and the mean of such ends is not the best for all.
SCAFFOLD corrects each step by c - c_i: the mean gradient of all clients less that of this one. c
lies at the server under the keys of the model, c_i with the client. Prints both errors.

Reference: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
2020.
"""

import sys
from dataclasses import dataclass

import numpy as np

import keyhole as kh

ITEMS, CLIENTS, COHORT, STEPS = 200, 40, 10, 50
ITEM = kh.KeySpace("item", ITEMS)


def init(seed=0):
    return {"w": np.zeros(ITEMS, np.float32), "c": np.zeros(ITEMS, np.float32)}


def train_with(lr, corrects):
    def train(slices, data, rng, context):
        mine, w = context.keys["item"].array, slices["w"].copy()
        held = context.state or {"keys": mine[:0], "c": w[:0]}
        known = dict(zip(held["keys"].tolist(), held["c"], strict=True))
        own = np.array([known.get(key, 0.0) for key in mine.tolist()], np.float32)
        for _ in range(STEPS):
            error = (w[data["item"]] - data["value"]) / len(data["item"])
            gradient = np.bincount(data["item"], error, len(w)).astype(np.float32)
            w -= lr * (gradient + corrects * (slices["c"] - own))
        new = own - slices["c"] + (slices["w"] - w) / (STEPS * lr)
        known |= dict(zip(mine.tolist(), new, strict=True))
        keys = sorted(known)
        state = {"keys": np.array(keys), "c": np.array([known[key] for key in keys], np.float32)}
        update = {"w": slices["w"] - w, "c": (own - new) * np.float32(COHORT / CLIENTS)}
        loss = float(np.mean((slices["w"][data["item"]] - data["value"]) ** 2))
        return kh.Report(update, metrics={"loss": loss}, state=state)

    return train


@dataclass(frozen=True)
class Scaffold:
    """A model that trains itself; `added` says that the server's optimizer leaves c alone."""

    corrects: bool = True
    layout = kh.Layout.of(init(), kh.Cut(ITEM, {"w": 0, "c": 0}))
    added = ("c",)
    init = staticmethod(init)
    predict = staticmethod(lambda params, batch: params["w"][batch["item"]])

    def trainer(self, settings, slots):
        return train_with(settings.client_lr, self.corrects)


def make_data():
    rng = np.random.default_rng(0)
    client = np.repeat(np.arange(CLIENTS), 60)
    often = rng.dirichlet(np.full(ITEMS, 0.05), CLIENTS)  # which items a client meets
    item = np.concatenate([rng.choice(ITEMS, 60, p=p) for p in often])
    value = rng.normal(size=(CLIENTS, ITEMS))[client, item]
    columns = {"client": client, "item": item, "value": value.astype(np.float32)}
    data = kh.data.from_arrays(columns, client="client", inputs={"item": "item"}, target="value")
    return data.hold_out(0.2, by="within")


def run(corrects, data, rounds, out=None):
    mse = {"mse": lambda outputs, examples: np.mean((outputs - examples["value"]) ** 2)}
    task = kh.Task(Scaffold(corrects), data, metrics=mse)
    return kh.train(
        task, rounds=rounds, cohort=COHORT, m=20, client_lr=1.0, out=out, progress=False
    )


if __name__ == "__main__":
    out, rounds = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else (None, 100)
    for name, corrects in {"FedAvg": False, "SCAFFOLD": True}.items():
        made = run(corrects, make_data(), rounds, out and f"{out}/{name}")
        told = made.records()[-1].client_metrics["loss"].mean
        print(f"{name}: mse {made.metrics['mse']:.3f}, loss of clients {told:.3f}")
