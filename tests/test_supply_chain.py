"""What is installed, shipped and told about it: the lock, the wheel and the list of parts."""

import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import lock
from build_wheel import build_wheel
from keyhole.extras import EXTRAS
from tests.helpers import ROOT
from tests.wheels import digest, write_index, write_wheel

PACKAGES = lock.read_lock((ROOT / lock.LOCK).read_text())
ASKED = lock.asked_for(ROOT)


def names(packages):
    return {each.name for each in packages}


def test_every_requirement_of_every_extra_is_in_the_lock():
    pins = {each.name: each for each in PACKAGES}
    for extra, asked in ASKED.items():
        for one in map(Requirement, asked):
            pinned = pins[lock.name_of(one.name)]
            assert one.specifier.contains(pinned.version), one
            assert extra in pinned.extras


def test_the_lock_leaves_out_torch_and_nothing_else():
    project = metadata.metadata("keyhole").get_all("Provides-Extra")
    assert set(project) - ASKED.keys() == set(lock.UNLOCKED)


def test_every_package_has_hashes_and_one_version_for_a_python():
    placed = {(each.name, each.marker) for each in PACKAGES}
    assert len(placed) == len(PACKAGES) > 100
    always = {each.name for each in PACKAGES if not each.marker}
    assert not {each.name for each in PACKAGES if each.marker} & always
    assert all(each.hashes and each.extras and each.via for each in PACKAGES)


@pytest.mark.parametrize("extra", ["base", "train", "serve", "dev", "ray", "flower"])
def test_what_is_picked_has_all_that_it_needs(extra):
    """Walks what installed packages say they need; pip would refuse to install without it."""
    picked, seen = names(lock.pick(ROOT, [extra])), set()
    left = [(one, "") for one in map(Requirement, ASKED[extra])]
    while left:
        one, asked_with = left.pop()
        if one.marker is not None and not one.marker.evaluate({"extra": asked_with}):
            continue
        name = lock.name_of(one.name)
        assert name in picked, f"{name} is missing"
        for with_extra in {"", *one.extras} - {each for at, each in seen if at == name}:
            seen.add((name, with_extra))
            left += [(Requirement(each), with_extra) for each in metadata.requires(name) or ()]


def test_the_lock_survives_being_read_and_written():
    assert lock.write_lock(PACKAGES) == (ROOT / lock.LOCK).read_text()


def test_what_is_told_of_an_extra_is_what_it_brings():
    """`keyhole.extras` names the modules of packages that extras ask for, and what those bring."""
    installed = metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        asked, brought = map(lock.name_of, ASKED[extra]), names(lock.pick(ROOT, [extra]))
        told = {lock.name_of(installed[module][0]) for module in modules}
        assert set(asked) <= told <= brought, extra


def test_the_base_is_what_a_device_needs_and_nothing_of_a_trainer_or_a_service():
    base = names(lock.pick(ROOT, ["base"]))
    assert not base & set(
        map(lock.name_of, {*ASKED["train"], *ASKED["serve"], "scipy", "setuptools"})
    )
    assert len(base) < 10


def test_an_unknown_extra_is_refused_with_those_there_are():
    with pytest.raises(
        ValueError, match=r"got rays; expected some of base, build, data, dev, .* ray"
    ):
        lock.pick(ROOT, ["base", "rays"])


@pytest.fixture
def small_tree(tmp_path, monkeypatch):
    """A project that needs two packages, one of them for an extra, and an index of them."""
    wheels, tree = tmp_path / "wheels", tmp_path / "tree"
    for folder in (wheels, tree):
        folder.mkdir()
    made = [
        write_wheel(wheels, "hinges", needs=["screws"]),
        write_wheel(wheels, "screws"),
        write_wheel(wheels, "paint"),
    ]
    told = '[build-system]\nrequires = []\n[project]\ndependencies = ["hinges>=1"]\n'
    told += '[project.optional-dependencies]\ncolour = ["paint"]\ntorch = ["torch"]\n'
    (tree / "pyproject.toml").write_text(told)
    monkeypatch.setenv("PIP_INDEX_URL", write_index(tmp_path / "index", made))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    return tree


def test_the_command_locks_what_pips_index_has_and_names_no_index(small_tree, tmp_path):
    (small_tree / lock.LOCK).write_text(lock.write_lock(lock.resolve(small_tree, upgrade=False)))
    text = (small_tree / lock.LOCK).read_text()
    hashes = {each.name: each.hashes for each in lock.read_lock(text)}
    made = {path.name.partition("-")[0]: path for path in (tmp_path / "wheels").iterdir()}
    assert hashes == {name: (f"sha256:{digest(path)}",) for name, path in made.items()}
    assert "://" not in text
    assert str(tmp_path) not in text
    assert names(lock.pick(small_tree, ["base"])) == {"hinges", "screws"}
    assert names(lock.pick(small_tree, ["colour"])) == {"paint"}
    assert {each.name: each.via for each in lock.read_lock(text)} == {
        "hinges": ("keyhole",),
        "screws": ("hinges",),
        "paint": ("keyhole",),
    }


