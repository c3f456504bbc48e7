"""The cache: imported once, anew after a change, never half."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from keyhole.data.cache import cache_root, read_manifest
from keyhole.data.open import find_dataset, import_dataset, list_datasets, open_dataset, verify
from keyhole.errors import InputError, StorageError
from tests.data import files
from tests.helpers import ROOT


@pytest.fixture
def source(tmp_path):
    return files.write_femnist(tmp_path / "femnist.npz")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def labels(dataset):
    return dataset.splits["train"].columns["label"].tolist()


def refuse(*args):
    raise AssertionError("imported again")


def test_a_dataset_is_imported_once(source, cache):
    calls = []
    first = open_dataset(source, cache=cache, progress=lambda *call: calls.append(call))
    assert calls == [(1, 2), (2, 2)]
    again = open_dataset(source, cache=cache, progress=refuse)
    assert labels(again) == labels(first) == [3, 61, 10]


def test_arrays_are_memory_maps(source, cache):
    pixels = open_dataset(source, cache=cache).splits["train"].columns["pixels"]
    assert isinstance(pixels.base, np.memmap)
    assert not pixels.flags.writeable


def test_a_changed_file_is_imported_anew(source, cache):
    open_dataset(source, cache=cache)
    files.write_femnist(source, labels=np.full(6, 5))
    assert labels(open_dataset(source, cache=cache)) == [5, 5, 5]
    assert len(list_datasets(cache)) == 2
    assert find_dataset("femnist", cache=cache) == find_dataset(source, cache=cache)


def test_a_directory_with_one_file_more_is_imported_anew(tmp_path, cache):
    folder = files.write_leaf(tmp_path / "femnist" / "data")
    open_dataset(folder, cache=cache)
    assert open_dataset(folder, cache=cache, progress=refuse).name == "femnist"
    content = files.leaf_content({"f0003_12": [7]})
    (folder / "train" / "more.json").write_text(json.dumps(content))
    assert labels(open_dataset(folder, cache=cache)) == [3, 61, 10, 7]


def test_the_same_bytes_elsewhere_are_not_imported_again(source, cache, tmp_path):
    open_dataset(source, cache=cache)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "femnist.npz").write_bytes(source.read_bytes())
    open_dataset(moved / "femnist.npz", cache=cache, progress=refuse)
    assert len(list_datasets(cache)) == 1


def test_a_touched_file_is_imported_once_it_was_compared(source, cache, monkeypatch):
    directory = import_dataset(source, cache=cache)
    os.utime(source, ns=(1, 1))
    with pytest.raises(InputError, match="not imported"):
        find_dataset(source, cache=cache)
    assert import_dataset(source, cache=cache, progress=refuse) == directory
    assert find_dataset(source, cache=cache) == directory
    monkeypatch.setattr("keyhole.data.cache.hash_file", refuse)
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]


def test_a_moved_file_is_imported_once_it_was_compared(source, cache, tmp_path, monkeypatch):
    directory = import_dataset(source, cache=cache)
    (tmp_path / "moved").mkdir()
    moved = source.rename(tmp_path / "moved" / "femnist.npz")
    import_dataset(moved, cache=cache)
    assert find_dataset(moved, cache=cache) == directory
    manifest = read_manifest(directory)
    assert manifest.origin == manifest.sources[0]["path"] == str(moved.resolve())
    monkeypatch.setattr("keyhole.data.cache.hash_file", refuse)
    assert import_dataset(moved, cache=cache) == directory


def test_hashing_says_how_far_it_is(tmp_path, cache):
    folder = files.write_leaf(tmp_path / "femnist" / "data")
    calls = []
    import_dataset(folder, cache=cache, hashing=lambda *call: calls.append(call))
    total = sum(path.stat().st_size for path in folder.rglob("*.json"))
    assert len(calls) == 4  # small files are read in one piece
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def test_what_is_imported_goes_by_its_name(tmp_path, cache):
    path = files.write_movielens(tmp_path / "my_movies.npz")
    with pytest.raises(InputError, match="no dataset 'my_movies'"):
        open_dataset("my_movies", cache=cache)
    directory = import_dataset(path, cache=cache)
    path.unlink()
    assert open_dataset("my_movies", cache=cache).name == "my_movies"
    assert import_dataset("my_movies", cache=cache, progress=refuse) == directory
    assert verify("my_movies", cache=cache).name == "my_movies"


def test_an_imported_file_of_a_shared_name_needs_no_folder(source, cache, monkeypatch):
    monkeypatch.delenv("KEYHOLE_DATA", raising=False)
    open_dataset(source, cache=cache)
    assert labels(open_dataset("femnist", cache=cache)) == [3, 61, 10]
    files.write_femnist(source, labels=np.full(6, 5))
    monkeypatch.setenv("KEYHOLE_DATA", str(source.parent))
    assert labels(open_dataset("femnist", cache=cache)) == [5, 5, 5]  # a file comes first


def test_of_two_imports_of_a_name_the_latest_is_opened(source, cache, monkeypatch):
    monkeypatch.delenv("KEYHOLE_DATA", raising=False)  # a file there would come first
    first, content = import_dataset(source, cache=cache), source.read_bytes()
    files.write_femnist(source, labels=np.full(6, 5))
    open_dataset(source, cache=cache)
    source.write_bytes(content)
    os.utime(source, ns=(1, 1))
    assert import_dataset(source, cache=cache) == first
    source.unlink()
    assert import_dataset(source.stem, cache=cache) == first


def test_what_a_killed_replacement_left_is_in_nobodys_way(source, cache):
    directory = import_dataset(source, cache=cache)
    old = cache / ".work" / f"{directory.name}.old"
    old.mkdir()
    (old / "train.label.npy").write_bytes(b"left")
    (directory / "train.label.npy").write_bytes(b"damaged")
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]
    assert not old.exists()


def test_a_truncated_array_is_an_error_and_is_imported_anew(source, cache):
    directory = import_dataset(source, cache=cache)
    array = directory / "train.label.npy"
    array.write_bytes(array.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"train\.label\.npy.*130.*131 bytes.*import"):
        read_manifest(directory)
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]


def test_verify_finds_a_changed_byte(source, cache):
    directory = import_dataset(source, cache=cache)
    assert verify(source, cache=cache).name == "femnist"
    array = directory / "train.label.npy"
    array.write_bytes(array.read_bytes()[:-1] + b"\x07")
    with pytest.raises(InputError, match=r"train\.label\.npy"):
        verify("femnist", cache=cache)


def test_verify_finds_a_source_that_has_changed(source, cache):
    open_dataset(source, cache=cache)
    files.write_femnist(source, labels=np.full(6, 5))
    with pytest.raises(InputError, match=r"femnist\.npz: got sha256"):
        verify("femnist", cache=cache)
    source.unlink()
    assert verify("femnist", cache=cache).name == "femnist"


def test_the_manifest_says_where_the_data_is_from(source, cache):
    directory = import_dataset(source, cache=cache)
    manifest = json.loads((directory / "manifest.json").read_text())
    assert manifest["version"] == 2
    assert manifest["splits"]["test"] == {"clients": 2, "examples": 3}
    assert manifest["sources"][0]["sha256"] == manifest["facts"]["sha256"]
    assert directory.name == f"femnist-{manifest['facts']['sha256'][:16]}"
    on_disk = {path.name for path in directory.iterdir()} - {"manifest.json"}
    assert manifest["files"].keys() == on_disk


def test_another_version_is_imported_anew(source, cache):
    path = import_dataset(source, cache=cache) / "manifest.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))
    assert list_datasets(cache) == []
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]
    assert len(list_datasets(cache)) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', "{"])
def test_a_directory_with_a_bad_manifest_is_no_dataset(source, cache, content):
    path = import_dataset(source, cache=cache) / "manifest.json"
    path.write_text(content)
    assert list_datasets(cache) == []
    with pytest.raises(InputError, match="manifest"):
        read_manifest(path.parent)
    assert labels(open_dataset(source, cache=cache, progress=None)) == [3, 61, 10]


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {"train.label.npy": 131}},
        {"files": {"train.label.npy": {"bytes": 131}}},
        {"sources": {}},
        {"sources": [{"path": "femnist.npz"}]},
        {"splits": []},
        {"splits": {"test": {"clients": 2, "examples": 3}}},
        {"splits": {"train": {"clients": 2}}},
        {"facts": {}},
        {"names": 3},
        {"kind": "letters"},
        {"origin": None},
    ],
    ids=str,
)
def test_a_manifest_with_a_wrong_field_is_no_manifest(source, cache, change):
    path = import_dataset(source, cache=cache) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert list_datasets(cache) == []
    with pytest.raises(InputError, match="manifest"):
        read_manifest(path.parent)
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]


SLOW_IMPORT = """
import sys, time
from pathlib import Path
from keyhole.data.open import open_dataset
def wait(done, total):
    print("started", flush=True)
    time.sleep(60)
