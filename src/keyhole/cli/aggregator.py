"""Runs `keyhole aggregator`: one of the two parties of a secure sum, as a service."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from keyhole.cli.listening import (
    LISTENS,
    client_of,
    deny_list_of,
    deny_option,
    listen_options,
    serve_with,
)
from keyhole.cli.options import (
    DIRECTORY,
    EXISTING_FILE,
    GroupedCommand,
    NumberRange,
    option,
)
from keyhole.cli.sums import shared_names

if TYPE_CHECKING:
    from collections.abc import Callable

    from keyhole.service.aggregator import AggregatorApp
    from keyhole.service.metrics import Metrics


(SHARED,) = shared_names()


@click.command(
    cls=GroupedCommand,
    roles={
        "The other aggregator": "party peer peer_key peer_ca peer_cert peer_cert_key",
        "Who is let in": "token_key trainer_key deny",
        "Sums": "aggregation min_clients close_after max_sums max_table_mb max_body_mb",
        "Privacy": "max_epsilon delta",
        **LISTENS,
    },
)
@click.argument("directory", type=DIRECTORY)
@option("--party", required=True, type=click.IntRange(0, 1), help="Which of the two this is.")
@option("--peer", required=True, metavar="URL", help="The other aggregator.")
@option("--peer-key", required=True, type=EXISTING_FILE, help="Keys that both aggregators have.")
@option(
    "--peer-ca", type=EXISTING_FILE, help="Authorities to trust there, instead of the system's."
)
@option("--peer-cert", type=EXISTING_FILE, help="Certificate to show there, where it asks for one.")
@option("--peer-cert-key", type=EXISTING_FILE, help="Its private key.")
@option(
    "--token-key",
    required=True,
    type=EXISTING_FILE,
    help="Keys that sign tokens of devices. With those of the slice service, devices show the "
    "token of the round; with keys of its own, devices need a token of this aggregator.",
)
@option(
    "--trainer-key", required=True, type=EXISTING_FILE, help="Keys that sign tokens of trainers."
)
@deny_option
@listen_options(8110)
@option(
    "--aggregation",
    metavar=f"{SHARED}|module:NAME",
    default=SHARED,
    help="How shares are added up; your own runs with the rights of this process.",
)
@option(
    "--min-clients",
    type=click.IntRange(1),
    show_default="two thirds of the cohort; 2 with noise from 0.5",
    help="Take part in no sum that may be released with fewer.",
)
@option(
    "--close-after",
    default=86_400.0,
    type=click.FloatRange(0, min_open=True),
    metavar="SECONDS",
    help="Close a sum that has been open for this long, without its trainer.",
)
@option(
    "--max-epsilon",
    type=NumberRange(0, min_open=True),
    help="Take part in no sum that would spend more of a device's privacy, over all runs; "
    "`keyhole privacy` shows what is spent.",
    show_default="no bound",
)
@option(
    "--delta",
    default=1e-6,
    type=NumberRange(0, 1, min_open=True, max_open=True),
    help="For which --max-epsilon holds.",
)
@option("--max-sums", default=4, type=click.IntRange(1, 1024), help="Max sums at a time.")
@option(
    "--max-table-mb",
    default=2048,
    type=click.IntRange(1),
    help="Max size of one sum; adding up takes the same amount of memory.",
)
@option(
    "--max-body-mb",
    default=64,
    type=click.IntRange(1, 4096),
    help="Max size of one device's share.",
)
def aggregator(directory: Path, **options: Any) -> None:
    """Add up shares of updates as one of two aggregators until interrupted.

    What devices send is kept in DIRECTORY until it has been added up; an aggregator that is killed
    resumes when it is started again. Neither aggregator learns a key or a number of an update, as
    long as different people run the two. The operators of a sum tell each other, and devices, who
    its aggregators and its trainer are. Devices seal what they send to the aggregator's public
    key, which is made at the first start, printed behind the address, and kept in
    DIRECTORY/seal.pub.
    """
    from keyhole.service.sum_files import sealing_key

    make = _app_maker(directory, options)
    key = sealing_key(directory).public.hex()

    def told(url: str) -> str:
        return f"aggregating as party {options['party']} at {url}#{key}"

    serve_with(options, make, told, part="aggregator")


def _app_maker(directory: Path, options: dict[str, Any]) -> Callable[[Metrics], AggregatorApp]:
    """What makes the service in its worker; files of keys are read before a port is taken."""
    from keyhole.aggregation import shared_sum
    from keyhole.aggregation.privacy.ledger import Budget
    from keyhole.service.access import Keyring
    from keyhole.service.aggregator import AggregatorApp, Keyrings
    from keyhole.service.finishing import PeerLine
    from keyhole.service.limits import Limits
    from keyhole.service.sum_files import SumFiles
    from keyhole.service.sums import AggregatorSettings
    from keyhole.wire.sockets import Certificate

    if (options["peer_cert"] is None) != (options["peer_cert_key"] is None):
        raise click.UsageError("--peer-cert and --peer-cert-key belong together")
    shown = options["peer_cert"] and Certificate(options["peer_cert"], options["peer_cert_key"])
    names = "token_key", "trainer_key", "peer_key"
    devices, trainers, peer = (Keyring.load(options[name]) for name in names)
    keyrings = Keyrings(devices, trainers, peer, deny_list_of(options))
    body, party = options["max_body_mb"] << 20, options["party"]
    settings = AggregatorSettings(
        party,
        shared_sum(options["aggregation"]),
        min_clients=options["min_clients"],
        close_after=options["close_after"],
        max_sums=options["max_sums"],
        max_table=options["max_table_mb"] << 20,
        max_upload=body,
        budget=Budget(options["max_epsilon"] or inf, options["delta"]),
    )
    client = client_of(options, "peer", certificate=shown)

    def make(metrics: Metrics) -> AggregatorApp:
        line = PeerLine(client, keyrings.peer, party)
        limits = Limits(max_body=body)
        files = SumFiles(directory)
        return AggregatorApp(files, settings, keyrings, line, limits=limits, metrics=metrics)

    return make
