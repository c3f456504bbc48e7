"""Runs `keyhole lookup`: fetches rows of a published model in private."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from keyhole.cli.device import write_arrays
from keyhole.cli.options import FILE, ArraysFile, option
from keyhole.cli.token import read_token


@click.command()
@click.argument("url")
@option(
    "--keys",
    required=True,
    multiple=True,
    metavar="SPACE=K,K,...",
    help="Whose rows are fetched; once for each key space.",
)
@option("--out", required=True, type=ArraysFile(), help="Where rows go: an .npz file.")
@option("--second", metavar="URL", help="The second of two servers; without it, one is asked.")
@option("--round", "round_id", help="Of this round; without it, of the newest.")
@option("--token-file", type=FILE, help="A device's token, where the service asks for one.")
@option("--second-token-file", type=FILE, help="Likewise of the second.")
@option("--ca", type=FILE, help="PEM file of the authorities to trust, in place of the system's.")
def lookup(
    url: str,
    keys: Sequence[str],
    out: Path,
    second: str | None,
    round_id: str | None,
    token_file: Path | None,
    second_token_file: Path | None,
    ca: Path | None,
) -> None:
    """Fetch rows of the model that the service at URL has published, such as embeddings of words,
    without telling it which.

    One server learns nothing under the Module-LWE assumption (`keyhole serve --pir one`); two learn
    nothing unless they work together, and send less (`--pir 0` and `--pir 1`, with --second).
    """
    from keyhole.device.device import Device
    from keyhole.device.lookup import Lookup

    if second is None and second_token_file is not None:
        raise click.UsageError("--second-token-file goes with --second")
    asked = _read_keys(keys)

    def connect(at: str, token: Path | None) -> Device:
        return Device(at, token=read_token(token) if token else None, ca=ca)

    other = connect(second, second_token_file) if second else None
    with Lookup(connect(url, token_file), other, round=round_id) as look:
        found = look(asked)
    spaces = {f"keys:{name}": array for name, array in found.keys.items()}
    write_arrays(out, {**spaces, **found.arrays})
    total = sum(map(len, found.keys.values()))
    click.echo(
        f"{total} rows: {out}; {found.bytes_down:,} bytes received, {found.bytes_up:,} sent; the "
        f"whole model has {found.model_bytes:,}"
    )


def _read_keys(texts: Sequence[str]) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for text in texts:
        name, _, numbers = text.partition("=")
        try:
            found[name] = np.array([int(each) for each in numbers.split(",")], np.int64)
        except ValueError:
            raise click.BadParameter(
                f"got {text!r}; expected a key space, = and whole numbers with commas; write it "
                "as in --keys word=7,42",
                param_hint="--keys",
            ) from None
    return found
