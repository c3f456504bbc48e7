"""Where the updates of a Flower run arrive: at the service, or in shares at two aggregators.

The ServerApp: rounds of a run, whose devices are called by Flower and served by the service.

A run is kept in its directory. A ServerApp that is killed and started again with the same run
config goes on with the same round: the updates that had arrived are there.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from keyhole.delivery import delivery_named
from keyhole.engines.flower.config import RoundsConfig
from keyhole.engines.flower.messages import Nodes, Report
from keyhole.engines.flower.node_config import read_secret
from keyhole.engines.flower.summons import Addresses, FlowerSummons
from keyhole.errors import StorageError
from keyhole.files import make_directory, replacing, write_all
from keyhole.service.access import Keyring
from keyhole.service.inbox import Inbox, SpoolInbox
from keyhole.service.publishing import Publisher
from keyhole.service.served import Served
from keyhole.service.spool import UpdateSpool
from keyhole.wire.http import HttpClient


def inbox_of(config: RoundsConfig) -> Inbox:
    """The inbox that a run config describes.

    Raises:
        InputError: a token of the trainer at an aggregator cannot be read.
    """
    if not config.aggregators:
        return SpoolInbox(UpdateSpool(config.rounds / "updates"))
    from keyhole.service.sum_services import AggregatorClient, SumServices

    ca = None if config.aggregator_ca is None else str(config.aggregator_ca)
    first, second = (
        AggregatorClient(HttpClient(url, ca=ca), read_secret(path), party)
        for party, (url, path) in enumerate(
            zip(config.aggregators, config.aggregator_tokens, strict=True)
        )
    )
    return SumServices(first, second, salt=_salt(config.run), seconds=config.round_seconds)


def _salt(run: Path) -> bytes:
    """What tells the sums of this run from those of all others; kept as long as the run is."""
    from keyhole.service.sum_services import SALT_BYTES

    path = run.with_name(f"{run.name}.salt")  # a run's directory is the training loop's to make
    if not path.exists():
        make_directory(path.parent)
        with replacing(path) as file:
            write_all(file, [secrets.token_bytes(SALT_BYTES)])
    return path.read_bytes()


Train: TypeAlias = Callable[[Served, RoundsConfig, Context], None]
"""`(rounds, their config, context of the app) -> None`: trains to the end.

`rounds` is the `kind` of `start_run`, `resume_run` or `Experiment.run`: whatever trains with them
has its rounds made by the devices of Flower.
"""

_LOG = logging.getLogger("flwr.keyhole")
_HANDOVER = 60.0  # seconds: a ServerApp whose SuperLink was killed takes some to notice


def make_server_app(train: Train) -> ServerApp:
    """Returns a ServerApp that trains by rounds of federated select.

    Args:
        train: what it does with the rounds.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = RoundsConfig.of(context.run_config)
        with _publisher(config) as publisher:
            train(rounds_on(grid, config, publisher), config, context)

    return app


def rounds_on(grid: Grid, config: RoundsConfig, publisher: Publisher) -> Served:
    """Rounds whose devices are called through a grid, for a ServerApp of one's own.

    Args:
        grid: of the ServerApp.
        config: of the rounds.
        publisher: of `config.rounds`, which the slice service serves.

    Raises:
        InputError: the file of signing keys cannot be used.
    """
    keyring = None if config.token_key is None else Keyring.load(config.token_key)
    summons = FlowerSummons(
        grid,
        Nodes(grid, config.min_nodes, config.node_seconds),
        Addresses(config.service, config.delivery, config.second, config.aggregators),
        keyring,
        on_report=_tell,
    )
    return Served(
        publisher,
        inbox_of(config),
        summons,
        seconds=config.round_seconds,
        fetched=delivery_named(config.delivery),
    )


def _publisher(config: RoundsConfig) -> Publisher:
    """The publisher of the rounds; a ServerApp that is being replaced may hold it for a while.

    Raises:
        StorageError: another process has it all the time, or the directory cannot be used.
    """
    until = time.monotonic() + _HANDOVER
    while True:
        try:
            return Publisher(config.rounds)
        except StorageError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.5)


def _tell(round_id: str, report: Report) -> None:
    """Counts of a node's round, to the log of the run."""
    _LOG.info(
        "round %s: a node sent %d of %d updates, %d bytes down, %d up, %.2f s",
        round_id,
        report.outcomes.count("sent"),
        len(report.clients),
        sum(report.bytes_down),
        sum(report.bytes_up),
        sum(report.seconds),
    )
