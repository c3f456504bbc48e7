"""Runs `keyhole data`: shows what client data is there, and imports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from keyhole.cli.bars import progress_bars
from keyhole.cli.options import DIRECTORY, NumberRange, option, refuse
from keyhole.cli.screen import import_shown
from keyhole.data.cache import DatasetManifest, cache_root, find_imported, read_manifest
from keyhole.data.open import SHARED, data_folder, find_current, find_dataset, list_datasets, verify

_JSON = option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def data() -> None:
    """List, inspect and import client data.

    Data is imported once, to the folder KEYHOLE_CACHE (or keyhole in the user's cache). Files in
    the folder KEYHOLE_DATA go by a bare name, such as femnist.
    """


@data.command("list")
@_JSON
def list_(as_json: bool) -> None:
    """Show what is imported, and what the folder KEYHOLE_DATA holds."""
    imported, files = list_datasets(), _shared_files()
    if as_json:
        folder = data_folder()
        content = {
            "cache": str(cache_root()),
            "folder": str(folder) if folder else None,
            "imported": [_summary(manifest) for manifest in imported],
            "files": files,
        }
        click.echo(json.dumps(content, indent=2))
        return
    waiting = [file for file in files if not file["imported"]]
    if not imported and not waiting:
        click.echo("nothing is imported: try keyhole data import PATH, or set KEYHOLE_DATA")
        return
    Console().print(_overview(imported, waiting))


@data.command()
@click.argument("source", metavar="NAME|PATH")
@option("--verify", "is_checked", is_flag=True, help="Compute all checksums again.")
@_JSON
def info(source: str, is_checked: bool, as_json: bool) -> None:
    """Show counts, licence, source and checksums of an imported dataset."""
    directory = find_dataset(source)
    manifest = verify(source) if is_checked else read_manifest(directory)
    content = {**_summary(manifest), "directory": str(directory), "sources": manifest.sources}
    content |= {"facts": manifest.facts, "files": manifest.files, "verified": is_checked}
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    _print_info(manifest, directory, is_checked)


@data.command("import")
@click.argument("source", metavar="PATH")
@option("--client", metavar="COLUMN", help="A table of your own: whose row it is.")
@option(
    "--input",
    metavar="COLUMN=SPACE",
    multiple=True,
    help="With --client: a column that names keys of a key space; may be given again.",
)
@option("--target", metavar="COLUMN", help="With --client: the column that is predicted.")
@option(
    "--hold-out",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    show_default="0.1",
    help="With --client: the share that is set aside to test on.",
)
@option(
    "--by",
    type=click.Choice(["client", "time", "within"]),
    show_default="client",
    help="With --client: set aside clients, the latest rows of all, or some of each client.",
)
@option("--time", metavar="COLUMN", help="With --by: the column of times.")
@option(
    "--name",
    show_default="the file's",
    help="With --client: the name of the dataset.",
)
@_JSON
def import_(source: str, as_json: bool, client: str | None, **own: Any) -> None:
    """Import a file or directory of a known format, unless that was done before.

    A table of your own (.csv, .jsonl, .npz or .parquet) is imported with --client COLUMN.
    """
    if client is not None:
        directory, was_there = _import_own(Path(source), client, own)
    else:
        refuse(own, own, "needs --client, which says whose row it is")
        found = find_current(source, cache_root())
        directory, was_there = found or import_shown(source), found is not None
    manifest = read_manifest(directory)
    if as_json:
        content = {**_summary(manifest), "directory": str(directory), "was_there": was_there}
        click.echo(json.dumps(content, indent=2))
        return
    click.echo(f"{manifest.name} {'was' if was_there else 'is'} imported")
    _print_info(manifest, directory, is_checked=False)


def _import_own(path: Path, client: str, own: dict[str, Any]) -> tuple[Path, bool]:
    """Imports a table of one's own, with a bar for each step."""
    from keyhole.data.open import OwnFile, import_table

    inputs = {}
    for said in own["input"]:
        column, _, space = said.rpartition("=")
        if not (column and space):
            raise click.UsageError(
                f"--input names no key space: got {said!r}; expected COLUMN=SPACE"
            )
        inputs[column] = space
    named = {"target": "target", "hold_out": "share", "by": "by", "time": "time", "name": "name"}
    given = {to: own[option] for option, to in named.items() if own[option] is not None}
    file = OwnFile(path, client, inputs, **given)
    with progress_bars() as bars:
        hashing = bars.add_task(f"hash {file.called}", total=None, note="", unit="bytes")
        reading = bars.add_task(f"import {file.called}", total=None, note="", unit="bytes")
        directory, was_there = import_table(
            file,
            hashing=lambda done, total: bars.update(hashing, completed=done, total=total),
            progress=lambda done, total: bars.update(reading, completed=done, total=total),
        )
        for bar in bars.tasks:
            bar.visible = bool(bar.completed)
    return directory, was_there


@data.command()
@click.argument("name")
@click.argument("sources", metavar="FROM...", nargs=-1, required=True)
@option(
    "--out",
    type=DIRECTORY,
    help="Folder that it is written to.",
    show_default="the folder KEYHOLE_DATA",
)
def make(name: str, sources: tuple[str, ...], out: Path | None) -> None:
    """Make a data file of the experiments from what its source publishes, unpacked.

    \b
    femnist, femnist_mini              LEAF's folder with train and test, or
                                       NIST's with by_class and by_write
    stackexchange, stackexchange_mini  folders of Stack Exchange dumps (Posts.xml)
    movielens_small                    ml-latest-small of GroupLens, folder or zip
    """
    from keyhole.data.make import make_file

    folder = out or data_folder()
    if folder is None:
        raise click.UsageError("no folder to write to: set KEYHOLE_DATA, or give --out FOLDER")
    with progress_bars() as bars:
        making = bars.add_task(f"make {name}", total=None, note="")
        path = make_file(
            name,
            sources,
            folder,
            lambda done, total: bars.update(making, completed=done, total=total),
        )
    click.echo(f"{path} is made")


def _shared_files() -> list[dict[str, Any]]:
    folder = data_folder()
    if folder is None:
        return []
    paths = {name: folder / file for name, file in SHARED.items() if (folder / file).is_file()}
    return [
        {
            "name": name,
            "path": str(path),
            "bytes": path.stat().st_size,
            "imported": find_imported(path, cache_root()) is not None,
        }
        for name, path in paths.items()
    ]


def _summary(manifest: DatasetManifest) -> dict[str, Any]:
    return {
        "name": manifest.name,
        "kind": manifest.kind,
        "splits": manifest.splits,
        "bytes": manifest.num_bytes,
        "licence": manifest.facts["licence"],
        "sha256": manifest.facts["sha256"],
    }


def _overview(imported: list[DatasetManifest], waiting: list[dict[str, Any]]) -> Table:
    table = Table(caption="clients and examples to train on; size on disk")
    for name in ("name", "kind", "clients", "examples", "size", "licence"):
        is_number = name in ("clients", "examples", "size")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "licence")
    for manifest in imported:
        train = manifest.splits["train"]
        counts = f"{train['clients']:,}", f"{train['examples']:,}"
        size, licence = decimal(manifest.num_bytes), manifest.facts["licence"]
        table.add_row(manifest.name, manifest.kind, *counts, size, licence)
    for file in waiting:
        table.add_row(file["name"], "not imported", "", "", decimal(file["bytes"]), "")
    return table


def _print_info(manifest: DatasetManifest, directory: Path, is_checked: bool) -> None:
    table = Table("split", title=f"{manifest.name}: {manifest.kind}", title_justify="left")
    for name in ("clients", "examples"):
        table.add_column(name, justify="right")
    for split, sizes in manifest.splits.items():
        table.add_row(split, f"{sizes['clients']:,}", f"{sizes['examples']:,}")
    Console().print(table)
    lines = {**manifest.facts, "imported from": manifest.origin, "kept in": str(directory)}
    lines["size on disk"] = decimal(manifest.num_bytes)
    lines["checksums"] = "computed again, all match" if is_checked else "not computed again"
    for name, value in lines.items():
        click.echo(f"{name:13} {value}")
