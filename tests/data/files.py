"""Small files in every format that we read, and what they hold."""

import json
import lzma
import sqlite3
import struct

import h5py
import numpy as np

# Two writers and their labels; pixels are made from the label, so each image is known.
WRITERS = {
    "train": {"f0001_10": [3, 61], "f0002_11": [10]},
    "test": {"f0001_10": [0], "f0002_11": [36, 9]},
}

# What two users wrote, as TensorFlow Federated has it: (tokens, title, tags).
POSTS = {
    "train": {
        "0010": [("how to sort a list", "Sort list", "python|list"), ("a list is", "Sort", "list")],
        "0021": [("use a map", "Sort list", "c++|map")],
    },
    "validation": {"0030": [("a map", "", "map")]},
    "test": {"0010": [("sort it", "other", "python")]},
}


def image(label):
    """28 x 28 bytes that differ between labels."""
    return ((np.arange(784) * (label + 1)) % 256).astype(np.uint8).reshape(28, 28)


def images(labels):
    return np.stack([image(label) for label in labels])


def write_femnist(path, **changes):
    """FEMNIST as one archive; a change of None leaves an array out."""
    arrays = {"images": [], "labels": [], "client": [], "split": []}
    ids = sorted(WRITERS["train"])
    for number, client in enumerate(ids):
        for code, split in enumerate(("train", "test")):
            labels = WRITERS[split][client]
            arrays["images"] += list(images(labels))
            arrays["labels"] += labels
            arrays["client"] += [number] * len(labels)
            arrays["split"] += [code] * len(labels)
    arrays = {name: np.array(values, np.uint8) for name, values in arrays.items()}
    arrays |= {"writer": np.array(ids)} | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def write_movielens(path, **changes):
    """Ann rated 21 movies, the last two in file order before all others in time; Ben one."""
    arrays = {
        "user": np.array([0] * 21 + [4], np.uint16),
        "item": np.arange(22, dtype=np.uint16) % 21,
        "half_stars": np.array([1 + i % 10 for i in range(22)], np.uint8),
        "timestamp": np.array([*range(100, 119), 1, 2, 50], np.int64),
        "item_title": np.array([f"Movie {i}" for i in range(21)]),
    }
    arrays |= changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def stack_record(user, text, title="", tags=()):
    return {"user": user, "text": text, "title": title, "tags": list(tags)}


def write_stackexchange(path, records):
    with lzma.open(path, "wt", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    return path


def write_emnist_hdf5(folder):
    for split, clients in WRITERS.items():
        with h5py.File(folder / f"fed_emnist_{split}.h5", "w") as file:
            for client, labels in clients.items():
                group = file.create_group(f"examples/{client}")
                group["pixels"] = (images(labels) / 255).astype(np.float32)
                group["label"] = np.array(labels, np.int32)
    return folder / "fed_emnist_train.h5"


def write_stackoverflow_hdf5(folder):
    for split, end in {"train": "train", "validation": "held_out", "test": "test"}.items():
        with h5py.File(folder / f"stackoverflow_{end}.h5", "w") as file:
            for client, rows in POSTS[split].items():
                group = file.create_group(f"examples/{client}")
                for column, name in enumerate(("tokens", "title", "tags")):
                    values = [row[column] for row in rows]
                    group.create_dataset(name, data=values, dtype=h5py.string_dtype())
                group.create_dataset("creation_date", data=["2017-01-01"] * len(rows))
                group.create_dataset("score", data=np.arange(len(rows)))
                group.create_dataset("type", data=["answer"] * len(rows))
    return folder / "stackoverflow_train.h5"


def write_sqlite(path, rows, counts=None):
    """TensorFlow Federated's tables; rows are (split, client, message)."""
    counted = {}
    for split, client, _ in rows:
        counted[client, split] = counted.get((client, split), 0) + 1
    counted |= counts or {}
    with sqlite3.connect(path) as connection:
        connection.execute(
            "CREATE TABLE examples (split_name TEXT NOT NULL, client_id TEXT NOT NULL,"
            " serialized_example_proto BLOB NOT NULL)"
        )
        connection.execute("CREATE INDEX idx_examples_client_id ON examples (client_id)")
        connection.execute(
            "CREATE TABLE client_metadata (client_id TEXT NOT NULL, split_name TEXT NOT NULL,"
            " num_examples INTEGER NOT NULL)"
        )
        connection.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
        metadata = [(*key, count) for key, count in counted.items()]
        connection.executemany("INSERT INTO client_metadata VALUES (?, ?, ?)", metadata)
    connection.close()
    return path


def emnist_rows():
    """All characters, and digits alone, which are to be left out."""
    rows = []
    for split, clients in WRITERS.items():
        for client, labels in clients.items():
            for label in labels:
                pixels = (image(label).reshape(-1) / 255).astype(np.float32)
                message = encode_example({"pixels": pixels, "label": np.array([label])})
                rows.append((f"all_{split}", client, message))
                if label < 10:
                    rows.append((f"digits_only_{split}", client, message))
    return rows


def stackoverflow_rows():
    names = {"train": "train", "validation": "heldout", "test": "test"}
    return [
        (names[split], client, encode_example(_texts(tokens=row[0], title=row[1], tags=row[2])))
        for split, clients in POSTS.items()
        for client, rows in clients.items()
        for row in rows
    ]


def _texts(**texts):
    features = {name: [text.encode()] for name, text in texts.items()}
    return features | {"type": [b"answer"], "score": np.array([-1]), "creation_date": [b"2017"]}


def write_leaf(folder):
    """LEAF: each split in a directory, each writer in a file of its own."""
    for split, clients in WRITERS.items():
        (folder / split).mkdir(parents=True)
        for client, labels in clients.items():
            path = folder / split / f"all_data_{client}_niid_0_keep_0_{split}_9.json"
            path.write_text(json.dumps(leaf_content({client: labels})))
    return folder


def leaf_content(clients):
    return {
        "users": list(clients),
        "num_samples": [len(labels) for labels in clients.values()],
        "user_data": {
            client: {"x": (images(labels) / 255).reshape(-1, 784).tolist(), "y": labels}
            for client, labels in clients.items()
        },
    }


def varint(number):
    number %= 2**64  # negative numbers are two's complement
    encoded = b""
    while number > 0x7F:
        encoded += bytes([number & 0x7F | 0x80])
        number >>= 7
    return encoded + bytes([number])


def field(number, content):
    """A field that holds bytes."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def encode_example(features, packed=True):
    """A serialized tf.train.Example; bytes in a list, or an array of float32 or int64."""
    entries = b""
    for name, values in features.items():
        entry = field(1, name.encode()) + field(2, _encode_feature(values, packed))
        entries += field(1, entry)
    return field(1, entries)


def _encode_feature(values, packed):
    if isinstance(values, list):
        return field(1, b"".join(field(1, value) for value in values))
    if values.dtype.kind == "f":
        parts, wire = [struct.pack("<f", value) for value in values], 5
    else:
        parts, wire = [varint(int(value)) for value in values], 0
    one_by_one = b"".join(varint(1 << 3 | wire) + part for part in parts)
    content = field(1, b"".join(parts)) if packed else one_by_one
    return field(2 if values.dtype.kind == "f" else 3, content)
