"""The public API: sorted, complete, documented, and light to import."""

import importlib
import inspect
import subprocess
import sys

import pytest

import keyhole
from tests.helpers import ROOT

HEAVY = ("jax", "numba", "flwr", "ray", "torch", "click", "rich")
PACKAGES = [
    "keyhole",
    "keyhole.data",
    "keyhole.delivery",
    "keyhole.errors",
    "keyhole.keys",
    "keyhole.models",
    "keyhole.server",
    "keyhole.service",
    "keyhole.experiments",
    "keyhole.rounds",
]


def exported(package):
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_sorted(package):
    names = importlib.import_module(package).__all__
    constants_first = sorted(names, key=lambda name: (not name.isupper(), name))
    assert names == constants_first


def test_exports_are_complete():
    """Whatever keyhole imports into its namespace is exported, and nothing else is."""
    public = {
        name
        for name, value in vars(keyhole).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public == set(keyhole.__all__)


def test_a_module_of_primitives_exports_what_it_defines():
    for path in (ROOT / "src/keyhole/primitives").glob("[a-z]*.py"):
        module = importlib.import_module(f"keyhole.primitives.{path.stem}")
        defined = {
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
        } - {"T"}
        assert defined <= set(module.__all__), path.stem


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_documented(package):
    page = (ROOT / "docs" / "api.md").read_text()
    for name, value in exported(package).items():
        assert inspect.getdoc(value), f"{name} has no docstring"
        assert f"`{name}" in page, f"{name} is not in docs/api.md: run make docs"


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.strip()


def test_importing_keyhole_loads_nothing_heavy():
    loaded = run("import sys, keyhole; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_importing_the_simulator_does_not_load_jax():
    loaded = run("import sys, keyhole.rounds, keyhole.server; print(*sys.modules)").split()
    assert "jax" not in loaded


def test_importing_keyhole_costs_little_more_than_numpy():
    """CPU time, so that a busy machine does not count; the least of five tries."""
    code = (
        "import time, numpy; start = time.process_time(); import keyhole;"
        "print(time.process_time() - start)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.3
