"""The public API: sorted, complete, documented, and light to import."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from importlib import metadata

import pytest

import keyhole
from tests.helpers import ROOT

HEAVY = ("jax", "numba", "flwr", "ray", "torch", "click", "rich", "pandas", "pyarrow", "datasets")
PACKAGES = ["keyhole", "keyhole.data", "keyhole.errors", "keyhole.keys"]
ON_DEMAND = {
    name: f"keyhole.{module}"
    for module, names in keyhole._ON_DEMAND.items()
    for name in names.split()
}


def exported(package):
    module = importlib.import_module(package)
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_sorted(package):
    names = importlib.import_module(package).__all__
    constants_first = sorted(names, key=lambda name: (not name.isupper(), name))
    assert names == constants_first


def test_exports_are_complete():
    """What keyhole imports into its namespace or finds on demand is exported, and nothing else."""
    public = {
        name
        for name, value in vars(keyhole).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    assert public | ON_DEMAND.keys() == set(keyhole.__all__)


def test_type_checkers_see_what_is_found_on_demand():
    """The imports that only they read are those of the table."""
    (block,) = (n for n in ast.parse(inspect.getsource(keyhole)).body if isinstance(n, ast.If))
    found = {alias.name: n.module for n in block.body for alias in n.names}
    assert found == ON_DEMAND | dict.fromkeys(keyhole._MODULES, "keyhole")


def test_names_on_demand_are_those_of_their_modules():
    for name, module in ON_DEMAND.items():
        assert getattr(keyhole, name) is getattr(importlib.import_module(module), name)


def test_modules_are_found_as_attributes():
    for name in keyhole._MODULES:
        assert getattr(keyhole, name) is importlib.import_module(f"keyhole.{name}")
        assert name in dir(keyhole)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'keyhole' has no attribute 'selekt'"):
        _ = keyhole.selekt


def test_the_version_is_that_of_the_package():
    assert keyhole.__version__ == metadata.version("keyhole")


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_shows_what_is_exported(package):
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_exports_are_documented(package):
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.M))
    for name, value in exported(package).items():
        assert inspect.getdoc(value), f"{name} has no docstring"
        module = getattr(value, "__module__", package)
        places = {package, module, f"{package}.{name}", f"{module}.{name}"}
        assert places & shown, f"{name} is on no page of docs/reference: add ::: {package}.{name}"


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    return done.stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_that_export_are_light(package):
    loaded = run(f"import sys, {package}; print(*sys.modules)").split()
    assert not set(HEAVY) & set(loaded)


def test_importing_the_simulator_does_not_load_jax():
    loaded = run("import sys, keyhole as kh; kh.start_run, kh.SGD; print(*sys.modules)").split()
    assert "jax" not in loaded


def test_importing_keyhole_costs_little_more_than_numpy():
    """CPU time, so that a busy machine does not count; the least of five tries."""
    code = (
        "import time, numpy; start = time.process_time(); import keyhole;"
        "print(time.process_time() - start)"
    )
    assert min(float(run(code)) for _ in range(5)) < 0.3
