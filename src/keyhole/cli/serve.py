"""`keyhole serve`: give out the slices of a rounds directory, and take updates in."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.inputs import data_option
from keyhole.cli.listening import listen_of, listen_options
from keyhole.cli.private_serving import check_tables, extra_routes, private_options
from keyhole.cli.runs import coding_option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from keyhole.cli.private_serving import ExtraRoutes
    from keyhole.delivery.records import CodingKind
    from keyhole.serving.coordinator import Pace
    from keyhole.serving.service.access import Access
    from keyhole.serving.service.app import App
    from keyhole.serving.service.limits import Limits
    from keyhole.serving.service.metrics import Metrics
    from keyhole.serving.tables import RoundSource

__all__ = ["serve"]

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@listen_options(8100)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Processes that answer; each counts the rates of devices for itself.",
)
@click.option("--token-key", type=_FILE, help="Signing keys; without them no updates are taken.")
@click.option(
    "--open-reads/--token-reads",
    default=True,
    show_default=True,
    help="Whether slices are for everyone, or for devices with a token of the round.",
)
@click.option(
    "--max-keys",
    default=65_536,
    show_default=True,
    type=click.IntRange(1, 2**31),
    help="Keys that one query may name.",
)
@click.option(
    "--max-body-mb",
    default=64,
    show_default=True,
    type=click.IntRange(1, 4096),
    help="Size of an update.",
)
@click.option(
    "--spread",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 86_400),
    help="Seconds over which devices of a round begin to fetch.",
)
@click.option(
    "--again",
    default=5.0,
    show_default=True,
    type=click.FloatRange(0.01, 86_400),
    help="Seconds, on average, until a device without a round asks again.",
)
@click.option("--verify", is_flag=True, help="Read and check the current round first.")
@click.option(
    "--on-demand",
    is_flag=True,
    help="DIRECTORY is a trial's of `keyhole train`: compute slices of its model as they are asked "
    "for, each once. One process; takes no updates.",
)
@coding_option
@data_option
@click.option(
    "--memory-mb",
    default=1024,
    show_default=True,
    type=click.IntRange(1),
    help="With --on-demand: for slices that are kept.",
)
@private_options
def serve(
    directory: Path,
    workers: int,
    token_key: Path | None,
    open_reads: bool,
    max_keys: int,
    max_body_mb: int,
    spread: float,
    again: float,
    verify: bool,
    on_demand: bool,
    coding: CodingKind,
    data: str,
    memory_mb: int,
    **options: Any,
) -> None:
    """Serve the slices of the rounds in DIRECTORY until interrupted."""
    from keyhole.serving.coordinator import Pace
    from keyhole.serving.service.access import Access, Keyring
    from keyhole.serving.service.limits import Limits
    from keyhole.serving.service.transport import run

    keyring = None if token_key is None else Keyring.load(token_key)
    access = Access(keyring, reads_need_token=not open_reads)
    limits = Limits(most_keys=max_keys, most_body=max_body_mb << 20)
    listen = listen_of(options)
    extra = extra_routes(options, workers)
    if on_demand:
        if workers > 1:
            raise click.UsageError("--on-demand computes each slice once, in one process")

        def checked(rounds: RoundSource) -> ExtraRoutes:
            check_tables(options, rounds)  # in the worker: the round is there no sooner
            return extra(rounds)

        make = _on_demand_maker(directory, access, limits, data, coding, memory_mb << 20, checked)
    else:
        _check(directory, verify, options)
        make = _app_maker(directory, access, limits, Pace(spread, again), extra)

    def tell(url: str) -> None:
        click.echo(f"serving {directory} at {url}", err=True)

    run(make, listen, workers=workers, on_listen=tell)


def _app_maker(
    directory: Path,
    access: Access,
    limits: Limits,
    pace: Pace,
    extra: Callable[[RoundSource], ExtraRoutes],
) -> Callable[[Metrics], App]:
    """Makes the service of one worker."""
    import random
    import secrets
    from functools import partial

    from keyhole.serving.coordinator import admit
    from keyhole.serving.files.reading import RoundsDirectory
    from keyhole.serving.files.update_spool import UpdateSpool
    from keyhole.serving.service.app import App

    def make(metrics: Metrics) -> App:
        rng, rounds = random.Random(secrets.randbits(64)), RoundsDirectory(directory)
        return App(
            rounds,
            access=access,
            limits=limits,
            spool=None if access.keyring is None else UpdateSpool(directory / "updates"),
            admit=partial(admit, pace=pace, uniform=rng.random),
            metrics=metrics,
            extra_routes=extra(rounds),
            rng=rng,
        )

    return make


def _on_demand_maker(
    run: Path,
    access: Access,
    limits: Limits,
    data: str,
    coding: CodingKind,
    most_bytes: int,
    extra: Callable[[RoundSource], ExtraRoutes],
) -> Callable[[Metrics], App]:
    """Makes a service that computes slices of a run's model as they are asked for."""
    from concurrent.futures import ThreadPoolExecutor

    from keyhole.cli.runs import read_run, run_settings
    from keyhole.delivery.records import Coding
    from keyhole.delivery.sources import sources_of
    from keyhole.server.store import recover
    from keyhole.serving.on_demand.rounds import OnDemandRounds
    from keyhole.serving.on_demand.slab_table import Counts
    from keyhole.serving.service.app import App

    def make(metrics: Metrics) -> App:
        # In the worker: what computes slices has threads of its own, which no fork carries over.
        experiment = read_run(run, data)
        found = recover(run / "state", experiment.task.model.layout)
        found.store.close()  # the run may go on: this worker holds its state as it is now
        rounds = OnDemandRounds(
            most_bytes=most_bytes,
            executor=ThreadPoolExecutor(1),
            counts=Counts(tell=metrics.add),
        )
        rounds.publish(
            sources_of(found.state, Coding(coding, experiment.arm.seed)),
            found.state.layout,
            number=found.state.steps,
            step=found.state.steps,
            settings=run_settings(experiment),
        )
        return App(
            rounds, access=access, limits=limits, metrics=metrics, extra_routes=extra(rounds)
        )

    return make


def _check(directory: Path, verify: bool, options: Mapping[str, Any]) -> None:
    """Holds the current round against the options; compares every record with its sum if told."""
    from keyhole.serving.files.reading import RoundsDirectory, verify_round

    with closing(RoundsDirectory(directory)) as rounds:
        check_tables(options, rounds)
        current = rounds.current()
        if verify and current is not None:
            with rounds.hold(current.round) as held:
                verify_round(held)
