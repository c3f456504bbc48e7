"""Prints how far the tree is: counts of modules, imports, names and of what a round passes.

    python tools/house.py            the table, in Markdown
    python tools/house.py --json     the same and the lists behind it
    python tools/house.py --quick    without what runs code

The counts are a compass: rules that must hold are tests. What runs code is in `house_runs.py` and
takes two minutes.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from house_runs import PACKAGE, SOURCE, run_code

# --- What a change of names touches; commands and entry points are at the top of house_runs.py.

WAY_FOLDERS = ("delivery", "aggregation")
SHARED_BY_WAYS = ("delivery/records", "delivery/sources")  # what is delivered, by any way
WAY_LITERALS = ("AggregationName",)  # their members are names of ways,
WAY_RECORDS = ("About", "AggregationAbout", "DeliveryAbout")  # and so is `name=` of these
SHOWN_WAYS = ("pir-one-server", "secure-sparse")

GOALS = {
    "modules with / without `__init__`": "<= 205 / about 170",
    "median lines / above 500 / 40 code lines or fewer beside `__init__`": "200-350 / 0 / <= 20",
    "lines in src; share of imports and `__all__`": "<= 47,000; <= 11 %",
    "modules imported by exactly one other": "",
    "files passed by `run_round`: in process / private / served": "<= 24 / <= 40 / <= 60",
    "modules loaded: clear fetch / importing a task / `--help`": "<= 60 / <= 110 / <= 40",
    "files with a way's name: " + ", ".join(f'`"{name}"`' for name in SHOWN_WAYS): "1, 1",
    "`isinstance` on ways; duplicate public class names": "0; 0",
    "folder cycles; module cycles; `most_`/`least_`": "0; 0; 0",
}

# ---


class Module:
    """A file of the package, parsed."""

    def __init__(self, path: Path) -> None:
        self.path = path.relative_to(SOURCE).as_posix()
        self.folder = path.parent.relative_to(SOURCE).as_posix()
        self.is_init = path.name == "__init__.py"
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if self.is_init else parts)
        self.text = path.read_text()
        self.lines = len(self.text.splitlines())
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        """All of it, with comments."""
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    def strings(self) -> set[str]:
        """Its string literals, without docstrings and names in `__all__`."""
        left_out = [n for n in self.nodes if _is_text(n) or is_all(n)]
        ignored = {id(n) for found in left_out for n in ast.walk(found)}
        found = [n for n in self.nodes if isinstance(n, ast.Constant) and id(n) not in ignored]
        return {n.value for n in found if isinstance(n.value, str)}

    def import_lines(self) -> set[int]:
        """Code lines of imports and `__all__`."""
        found = [n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom)]
        found += [n for n in self.tree.body if is_all(n)]
        return {line for n in found for line in _lines(n)} & self.code

    def imports(self, known: Mapping[str, Module]) -> set[str]:
        """Modules of the package that it imports, wherever the statement stands."""
        found = set()
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= {name if name in known else str(node.module) for name in inner}
        return found & known.keys() - {self.name}

    @cached_property
    def code(self) -> set[int]:
        """Numbers of its lines of code: neither comments nor docstrings."""
        blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
        blank |= {tokenize.DEDENT, tokenize.ENDMARKER}
        code = {
            line
            for token in self.tokens
            if token.type not in blank
            for line in range(token.start[0], token.end[0] + 1)
        }
        return code - {line for n in self.nodes if _is_text(n) for line in _lines(n)}


def _lines(node: ast.AST) -> range:
    return range(node.lineno, node.end_lineno + 1)


def is_all(node: ast.AST) -> bool:
    """Whether it is an assignment to `__all__`."""
    return isinstance(node, ast.Assign) and "__all__" in map(_name_of, node.targets)


def _is_text(node: ast.AST) -> bool:
    """Whether it is a docstring, or another string that stands for itself."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _name_of(node: ast.AST) -> str:
    """The last word of a name: `c` of `a.b.c`."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other, of two nodes or more, largest first."""
    reach = {node: _reached(graph, node) for node in graph}
    found = {
        tuple(sorted(n for n in reach[node] if node in reach[n]))
        for node in graph
        if node in reach[node]
    }
    return sorted(map(list, found), key=lambda nodes: (-len(nodes), nodes))


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        new = graph.get(left.pop(), set()) - seen
        seen |= new
        left += new
    return seen


def folder_graph(graph: Mapping[str, set[str]], known: Mapping[str, Module]) -> dict[str, set[str]]:
    """Imports between folders, without those of `__init__`, which collects names from below; each
    file of the package's own folder is a node for itself."""

    def node(name: str) -> str:
        module = known[name]
        return module.path if module.folder == "." else module.folder

    folders: dict[str, set[str]] = defaultdict(set)
    for name, imported in ((n, i) for n, i in graph.items() if not known[n].is_init):
        folders[node(name)] |= {node(other) for other in imported} - {node(name)}
    return folders


