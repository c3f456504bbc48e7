"""Writes the pages of docs/ that follow from the code: api.md and cli.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if one is not current
"""

import importlib
import inspect
import sys
from pathlib import Path

import click

from keyhole import errors
from keyhole.cli.main import keyhole

DOCS = Path(__file__).parent
NOTE = "<!-- Written by `make docs` from the code; do not edit. -->\n"
PACKAGES = {
    "keyhole": "The primitives. NumPy only.",
    "keyhole.server": "The same at memory speed, and the state of a server, on numba.",
    "keyhole.models": "What is trained, in JAX.",
    "keyhole.delivery": "How slices travel, in process, and what each way costs.",
    "keyhole.keys": "How clients choose keys.",
    "keyhole.data": "Client data: known files, imported once.",
    "keyhole.rounds": "Algorithms 1 and 2, and runs of them.",
    "keyhole.experiments": "The experiments, and what runs them.",
    "keyhole.service": "Slices and updates over a network.",
    "keyhole.errors": "Every error; each has an exit code and an HTTP status.",
}


def first_sentence(value):
    text = " ".join(inspect.getdoc(value).split("\n\n")[0].split())
    return text.replace("|", "\\|")


def signature(name, value):
    if inspect.isfunction(value):
        return f"`{name}({', '.join(inspect.signature(value).parameters)})`"
    return f"`{name}`"


def api_page():
    lines = ["# API", "", NOTE]
    for package, about in PACKAGES.items():
        module = importlib.import_module(package)
        lines += [f"## {package}", "", about, "", "| name | what it is |", "|---|---|"]
        for name in module.__all__:
            value = getattr(module, name)
            meaning = "A mapping by name." if isinstance(value, dict) else first_sentence(value)
            lines.append(f"| {signature(name, value)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def commands_of(name, command):
    """A command and, if it is a group, those below it."""
    yield name, command
    for below, inner in getattr(command, "commands", {}).items():
        yield from commands_of(f"{name} {below}", inner)


def cli_page():
    lines = ["# Command line", "", NOTE]
    for name, command in commands_of("keyhole", keyhole):
        context = click.Context(command, info_name=name, max_content_width=100, terminal_width=100)
        lines += [f"## {name}", "", "```", command.get_help(context), "```", ""]
    lines += ["| exit code | when |", "|---|---|", "| 0 | done |"]
    kinds = [getattr(errors, name) for name in errors.__all__]
    for code in sorted({kind.exit_code for kind in kinds}):
        names = ", ".join(f"`{kind.__name__}`" for kind in kinds if kind.exit_code == code)
        lines.append(f"| {code} | {names} |")
    lines += ["| 130 | interrupted |", ""]
    return "\n".join(lines)


def main():
    pages = {DOCS / "api.md": api_page(), DOCS / "cli.md": cli_page()}
    if sys.argv[1:] == ["--check"]:
        stale = [path.name for path, text in pages.items() if _read(path) != text]
        if stale:
            sys.exit(f"not current: {', '.join(stale)}; run make docs")
        return
    for path, text in pages.items():
        path.write_text(text)
        print(f"wrote docs/{path.name}")


def _read(path):
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