TINY = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "tiny"
version = "1"
readme = "README.md"
license-files = ["LICENSE"]
[tool.setuptools.packages.find]
where = ["src"]
"""


@pytest.fixture(params=["tiny", pytest.param("keyhole", marks=pytest.mark.slow)])
def origin(request, tmp_path):
    """A checkout of a small project, or ours."""
    if request.param == "keyhole":
        return ROOT
    tree = tmp_path / "origin"
    (tree / "src" / "tiny").mkdir(parents=True)
    (tree / "pyproject.toml").write_text(TINY)
    for name in ("README.md", "LICENSE", "src/tiny/__init__.py", "src/tiny/other.py"):
        (tree / name).write_text("# words\n")
    person = ["-c", "user.name=x", "-c", "user.email=x@localhost"]
    for asked in (["init", "-q"], ["add", "-A"], [*person, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", *asked], cwd=tree, check=True)
    return tree


def test_the_same_tree_gives_the_same_wheel(origin, tmp_path):
    """Two clones, of which one has other modes, dates and things that lie about."""
    trees = [tmp_path / "one", tmp_path / "another"]
    for tree in trees:
        subprocess.run(["git", "clone", "-q", str(origin), str(tree)], check=True)
    (package,) = [path.parent for path in (trees[1] / "src").glob("*/__init__.py")]
    for path in package.rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (1e9, 1e9))
    left = trees[1] / "build" / "lib" / package.name
    left.mkdir(parents=True)
    (left / "left_over.py").write_text("")
    (package / "untracked.py").write_text("")
    made = [build_wheel(tree, tree / "dist", epoch=1_700_000_000) for tree in trees]
    assert digest(made[0]) == digest(made[1])
    with zipfile.ZipFile(made[1]) as wheel:
        inside = wheel.infolist()
    assert {each.date_time for each in inside} == {(2023, 11, 14, 22, 13, 20)}
    assert not {"untracked.py", "left_over.py"} & {Path(each.filename).name for each in inside}


def list_parts():
    import sbom  # a second of imports

    return sbom.make_sbom(ROOT, 1_700_000_000)


@pytest.fixture(scope="module")
def parts():
    """The text of the list of parts, checked against the schema of CycloneDX."""
    return list_parts()


def test_the_list_of_parts_has_what_is_shipped_and_no_address(parts):
    made = json.loads(parts)
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    assert made["metadata"]["component"]["name"] == "keyhole"
    assert made["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    shipped = lock.pick(ROOT, [extra for extra in ASKED if extra != "dev"])
    listed = {part["name"]: part for part in made["components"]}
    assert listed.keys() == names(shipped)
    assert "pytest" not in listed
    for each in shipped:
        part = listed[each.name]
        assert part["purl"] == f"pkg:pypi/{each.name}@{each.version}"
        assert {f"sha256:{one['content']}" for one in part["hashes"]} == set(each.hashes)
    assert "://" not in parts.replace(made["$schema"], "")


def test_the_list_of_parts_says_who_needs_whom(parts):
    made = json.loads(parts)
    needs = {one["ref"]: one.get("dependsOn", []) for one in made["dependencies"]}
    versions = {each.name: each.version for each in PACKAGES}

    def ref(name):
        return f"pkg:pypi/{name}@{versions[name]}"

    keyhole = made["metadata"]["component"]["bom-ref"]
    assert {ref(name) for name in map(lock.name_of, ASKED["base"])} <= set(needs[keyhole])
    assert {ref(name) for name in map(lock.name_of, ASKED["train"])} <= set(needs[keyhole])
    assert ref("llvmlite") in needs[ref("numba")]
    assert ref("llvmlite") not in needs[keyhole]


def test_the_list_of_parts_is_the_same_twice(parts):
    assert list_parts() == parts


def test_unsafe_calls_are_found():
    """`make check` runs bandit with our settings; a planted call must not pass."""
    command = [sys.executable, "-m", "bandit", "-q", "-c", str(ROOT / "pyproject.toml"), "-"]
    for code, found in (("import yaml\nyaml.load(open('x'))\n", 1), ("assert 1 + 1 == 2\n", 0)):
        done = subprocess.run(command, input=code, text=True, capture_output=True, check=False)
        assert done.returncode == found, done.stdout
