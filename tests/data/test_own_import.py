"""Tables of your own in the cache: the same data as in memory, found by name, never half."""

import json
import os

import numpy as np
import pytest

from keyhole.data.cache import load, read_manifest
from keyhole.data.federated import Ragged
from keyhole.data.open import OwnFile, import_table, open_dataset, verify
from keyhole.errors import InputError

ROWS = [
    {"who": f"u{i % 5}", "film": f"f{i % 3}", "words": [i] * (i % 3), "offsets": i, "x/y.z": i / 4}
    for i in range(30)
]


@pytest.fixture
def path(tmp_path):
    found = tmp_path / "films.jsonl"
    found.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return found


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def own(path, **changes):
    inputs = {"film": "film", "words": "word"}
    return OwnFile(path, "who", inputs, **{"target": "x/y.z", "share": 0.2} | changes)


def plain(data):
    return {
        name: [
            [[r.tolist() for r in c] if isinstance(c, Ragged) else c.tolist() for c in row.values()]
            for row in map(part.client, range(len(part)))
        ]
        for name, part in data.splits.items()
    }


@pytest.mark.parametrize("by", ["client", "within"])
def test_what_is_kept_is_what_was_read(path, cache, by):
    file = own(path, by=by)
    directory, was_there = import_table(file, cache=cache)
    kept, made = load(directory), file.read()
    assert not was_there
    assert plain(kept) == plain(made)
    assert {name: list(texts) for name, texts in kept.names.items()} == made.names
    assert (kept.inputs, kept.target, kept.kind) == (made.inputs, made.target, made.kind)
    assert {split: part.columns.keys() for split, part in kept.splits.items()} == {
        split: part.columns.keys() for split, part in made.splits.items()
    }
    assert kept.facts.items() > made.facts.items()
    assert [list(part.client_ids) for part in kept.splits.values()] == [
        list(part.client_ids) for part in made.splits.values()
    ]
    assert isinstance(kept.splits["train"].columns["offsets"].base, np.memmap)
    assert verify("films", cache=cache).name == "films"


def test_it_is_opened_by_its_name_and_by_its_path(path, cache):
    import_table(own(path, name="mine"), cache=cache)
    assert plain(open_dataset(path, cache=cache)) == plain(own(path).read())
    path.unlink()
    assert plain(open_dataset("mine", cache=cache))["test"]


def test_it_is_read_once_and_again_where_it_was_declared_otherwise(path, cache):
    told = []
    first, _ = import_table(own(path), cache=cache, progress=lambda *at: told.append(at))
    assert told[-1] == (path.stat().st_size, path.stat().st_size)
    assert import_table(own(path), cache=cache) == (first, True)
    other, was_there = import_table(own(path, target=None), cache=cache)
    assert (other != first, was_there) == (True, False)
    os.utime(path, ns=(1, 1))  # touched: hashed, and known again
    assert import_table(own(path), cache=cache) == (first, False)
    path.write_text(path.read_text().replace("f1", "f9"))
    assert import_table(own(path), cache=cache)[0] not in (first, other)


def test_an_import_that_fails_leaves_nothing(path, cache):
    with path.open("a") as file:
        file.write('{"who": "u1", "film": null}\n')
    with pytest.raises(InputError, match="column 'film' has no value in row 30 of client 'u1'"):
        import_table(own(path), cache=cache)
    assert [entry.name for entry in cache.iterdir()] == [".work"]
    assert [entry.suffix for entry in (cache / ".work").iterdir()] == [".lock"]


def test_half_a_character_is_named(path, cache):
    path.write_text('{"who": "a", "film": "\\ud800"}\n{"who": "b", "film": "x"}\n')
    with pytest.raises(InputError, match="expected text of whole Unicode characters"):
        import_table(OwnFile(path, "who", {"film": "film"}, share=0.5), cache=cache)


def test_a_manifest_that_was_changed_is_refused(path, cache):
    directory, _ = import_table(own(path), cache=cache)
    manifest = directory / "manifest.json"
    changed = json.loads(manifest.read_text()) | {"inputs": {"flim": "film"}}
    manifest.write_text(json.dumps(changed))
    with pytest.raises(InputError, match="another content of inputs"):
        read_manifest(directory)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"path": "films.xlsx"}, "films.xlsx: got no such file"),
        ({"client": "whom"}, "did you mean who?"),
        ({"by": "time"}, "no column of times: got None"),
        ({"name": "../x"}, "cannot be called so: got '../x'"),
    ],
)
def test_a_mistake_is_named(path, cache, changes, said):
    given = {"path": path, "client": "who", "inputs": {"film": "film", "words": "word"}} | changes
    with pytest.raises(InputError) as raised:
        import_table(OwnFile(**given | {"path": path.parent / given["path"]}), cache=cache)
    assert said in str(raised.value)
