"""Runs `keyhole data`: shows what client data is there, and imports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from keyhole.cli.screen import import_shown
from keyhole.data.cache import DatasetManifest, cache_root, find_imported, read_manifest
from keyhole.data.open import SHARED, data_folder, find_current, find_dataset, list_datasets, verify

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


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
@click.option("--verify", "is_checked", is_flag=True, help="Compute all checksums again.")
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
@_JSON
def import_(source: str, as_json: bool) -> None:
    """Import a file or directory of a known format, unless that was done before."""
    was_there = find_current(source, cache_root())
    directory = was_there or import_shown(source)
    manifest = read_manifest(directory)
    if as_json:
        content = {**_summary(manifest), "directory": str(directory), "was_there": bool(was_there)}
        click.echo(json.dumps(content, indent=2))
        return
    click.echo(f"{manifest.name} {'was' if was_there else 'is'} imported")
    _print_info(manifest, directory, is_checked=False)


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
        click.echo(f"{name:14}{value}")
