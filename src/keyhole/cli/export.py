"""Runs `keyhole export`: the trained model of a run, as one file for other programs."""

from __future__ import annotations

from pathlib import Path

import click

from keyhole.cli.numbers import write_bytes
from keyhole.cli.options import EXISTING_DIRECTORY, FILE, option
from keyhole.cli.runs import open_saved
from keyhole.cli.spec_options import data_option


@click.command()
@click.argument("run", type=EXISTING_DIRECTORY)
@option(
    "--to",
    required=True,
    type=FILE,
    metavar="FILE",
    help="Where it goes: a name that ends in .npz, .safetensors or .onnx; an older file is "
    "replaced.",
)
@option(
    "--best",
    is_flag=True,
    help="The best model by the metric of a run with --best-metric or --patience, not the last.",
)
@data_option
def export(run: Path, to: Path, best: bool, data: str) -> None:
    """Write the model of RUN, a directory of `keyhole train`, to one file.

    Of a run of several trials, RUN is the directory of one of them.

    The parameters have their names and bytes; beside them stand the run's record, the rounds made
    and a digest, as JSON under the name `keyhole`. ONNX also has what the model predicts of
    examples; a model that has no such form is refused. --data is what the run was trained with: the
    model's shape follows from it.
    """
    from keyhole.experiments.opening import read_asked
    from keyhole.front.export import export_model

    found = open_saved(run, data)
    spec, _ = read_asked(found.directory)
    state = found.best_state() if best else found.state()
    digest = export_model(state, to, spec, found.experiment.task)
    click.echo(f"{to}: {write_bytes(to.stat().st_size)}, sha256 {digest}")
