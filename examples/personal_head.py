"""A personal head: clients share vectors of items, and keep to themselves how they weigh them.

Whether a person likes an item depends on the item and on the person. The vectors of 500 items are
trained together, under select; the head that turns a vector into a value is the state of a client:
it stays where it is trained, and no sum holds it. Prints the error of clients before they train,
with one head for all and with a head for each.
"""

import sys
from dataclasses import dataclass

import numpy as np

import keyhole as kh

ITEMS, CLIENTS, WIDTH = 500, 60, 4
ITEM = kh.KeySpace("item", ITEMS)


def init(seed):
    items = np.random.default_rng(seed).normal(0, 0.3, (ITEMS, WIDTH)).astype(np.float32)
    return {"items": items, "head": np.ones(WIDTH, np.float32)}


def train_with(lr, personal):
    def train(slices, data, rng, context):
        items, head = slices["items"].copy(), slices["head"].copy()
        if personal and context.state is not None:
            head = context.state["head"]
        item, value = data["item"], data["value"]
        now = rng.permutation(len(item))[: len(item) // 2]  # the examples of this round
        loss = float(np.mean((items[item[now]] @ head - value[now]) ** 2))
        for i in np.tile(now, 5):
            error = items[item[i]] @ head - value[i]
            row = items[item[i]].copy()
            items[item[i]] -= lr * error * head
            head -= lr * error * row
        shared = slices["head"] if personal else head
        update = {"items": slices["items"] - items, "head": slices["head"] - shared}
        return kh.Report(update, weight=len(now), metrics={"loss": loss}, state={"head": head})

    return train


@dataclass(frozen=True)
class Ratings:
    personal: bool
    layout = kh.Layout.of(init(0), kh.Cut(ITEM, {"items": 0}))
    init = staticmethod(init)
    predict = staticmethod(lambda params, batch: params["items"][batch["item"]] @ params["head"])

    def trainer(self, settings, slots):
        return train_with(np.float32(settings.client_lr), self.personal)


def make_data():
    rng = np.random.default_rng(0)
    item, client = rng.integers(ITEMS, size=40 * CLIENTS), np.repeat(np.arange(CLIENTS), 40)
    vectors, heads = rng.normal(size=(ITEMS, WIDTH)), rng.normal(size=(CLIENTS, WIDTH))
    value = np.einsum("ij,ij->i", vectors[item], heads[client]).astype(np.float32)
    columns = {"client": client, "item": item, "value": value}
    data = kh.data.from_arrays(columns, client="client", inputs={"item": "item"}, target="value")
    return data.hold_out(0.1, by="within")


def run(personal, data, rounds, out=None):
    settings: dict = {"cohort": 20, "m": 40, "client_lr": 0.05, "mean_over": "choosers"}
    task = kh.Task(Ratings(personal), data)
    return kh.train(task, rounds=rounds, out=out, progress=False, **settings)


if __name__ == "__main__":
    out, rounds = (sys.argv[1], int(sys.argv[2])) if len(sys.argv) > 2 else (None, 100)
    for name, personal in {"one head for all": False, "a head for each": True}.items():
        made = run(personal, make_data(), rounds, out and f"{out}/{name}")
        print(f"{name}: error of clients {made.curve('client_loss')[1][0, -10:].mean():.3f}")
