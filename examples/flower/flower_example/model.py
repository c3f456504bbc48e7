"""The model and the clients: ratings of items, one vector an item and a readout that all share.

A client rates few items. It fetches the vectors of those alone, and the readout.
"""

import numpy as np

import keyhole as kh
from keyhole.rounds.clients import Clients

ITEMS, WIDTH, CLIENTS = 500, 8, 2
RATINGS, STEPS, RATE = 40, 20, 0.5
ITEM = kh.KeySpace("item", ITEMS)


def make_model(seed=0):
    """What the server begins with, by the names of a PyTorch state dict."""
    rng = np.random.default_rng(seed)
    return {
        "items.weight": rng.normal(0, 0.3, (ITEMS, WIDTH)).astype(np.float32),
        "readout.weight": rng.normal(0, 0.3, (1, WIDTH)).astype(np.float32),
        "readout.bias": np.zeros(1, np.float32),
    }


LAYOUT = kh.Layout.of(make_model(), kh.Cut(ITEM, {"items.weight": 0}))


def ratings_of(client):
    """The data of a client: a device would read its own. Every third item is liked."""
    items = np.random.default_rng([1, client]).choice(ITEMS, RATINGS, replace=False)
    return items, np.where(items % 3 == 0, 1.0, -1.0).astype(np.float32)


def choose(data, context):
    """A client's keys: the items that it has rated."""
    return ITEM.keys(data[0][: context.max_keys["item"]])


def localize(data, keys):
    """Ratings in the order of the client's own vectors."""
    place = {item: i for i, item in enumerate(keys["item"])}
    items, liked = data
    rows = np.array([place[item] for item in items if item in place])
    return {"item": rows, "liked": liked[: len(place)]}


def train_numpy(slices, data, rng):
    """A few steps of least squares by hand: what `module.py` does with PyTorch."""
    rows, liked = data["item"], data["liked"]
    names = ("items.weight", "readout.weight", "readout.bias")
    vectors, weight, bias = (slices[name].copy() for name in names)
    for _ in range(STEPS):
        off = (vectors[rows] @ weight[0] + bias[0] - liked) * np.float32(2 / len(rows))
        step = off[:, None] * weight
        weight, bias = weight - RATE * off @ vectors[rows], bias - RATE * off.sum()
        np.subtract.at(vectors, rows, RATE * step)
    return {
        name: slices[name] - end.astype(np.float32)
        for name, end in zip(names, (vectors, weight, bias), strict=True)
    }


def make_clients(train=train_numpy):
    return Clients(CLIENTS, ratings_of, choose, train, localize)


def loss(model):
    """Mean squared error over all clients."""
    errors = []
    for client in range(CLIENTS):
        items, liked = ratings_of(client)
        said = model["items.weight"][items] @ model["readout.weight"][0]
        errors.append(float(np.mean((said + model["readout.bias"][0] - liked) ** 2)))
    return float(np.mean(errors))
