"""Writes the pages of docs/ that follow from the code: reference/records.md and cli.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if one is not current
"""

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import get_type_hints

import click

from keyhole import errors
from keyhole.cli.main import keyhole
from keyhole.identity import Ref

DOCS = Path(__file__).parent
NOTE = "<!-- Written by `make docs` from the code; do not edit. -->\n"
RECORDS = {
    "keyhole.experiments.task": ("TaskKind", "TaskParts"),
    "keyhole.rounds.spec": (
        "RunSpec",
        "CohortSpec",
        "ClientSpec",
        "KeySpec",
        "ServerSpec",
        "AggregationSpec",
        "PrivacySpec",
        "AsyncSpec",
    ),
    "keyhole.data.federated": ("Dataset", "FederatedData"),
}
RECORD_OF = {
    "cohort": "A `CohortSpec`.",
    "client": "A `ClientSpec`.",
    "keys": "Key space -> `KeySpec`.",
    "server": "A `ServerSpec`.",
    "aggregation": "An `AggregationSpec`.",
    "privacy": "A `PrivacySpec`; none promises nothing.",
    "asynchronous": "An `AsyncSpec`; none for synchronous rounds.",
}


def first_sentence(value):
    return one_line(inspect.getdoc(value))


def one_line(text):
    """The first paragraph of a docstring."""
    return " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")


def records_page():
    """The records that a task of one's own is made of, with their fields."""
    about = "[Your own task](../own-task.md) shows them in use."
    lines = ["# Records of a task", "", NOTE, about, ""]
    for module, names in RECORDS.items():
        for name in names:
            record = getattr(importlib.import_module(module), name)
            lines += [f"## {name}", "", f"From `{module}`. {first_sentence(record)}", ""]
            lines += ["| field | default | meaning |", "|---|---|---|"]
            lines += [
                f"| `{field}` | {default} | {meaning} |"
                for field, default, meaning in fields_of(record)
            ]
            lines.append("")
    return "\n".join(lines)


def fields_of(record):
    """(name, default, meaning) of each field; the meaning is in its annotation or in Args."""
    args = args_of(inspect.getdoc(record))
    for name, parameter in inspect.signature(record).parameters.items():
        told = [getattr(each, "description", "") or "" for each in annotations_of(record, name)]
        meaning = args.get(name) or " ".join(filter(None, told)) or RECORD_OF.get(name, "")
        default = "" if parameter.default is parameter.empty else f"`{plain(parameter.default)}`"
        yield name, default, meaning.replace("|", "\\|")


def annotations_of(record, name):
    """What `Annotated` says of a field beside its type."""
    return getattr(get_type_hints(record, include_extras=True)[name], "__metadata__", ())


def args_of(doc):
    """Name -> text of the section Args of a docstring."""
    _, _, section = doc.partition("Args:\n")
    entries = re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: |\n))*)", section, re.M)
    return {name: " ".join(text.split()) for name, text in entries}


def plain(default):
    """A default as one would write it."""
    if isinstance(default, Ref):
        return f'Ref("{default}")'
    return "{}" if repr(default) == "<factory>" else repr(default)


def commands_of(name, command):
    """A command and, if it is a group, those below it."""
    yield name, command
    context = click.Context(command, info_name=name)
    for below in command.list_commands(context) if isinstance(command, click.Group) else ():
        yield from commands_of(f"{name} {below}", command.get_command(context, below))


def cli_page():
    lines = ["# Command line", "", NOTE]
    for name, command in commands_of("keyhole", keyhole):
        context = click.Context(
            command,
            info_name=name,
            max_content_width=100,
            terminal_width=100,
            **keyhole.context_settings,
        )
        lines += [f"## {name}", "", "```", command.get_help(context), "```", ""]
    lines += ["| exit code | when |", "|---|---|", "| 0 | done |"]
    kinds = [getattr(errors, name) for name in errors.__all__]
    for code in sorted({kind.exit_code for kind in kinds}):
        names = ", ".join(f"`{kind.__name__}`" for kind in kinds if kind.exit_code == code)
        lines.append(f"| {code} | {names} |")
    lines += ["| 130 | interrupted |", ""]
    return "\n".join(lines)


def main():
    pages = {DOCS / "reference" / "records.md": records_page(), DOCS / "cli.md": cli_page()}
    if sys.argv[1:] == ["--check"]:
        stale = [path.name for path, text in pages.items() if _read(path) != text]
        if stale:
            sys.exit(f"not current: {', '.join(stale)}; run make docs")
        return
    for path, text in pages.items():
        path.write_text(text)
        print(f"wrote docs/{path.relative_to(DOCS)}")


def _read(path):
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    main()