def way_names(modules: Sequence[Module]) -> dict[str, set[str]]:
    """Name of each delivery and aggregation -> the files that declare it."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in (n for declared in _declared(module) for n in ast.walk(declared)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[node.value].add(module.path)
    return found


def _declared(module: Module) -> Iterator[ast.AST]:
    """Expressions of a module that hold names of ways."""
    for node in module.nodes:
        if isinstance(node, ast.AnnAssign) and _name_of(node.target) in WAY_LITERALS:
            yield from [] if node.value is None else [node.value]
        elif isinstance(node, ast.Call) and _name_of(node.func) in WAY_RECORDS:
            yield from (word.value for word in node.keywords if word.arg == "name")


def classes(modules: Sequence[Module]) -> dict[str, list[Module]]:
    """Public class -> the modules that define it at their top."""
    found: dict[str, list[Module]] = defaultdict(list)
    for module in modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(module)
    return found


def isinstance_on_ways(modules: Sequence[Module]) -> list[tuple[str, int, str]]:
    """Places outside a way's own folder that ask whether something is one of its classes: file,
    line, class."""
    places = []
    for module in modules:
        ways = _imported_ways(module)
        for node in module.nodes:
            if isinstance(node, ast.Call) and _name_of(node.func) == "isinstance":
                named = {_name_of(n) for n in ast.walk(node.args[1])}
                places += [(module.path, node.lineno, name) for name in sorted(named & ways)]
    return places


def _imported_ways(module: Module) -> set[str]:
    """Names that a module imports from folders of ways other than its own."""
    found = set()
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom):
            path = str(node.module).removeprefix(PACKAGE).strip(".").replace(".", "/")
            folder = path if (SOURCE / path).is_dir() else path.rpartition("/")[0]
            is_way = _is_in_ways(folder) and path not in SHARED_BY_WAYS
            if folder != module.folder and is_way:
                found |= {alias.asname or alias.name for alias in node.names}
    return found


def _is_in_ways(folder: str) -> bool:
    return f"{folder}/".startswith(tuple(f"{way}/" for way in WAY_FOLDERS))


def read_source() -> dict[str, Any]:
    """All that is counted without running code."""
    modules = [Module(path) for path in sorted(SOURCE.rglob("*.py"))]
    beside = [m for m in modules if not m.is_init]
    known = {m.name: m for m in modules}
    graph = {m.name: m.imports(known) for m in modules}
    importers = Counter(name for imported in graph.values() for name in imported)
    code = sum(len(m.code) for m in modules)
    names = [t.string for m in modules for t in m.tokens if t.type == tokenize.NAME]
    strings = {m.path: m.strings() for m in modules}
    named = {
        way: sorted(path for path, found in strings.items() if way in found)
        for way in sorted(way_names(modules))
    }
    twice = {k: [m.path for m in v] for k, v in classes(modules).items() if len(v) > 1}
    return {
        "modules": len(modules),
        "modules_beside_init": len(beside),
        "median_lines": median(m.lines for m in modules),
        "median_lines_beside_init": median(m.lines for m in beside),
        "above_500": sum(m.lines > 500 for m in modules),
        "small": sum(len(m.code) <= 40 for m in modules),
        "small_beside_init": sum(len(m.code) <= 40 for m in beside),
        "lines": sum(m.lines for m in modules),
        "code_lines": code,
        "import_share": round(sum(len(m.import_lines()) for m in modules) / code, 4),
        "imported_once": sum(importers[m.name] == 1 for m in beside),
        "folder_cycles": components(folder_graph(graph, known)),
        "module_cycles": components(graph),
        "duplicate_classes": twice,
        "isinstance_on_ways": isinstance_on_ways(modules),
        "most_least_with_underscore": _count(r"(^|_)(most|least)_", names),
        "most_least": _count(r"(^|_)(most|least)(_|$)", names),
        "way_names": named,
    }


def _count(pattern: str, names: Sequence[str]) -> int:
    return sum(re.search(pattern, name, re.IGNORECASE) is not None for name in names)


def rows(found: Mapping[str, Any]) -> list[str]:
    """What is now, in the order of `GOALS`."""

    def sizes(name: str) -> str:
        return " / ".join(str(len(v)) for v in found[name].values()) if name in found else "-"

    asking = {(path, line) for path, line, _ in found["isinstance_on_ways"]}
    return [
        f"{found['modules']} / {found['modules_beside_init']}",
        f"{found['median_lines']:g} / {found['above_500']} / {found['small_beside_init']}",
        f"{found['lines']:,}; {found['import_share']:.1%}",
        f"{found['imported_once']}",
        sizes("files_passed"),
        sizes("modules_loaded"),
        ", ".join(str(len(found["way_names"].get(name, ()))) for name in SHOWN_WAYS),
        f"{len(asking)}; {len(found['duplicate_classes'])}",
        f"{len(found['folder_cycles'])}; {len(found['module_cycles'])}; {found['most_least']}",
    ]


def print_table(found: Mapping[str, Any]) -> None:
    """Prints the table, and below it what its counts stand for."""
    print("| check | now | goal |\n|---|---|---|")
    for (check, goal), now in zip(GOALS.items(), rows(found), strict=True):
        print(f"| {check} | {now} | {goal} |")
    ways = ", ".join(f"{name} {len(files)}" for name, files in found["way_names"].items())
    print(f"\nFiles with each way's name: {ways}.")
    print("Duplicate class names:", ", ".join(found["duplicate_classes"]) or "none")
    for nodes in found["folder_cycles"]:
        print("Folder cycle:", ", ".join(nodes))
    for path, line, name in found["isinstance_on_ways"]:
        print(f"isinstance on a way: {path}:{line} {name}")


def main() -> None:
    """Reads the arguments and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print counts and lists as JSON")
    parser.add_argument("--quick", action="store_true", help="leave out what runs code")
    options = parser.parse_args()
    found = read_source() | ({} if options.quick else run_code())
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print_table(found)


if __name__ == "__main__":
    main()
