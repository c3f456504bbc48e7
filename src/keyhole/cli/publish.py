"""Runs `keyhole publish`: makes the state of a run a round that devices can fetch."""

from __future__ import annotations

import json
import secrets
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.bars import progress_bars
from keyhole.cli.numbers import write_bytes
from keyhole.cli.options import DIRECTORY, EXISTING_DIRECTORY, json_option, option, signing_option
from keyhole.cli.runs import coding_option, draws_of, open_saved, run_settings
from keyhole.cli.spec_options import data_option
from keyhole.delivery.records import Coding
from keyhole.logs import say

if TYPE_CHECKING:
    from keyhole.experiments.opening import SavedTrial
    from keyhole.service.publishing import Published, Publisher


@click.command()
@click.argument("run", type=EXISTING_DIRECTORY)
@click.argument("directory", type=DIRECTORY)
@data_option
@coding_option
@option("--segment-mb", type=click.IntRange(1), default=64, help="Max megabytes per file.")
@option("--threads", type=click.IntRange(1), default=2, help="Threads that share the work.")
@signing_option
@json_option
def publish(
    run: Path, directory: Path, data: str, coding: str, as_json: bool, **options: Any
) -> None:
    """Publish the state of RUN, a directory of `keyhole train`, as the next round in DIRECTORY.

    A round appears whole or not at all; `keyhole serve DIRECTORY` serves it. The two newest rounds
    are kept. --data is what the run was trained with: the model's shape follows from it.
    """
    from keyhole.service.publishing import Publisher
    from keyhole.wire.signing import SigningKey

    found = open_saved(run, data)
    key = SigningKey.load(options["signing_key"]) if options["signing_key"] else None
    with Publisher(directory, key) as publisher:
        published = _publish(publisher, found, coding, options)
    said = _describe(published, directory)
    if as_json:
        click.echo(json.dumps(said, indent=2))
    else:
        click.echo(
            f"round {said['round']}: step {said['step']}, {said['slices']:,} slices, "
            f"{write_bytes(said['bytes'])} in {directory}"
        )


def _publish(
    publisher: Publisher, run: SavedTrial, coding: str, options: dict[str, Any]
) -> Published:
    from keyhole.service.numbering import Numbering

    # As the round of a run of its own: one whose trainer uses this directory counts on from it.
    number = Numbering(publisher, secrets.token_hex(16)).of(0)
    draws = draws_of(run.directory)
    found = run.recover(options["threads"])
    with closing(found.store):
        for note in found.notes:
            say(f"keyhole: {note}")
        with progress_bars() as bars:
            bar = bars.add_task("publish", total=None, note="", unit="slices")
            return publisher.publish_state(
                found.state,
                number=number,
                coding=Coding(coding, draws.rounding()),  # type: ignore[arg-type]
                settings=run_settings(run.experiment, draws, number),
                threads=options["threads"],
                segment_bytes=options["segment_mb"] << 20,
                progress=lambda done, total: bars.update(bar, completed=done, total=total),
            )


def _describe(published: Published, directory: Path) -> dict[str, Any]:
    tables = published.manifest.tables
    return {
        "round": published.id,
        "number": published.manifest.number,
        "step": published.manifest.step,
        "directory": str(directory),
        "slices": sum(table.num_keys for table in tables),
        "bytes": sum(table.num_keys * table.record_bytes for table in tables),
        "files": sum(len(table.segments) for table in tables),
    }
