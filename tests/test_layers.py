"""The rules of the tree, read from the source: layers, cycles, names, ways that declare themselves.

What still breaks a rule is listed here. A list may only shrink: an entry that is no longer needed
fails the test as well.
"""

import ast
import re
from functools import cached_property
from pathlib import Path

import pytest

import house
from tests.helpers import ROOT

# From the top. A package imports itself and what stands in lower lines; packages on one line do not
# import each other, but for the last line, which is the common ground.
LAYERS = [
    {"cli"},
    {"front", "jax", "project", "torch", "trackers"},
    {"engines"},
    {"experiments"},
    {"device", "service"},
    {"wire"},
    {"rounds"},
    {"planner"},
    {"aggregation", "delivery"},
    {"data", "keys", "models"},
    {"server"},
    {"crypto"},
    {"primitives"},
    {
        "about",
        "arrays",
        "compiled",
        "computing",
        "digests",
        "errors",
        "extras",
        "files",
        "identity",
        "logs",
        "parts",
        "pricing",
        "sampling",
        "signals",
        "tree",
    },
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
COMMON = len(LAYERS) - 1

# Heavy or optional libraries, and the folders that may import them.
RESERVED = {
    "click": {"cli"},
    "cryptography": {
        "aggregation/masked",
        "crypto",
        "delivery/enclave",
        "delivery/pir",
        "delivery/relay",
        "project",
    },
    "dcap_qvl": {"delivery/enclave"},
    "dp_accounting": {"aggregation/privacy"},
    "flwr": {"engines/flower"},
    "jax": {"models", "rounds"},
    "matplotlib": {"data", "experiments/report"},
    "msgspec": {
        "device",
        "experiments/report",
        "experiments/watch",
        "project",
        "rounds",
        "service",
        "wire",
    },
    "numba": {
        "aggregation",
        "crypto",
        "delivery/enclave",
        "delivery/pir",
        "models",
        "server",
    },
    "obstore": {"service"},
    "prometheus_client": {"service"},
    "pyarrow": {"data"},
    "ray": {"engines/ray"},
    "rich": {"cli"},
    "mlflow": {"experiments"},
    "tensorboardX": {"experiments"},
    "torch": {"models"},
    "uvicorn": {"service"},
    "uvloop": {"service"},
    "wandb": {"experiments"},
}


# Public classes of one name that mean two things.
TWICE: set[str] = set()

# Words that are a way's name and occur, as a string of their own, in further files.
NAMED_ELSEWHERE = {
    "broadcast": {"service/app.py"},  # a path of the service
    "dense": {
        "engines/ray/shards.py",
        "models/dense.py",
        "server/snapshots.py",
    },
    "pir": {"cli/serve.py"},  # the option that makes a service a server of private retrieval
    "plain": {
        "cli/runs.py",
        "delivery/records.py",
        "service/segments.py",
        "service/transport.py",
    },
    "relay": {  # the party: its verb, its option, its name in messages, tokens for it
        "cli/device.py",
        "cli/main.py",
        "cli/token.py",
        "device/relayed.py",
        "service/access.py",
        "service/relay.py",
    },
}

# What files of service/ and device/ may import of delivery/: what moves bytes for any delivery.
FOR_ANY_DELIVERY = {
    "keyhole.delivery",
    "keyhole.delivery.base",
    "keyhole.delivery.clear",  # defaults
    "keyhole.delivery.exchange",
    "keyhole.delivery.paths",
    "keyhole.delivery.popular",
    "keyhole.delivery.records",
    "keyhole.delivery.sources",
}

# Oblivious HTTP is HTTP by nature: its halves that move requests.
HTTP_OF_THE_RELAY = {"device/relayed.py", "service/gateway.py", "service/relay.py"}

# Questions for a way's class: file and class.
ASKED_FOR = set()


class Source:
    """The package, parsed when a test first asks for it."""

    @cached_property
    def modules(self):
        return [house.Module(path) for path in sorted(house.SOURCE.rglob("*.py"))]

    @cached_property
    def known(self):
        return {module.name: module for module in self.modules}

    @cached_property
    def imports(self):
        """Name of a module -> names of those that it imports."""
        return {module.name: module.imports(self.known) for module in self.modules}

    @property
    def beside_init(self):
        return [module for module in self.modules if module.name != "keyhole"]


SOURCE = Source()


def package_of(name):
    """The part of a module's name that has a layer."""
    return name.split(".")[1]


def libraries_of(module):
    """What a module imports from elsewhere, wherever the statement stands."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module.partition(".")[0]


def allowed(importer, imported):
    if importer == imported:
        return True
    if RANK[importer] == RANK[imported] == COMMON:
        return True
    return RANK[importer] < RANK[imported]


def test_every_package_has_a_layer():
    assert {package_of(module.name) for module in SOURCE.beside_init} <= RANK.keys()


def test_imports_go_down_only():
    for module in SOURCE.beside_init:
        for name in SOURCE.imports[module.name] - {"keyhole"}:
            below = allowed(package_of(module.name), package_of(name))
            assert below, f"{module.path} imports {name}"
        for library in set(libraries_of(module)) & RESERVED.keys():
            assert module.folder in RESERVED[library], f"{module.path} imports {library}"


def test_libraries_are_reserved_for_those_who_import_them():
    used = {(library, m.folder) for m in SOURCE.modules for library in libraries_of(m)}
    assert {(library, folder) for library in RESERVED for folder in RESERVED[library]} <= used


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


def test_no_module_imports_itself_through_others():
    assert house.components(SOURCE.imports) == []


def test_no_folder_imports_itself_through_others():
    assert house.components(house.folder_graph(SOURCE.imports, SOURCE.known)) == []


def test_a_circle_is_seen():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert house.components(graph) == [["a", "b", "c"]]


def test_a_public_class_name_has_one_meaning():
    assert {
        name for name, where in house.classes(SOURCE.modules).items() if len(where) > 1
    } == TWICE


def test_only_packages_say_what_they_export():
    saying = {
        m.path for m in SOURCE.modules if not m.is_init and any(map(house.is_all, m.tree.body))
    }
    assert saying == {"errors.py"}


def test_a_way_is_named_in_one_file():
    strings = {module.path: module.strings() for module in SOURCE.modules}
    elsewhere = {}
    for way, declared in house.way_names(SOURCE.modules).items():
        files = {path for path, found in strings.items() if way in found}
        if files - {min(declared)}:
            elsewhere[way] = files - {min(declared)}
    assert elsewhere == NAMED_ELSEWHERE


def test_nobody_asks_which_way_it_is():
    found = {(path, name) for path, _, name in house.isinstance_on_ways(SOURCE.modules)}
    assert found == ASKED_FOR


# What services, devices and their messages know of sums: nothing of one of them.
OF_ALL_SUMS = {
    "keyhole.aggregation",
    "keyhole.aggregation.base",
    "keyhole.aggregation.exchange",
    "keyhole.aggregation.privacy.ledger",
    "keyhole.aggregation.privacy.mechanism",
    "keyhole.aggregation.shares",
    "keyhole.aggregation.sum_server",
}


def test_services_and_devices_carry_the_bytes_of_any_sum():
    carriers = [
        m for m in SOURCE.beside_init if package_of(m.name) in ("device", "service", "wire")
    ]
    known = {name for module in carriers for name in SOURCE.imports[module.name]}
    assert {name for name in known if package_of(name) == "aggregation"} == OF_ALL_SUMS


def test_services_and_devices_move_bytes_for_any_delivery():
    knowing = set()
    for module in SOURCE.modules:
        if module.path.startswith(("service/", "device/")):
            used = {
                name for name in SOURCE.imports[module.name] if name.startswith("keyhole.delivery")
            }
            if used - FOR_ANY_DELIVERY:
                knowing.add(module.path)
    assert knowing == HTTP_OF_THE_RELAY


def test_the_architecture_page_has_every_folder_from_the_top():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition("## The tree")[2].partition("## The records")[0]
    drawn = [name for row in re.findall(r"^\| (`.*?`) \|", table, re.M) for name in row.split()]
    drawn = [name.strip("`").removesuffix(".py") for name in drawn[1:]]
    assert [RANK[name.partition("/")[0]] for name in drawn] == sorted(
        RANK[name.partition("/")[0]] for name in drawn
    )
    files = {Path(module.path).stem for module in SOURCE.beside_init if module.folder == "."}
    assert set(drawn) == files | {module.folder for module in SOURCE.beside_init} - {"."}
