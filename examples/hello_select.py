"""Federated select on a matrix of five rows: three clients, their keys, and the mean of what they
return.

Run it: python examples/hello_select.py
"""

import numpy as np

import keyhole as kh

# The server holds a 5 x 2 matrix; key k selects row k.
row = kh.KeySpace("row", 5)
model = np.arange(10.0).reshape(5, 2)
layout = kh.Layout.of({"x": model}, kh.Cut(row, {"x": 0}))

# Three clients name the rows they need. Order and repeats count; a client may need nothing.
KEYS = {"ann": [3, 0], "ben": [3, 3, 4], "cem": []}


def client_update(slices, keys):
    """A stand-in for training: each client returns its own number of keys for each number it
    received."""
    return {"x": np.full_like(slices["x"], len(keys))}


def main():
    print("server model x, one row per key:")
    print(model)

    keys = row.place(KEYS)
    slices = kh.generalized_select(kh.at_server({"x": model}), keys, layout.select)
    print("\nwhat each client receives (the server only sees:", slices, ")")
    kh.map_clients(show, kh.at_clients(dict(zip(KEYS, KEYS, strict=True))), keys, slices)

    updates = kh.map_clients(client_update, slices, keys)
    mean = kh.deselect_mean(updates, keys, layout.deselect)
    print("\nmean update under the same keys, over 3 clients (Eq. 5):")
    print(mean.value["x"])

    per_key = kh.deselect_mean_per_key(updates, keys, layout.deselect)
    print("\nthe same, over the clients that chose the row:")
    print(per_key.value["x"])

    try:
        print(slices.value)
    except kh.KeyholeError as error:
        print("\nreading a client's slices at the server:\n ", error)


def show(name, keys, slices):
    rows = "  ".join(str(r) for r in slices["x"].tolist()) or "nothing"
    print(f"  {name} asks for {list(keys)}: {rows}")


if __name__ == "__main__":
    main()
