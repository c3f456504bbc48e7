"""Runs `keyhole watch`: a page on which runs and rounds can be watched."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.options import EXISTING_FILE, GroupedCommand, log_options, option
from keyhole.logs import say

if TYPE_CHECKING:
    from keyhole.experiments.watch.address import ServiceWatch
    from keyhole.experiments.watch.folder import RunFolder

_PORT = 8150
_PATIENCE = 1.5  # seconds of one look at a folder with many runs


def watched_at(
    place: str,
    ca: Path | None,
    insecure: bool,
    names: bool = False,
    patience: float = math.inf,
) -> RunFolder | ServiceWatch:
    """Returns what lies in a folder, or answers at a URL; `names` and `patience` are those of
    `RunFolder`."""
    if "://" in place:
        from keyhole.experiments.watch.address import ServiceWatch

        return ServiceWatch(place, ca, insecure)
    from keyhole.experiments.watch.folder import RunFolder

    if not Path(place).is_dir():
        raise click.BadParameter(
            f"no such folder: got {place!r}; expected a folder of runs or rounds, or the URL of "
            "metrics; give the --out of `keyhole train`, or what stands behind `metrics at`"
        )
    return RunFolder(Path(place), names=names, patience=patience)


@click.command(
    cls=GroupedCommand,
    roles={"Where it listens": "host port tls_cert tls_key insecure", "Log": "log log_level"},
)
@click.argument("place", metavar="DIR|URL")
@option("--host", default="127.0.0.1", help="Address to listen at.")
@option(
    "--port",
    default=_PORT,
    type=click.IntRange(0, 65535),
    help="Port to listen at; 0 takes any that is free.",
)
@option("--tls-cert", type=EXISTING_FILE, help="Certificate chain, PEM; without it plain HTTP.")
@option("--tls-key", type=EXISTING_FILE, help="Its key, PEM; if it is not in the same file.")
@option("--ca", type=EXISTING_FILE, help="With a URL: authorities to trust there, PEM.")
@option("--insecure", is_flag=True, help="Allow plain HTTP beyond this machine, both ways.")
@log_options("warning")
def watch(place: str, ca: Path | None, **options: Any) -> None:
    """Show the runs and rounds of a folder, or the rounds of a service, on a page that is live.

    DIR holds runs of `keyhole train`, `keyhole sweep` or `kh.train`, at any depth, or rounds that
    `keyhole serve` serves. URL is the address of metrics that a service, a trainer or an aggregator
    prints when it starts. The page shows metrics over rounds, bytes of a client beside broadcast,
    what became of each cohort, who learned what, privacy spent and incidents; runs can be compared.
    It can only be read, and only on this machine unless --host says otherwise: anyone who reaches
    it sees all of that.
    """
    from keyhole.experiments.watch.app import WatchApp
    from keyhole.experiments.watch.folder import RunFolder
    from keyhole.service.transport import Listen, serving
    from keyhole.signals import stop_on_signals

    found = watched_at(place, ca, options["insecure"], patience=_PATIENCE)
    runs = found if isinstance(found, RunFolder) else None
    app = WatchApp(found, runs, frozenset({options["host"].lower()}))
    host, port, cert = options["host"], options["port"], options["tls_cert"]
    listen = Listen(host, port, cert, options["tls_key"], insecure=options["insecure"])
    with stop_on_signals() as stop, serving(app, listen, prepare=lambda: None) as url:
        say(f"watching {place} at {url}")
        stop.wait()
