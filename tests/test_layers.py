"""Imports go down only: the layers of docs/architecture.md, read from the import statements."""

import ast

import pytest

from tests.helpers import ROOT

# From the top. A package imports itself and what stands in lower lines; packages on one line do not
# import each other, but for the last line, which is the common ground.
LAYERS = [
    {"cli"},
    {"report"},
    {"engines"},
    {"serving", "tasks"},
    {"training"},
    {"delivery", "keys", "models", "data"},
    {"server"},
    {"private"},
    {"primitives"},
    {"tree", "types", "lazy", "errors"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
COMMON = len(LAYERS) - 1

# Heavy or optional libraries, and the packages that may import them.
RESERVED = {
    "jax": {"models", "training"},
    "optax": {"models", "training"},
    "numba": {"models", "private", "server"},
    "matplotlib": {"data", "report"},
    "click": {"cli"},
    "cryptography": {"private"},
    "dcap_qvl": {"private"},
    "dp_accounting": {"private"},
    "rich": {"cli"},
    "flwr": {"engines"},
    "ray": {"engines"},
    "torch": {"engines", "training"},
    "tensorboardX": {"training"},
    "msgspec": {"serving"},
    "obstore": {"serving"},
    "prometheus_client": {"serving"},
    "uvicorn": {"serving"},
}

SOURCE = ROOT / "src" / "keyhole"
FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def layer_of(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imports_of(path):
    """Every module that a file imports, wherever the statement stands."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def allowed(importer, imported):
    if importer == imported:
        return True
    if RANK[importer] == RANK[imported] == COMMON:
        return True
    return RANK[importer] < RANK[imported]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_imports_go_down_only(path):
    for name in imports_of(path):
        package, *rest = name.split(".")
        if package == "keyhole" and rest:
            assert allowed(layer_of(path), rest[0]), f"{layer_of(path)} imports {name}"
        if package in RESERVED:
            assert layer_of(path) in RESERVED[package], f"{layer_of(path)} imports {name}"


def test_every_package_has_a_layer():
    assert {layer_of(path) for path in FILES} <= RANK.keys()


@pytest.mark.parametrize(
    ("importer", "imported", "is_allowed"),
    [
        ("cli", "primitives", True),
        ("primitives", "cli", False),
        ("keys", "models", False),
        ("tree", "errors", True),
        ("errors", "primitives", False),
    ],
)
def test_the_rule_itself(importer, imported, is_allowed):
    assert allowed(importer, imported) == is_allowed


def test_the_layers_are_drawn_in_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    positions = [page.index(f"\n| `{min(names)}`") for names in LAYERS]
    assert positions == sorted(positions)