open_dataset(sys.argv[1], cache=Path(sys.argv[2]), progress=wait)
"""


def test_a_killed_import_leaves_nothing_that_looks_like_a_dataset(source, cache):
    command = [sys.executable, "-c", SLOW_IMPORT, source, cache]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    process.kill()
    process.communicate()
    assert list_datasets(cache) == []
    left = [path for path in (cache / ".work").iterdir() if path.is_dir()]
    assert len(left) == 1
    other = files.write_movielens(source.parent / "movies.npz")
    open_dataset(other, cache=cache)  # sweeps up, whatever it imports
    assert not left[0].exists()
    assert labels(open_dataset(source, cache=cache)) == [3, 61, 10]


def test_an_interrupted_import_leaves_nothing(source, cache):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_dataset(source, cache=cache, progress=interrupt)
    assert [path for path in cache.rglob("*") if path.name.endswith(".npy")] == []


def test_a_second_process_waits_and_finds_the_dataset(source, cache):
    code = "import time\n" + SLOW_IMPORT.replace("sleep(60)", "sleep(0.4)")
    command = [sys.executable, "-c", code, source, cache]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "started\n"
    open_dataset(source, cache=cache, progress=refuse)
    first.communicate()
    assert first.returncode == 0


def test_a_cache_that_cannot_be_written_is_a_storage_error(source, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        open_dataset(source, cache=tmp_path / "file" / "cache")


def test_opening_from_the_cache_is_quick(source, cache):
    open_dataset(source, cache=cache)
    start = time.process_time()
    open_dataset(source, cache=cache)
    assert time.process_time() - start < 0.3


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("KEYHOLE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "keyhole"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "keyhole"
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"


def test_a_bare_name_of_no_import_is_looked_up_in_the_data_folder_only(source, cache, monkeypatch):
    monkeypatch.chdir(source.parent)
    monkeypatch.delenv("KEYHOLE_DATA", raising=False)
    with pytest.raises(InputError, match="no environment variable KEYHOLE_DATA"):
        open_dataset("femnist", cache=cache)
    monkeypatch.setenv("KEYHOLE_DATA", str(cache))
    with pytest.raises(InputError, match="no file"):
        open_dataset("femnist", cache=cache)
    monkeypatch.setenv("KEYHOLE_DATA", str(source.parent))
    assert labels(open_dataset("femnist", cache=cache)) == [3, 61, 10]


def test_opening_data_loads_nothing_heavy(source, cache):
    open_dataset(source, cache=cache)
    code = (
        "import sys; from pathlib import Path; from keyhole.data.open import open_dataset;"
        f"open_dataset({str(source)!r}, cache=Path({str(cache)!r})); print(*sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert not {"numba", "jax", "h5py", "matplotlib", "click"} & set(done.stdout.split())
