"""`keyhole device`: take part in the rounds of a slice service, or fetch slices of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import click
import numpy as np
from numpy.typing import NDArray

from keyhole.cli.aggregators import device_sum_options, send_of
from keyhole.cli.deliveries import delivery_options, fetch_of
from keyhole.cli.inputs import data_option, load_data, start_jax, synthetic_sizes
from keyhole.cli.notices import Notices
from keyhole.cli.token import read_token
from keyhole.cli.train import SETTINGS, read_arm, train

if TYPE_CHECKING:
    from keyhole.serving.device.device import Device
    from keyhole.serving.device.participation import Fetch, Send, Taken
    from keyhole.serving.device.population import RunSettings
    from keyhole.training.clients import Clients

__all__ = ["device"]

# Options of `keyhole train` that decide how a client chooses and trains; the rest is the run's.
_ARM = ("choices", "sizes", "algorithm", "client_lr", "batch_size", "max_examples", "min_examples")
_FILE = click.Path(dir_okay=False, path_type=Path)


def _arm_options(command: click.Command) -> click.Command:
    """Adds the options that this command shares with `keyhole train`."""
    shared = [param for param in train.params if param.name in (*_ARM, "negatives")]
    command.params.extend(shared)
    return command


@_arm_options
@click.command()
@click.argument("url")
@click.option("--token-file", type=_FILE, help="The token of this device, from the operator.")
@click.option("--ca", type=_FILE, help="PEM file of the authorities to trust.")
@click.option("--cert", type=_FILE, help="PEM file to show where the service asks for one.")
@click.option("--key", type=_FILE, help="Its private key.")
@click.option("--insecure", is_flag=True, help="Speak plain http beyond this machine.")
@click.option(
    "--cache",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep slices here: those that have not changed are not sent again.",
)
@click.option(
    "--most-mb",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Refuse a slice or a segment of more megabytes.",
)
@click.option("--rounds", type=click.IntRange(1), help="Take part so often; else until stopped.")
@delivery_options
@device_sum_options
@click.option("--task", help="Train as a client of this task, as `keyhole train` does.")
@click.option("--client", type=click.IntRange(0), default=0, help="Number of that client.")
@data_option
@click.option("--table", help="Fetch slices of this table instead.")
@click.option("--slices", metavar="KEY,KEY,...", help="Keys of those slices.")
@click.option("--out", type=_FILE, help="Where they go: an .npz file, one array per parameter.")
def device(url: str, **options: Any) -> None:
    """Take part in the rounds of the slice service at URL, or fetch slices of it.

    With --task, the device chooses keys, fetches their slices, trains on the data of one client and
    sends its update, round after round. With --table, it fetches slices and writes them to a file.

    A run knows its client N, the one of --client, as device-N: the token is to be for that name.

    A device trains by its own options: give --data, --size, --keys, --algorithm, --client-lr,
    --batch-size, --max-examples, --min-examples and --negatives as the trainer has them. Seed,
    trial and keys per client come with each round.
    """
    if (options["task"] is None) == (options["table"] is None):
        raise click.UsageError("pass either --task or --table")
    if options["table"] is not None and options["delivery"] != "clear":
        raise click.UsageError("--table fetches in the clear: leave out --delivery")
    from keyhole.training.loop import stop_on_signals

    with stop_on_signals() as stop, ExitStack() as stack:
        notices = Notices()

        def connect(
            name: str, url: str, token_file: Path | None, cache: Path | None = None
        ) -> Device:
            made = _device(url, stop, options, token_file, cache, partial(_tell, notices, name))
            return stack.enter_context(closing(made))

        made = connect("service", url, options["token_file"], options["cache"])
        if options["table"] is not None:
            _fetch(made, options)
            return
        fetch, send = fetch_of(options, connect), send_of(options, connect)
        _take_part(made, fetch, options, notices, send)


def _tell(notices: Notices, name: str, reason: str) -> None:
    """What a device says when one of its services is to be asked again."""
    notices.tell(f"{name}: {reason}, trying again")


def _device(
    url: str,
    stop: threading.Event,
    options: Mapping[str, Any],
    token_file: Path | None,
    cache: Path | None,
    tell: Callable[[str], None],
) -> Device:
    from keyhole.serving.device.addresses import (
        Certificate,  # these need not be waited for by --help
    )
    from keyhole.serving.device.device import Device
    from keyhole.serving.device.retrying import Retry
    from keyhole.serving.device.slice_cache import SliceCache

    if (options["cert"] is None) != (options["key"] is None):
        raise click.UsageError("--cert and --key belong together")
    pair = None if options["cert"] is None else Certificate(options["cert"], options["key"])
    return Device(
        url,
        token=None if token_file is None else read_token(token_file),
        ca=options["ca"],
        certificate=pair,
        cache=None if cache is None else SliceCache(cache),
        retry=Retry(tell=tell),
        most_answer=options["most_mb"] << 20,
        stop=stop,
        insecure=options["insecure"],
    )


def _take_part(
    made: Device,
    fetch: Fetch,
    options: Mapping[str, Any],
    notices: Notices,
    send: Send | None = None,
) -> None:
    from keyhole.serving.device.participation import keep_taking_part
    from keyhole.serving.device.population import PopulationClient

    population = PopulationClient(options["client"], _population(options))

    def show(taken: Taken) -> None:
        notices.forget()
        click.echo(_line_of(taken))

    def wait(seconds: float) -> None:
        notices.tell(f"no round for this device, asking again in {seconds:.1f} s", kind="wait")

    taken = keep_taking_part(
        made,
        population.participant(fetch, send or type(made).send),
        rounds=options["rounds"] or inf,
        on_round=show,
        on_miss=lambda error: notices.tell(f"missed a round: {error}"),
        on_wait=wait,
    )
    click.echo(f"took part in {taken} rounds")


def _population(options: Mapping[str, Any]) -> Callable[[RunSettings], Clients]:
    """Makes the population as `keyhole train` does, with what the run tells its devices."""
    from keyhole.tasks.experiment import Experiment
    from keyhole.tasks.named import task_named

    kind = task_named(options["task"])
    data = options["data"]

    def make(settings: RunSettings) -> Clients:
        start_jax()
        given = {name: options.get(name) for name in SETTINGS if name != "rounds"}
        rest = {"rounds": None, "counts": (), "mean_over": "cohort", "seed": settings.seed}
        # How this device fetches is its own business, and no part of what it trains.
        arm = read_arm(kind, {**options, **given, **rest, "delivery": None})
        arm = replace(arm, keys_per_client=settings.keys_per_client)
        sizes = synthetic_sizes(data, [arm])
        experiment = Experiment(arm, load_data(data, kind.kind, settings.seed, **sizes))
        experiment.check()
        return experiment.clients

    return make


def _fetch(made: Device, options: Mapping[str, Any]) -> None:
    if options["slices"] is None or options["out"] is None:
        raise click.UsageError("--table needs --slices and --out")
    try:
        keys = np.array([int(text) for text in options["slices"].split(",")])
    except ValueError:
        raise click.BadParameter("not whole numbers with commas", param_hint="--slices") from None
    now = made.current()
    found = made.fetch_slices(now.round, options["table"], keys)
    _save(options["out"], found)
    click.echo(f"{len(keys)} slices of round {now.number}: {options['out']}")


def _save(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Writes an .npz file; `np.savez` would take some names of parameters for its own."""
    from keyhole.server.files import storage_errors

    with storage_errors(path, "write"), ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _line_of(taken: Taken) -> str:
    missing = f", {taken.missing} keys found no place in a query" if taken.missing else ""
    return (
        f"round {taken.number}: {taken.keys} keys, {taken.bytes_down} bytes received, "
        f"{taken.bytes_up} sent, {taken.reused} slices unchanged{missing}"
    )
