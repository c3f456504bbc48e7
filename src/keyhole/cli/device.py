"""Runs `keyhole device`: takes part in the rounds of a slice service, or fetches slices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

import click
import numpy as np

from keyhole.cli.options import (
    DIRECTORY,
    FILE,
    ArraysFile,
    GroupedCommand,
    NameOr,
    NumberRange,
    log_options,
    option,
)
from keyhole.cli.own_data import OwnData, client_of_data
from keyhole.cli.screen import Notices
from keyhole.cli.sums import device_sum_options, send_of
from keyhole.cli.token import read_token, refuse_tokens
from keyhole.delivery import all_deliveries, delivery_named, delivery_names
from keyhole.delivery.clear import DEFAULT_SERVED
from keyhole.errors import (
    AwayError,
    InputError,
    KeyholeError,
    MalformedError,
    UntimelyError,
)
from keyhole.files import storage_errors
from keyhole.logs import tell

if TYPE_CHECKING:
    from keyhole.delivery.base import Delivery, DeliveryAbout
    from keyhole.device.device import Device
    from keyhole.device.take_part import Fetch, Send, Taken
    from keyhole.wire.assignment import CheckIn


_LIES = "a slice server lies or is damaged"
_LOOK_EVERY = 20.0  # seconds between two looks at why there is nothing to do
_PARTIES = {"second": "second server", "relay": "relay"}  # as what is told names them


def fetch_of(
    options: Mapping[str, Any], connect: Callable[[str, str, Path | None], Device]
) -> Fetch:
    """Returns how slices are fetched: as each round says, if this device allows it.

    `connect` makes a device of another service, from what that is, its URL, and the file of the
    token; and closes it in the end.
    """
    from keyhole.device.allowed import Allowed, AllowedFetch
    from keyhole.device.take_part import fetch_by

    allowed = _allowed(options)
    for delivery in allowed:
        _check(delivery.about, options)
    pinned = _pinned(options["gateway_config"])
    # A token goes to the service that it is for, and to no other party.
    others = {
        name: connect(_PARTIES[name], options[name], options.get(f"{name}_token_file"))
        for name in allowed[0].about.connects_to
    }
    usual = options["delivery"] or (
        allowed[0].about.name if others or options["anonymous"] else DEFAULT_SERVED
    )
    return AllowedFetch(
        {
            way.about.name: Allowed(way, fetch_by(way, others, pinned, options["anonymous"]))
            for way in allowed
        },
        delivery_named(usual).about.name,
        options["max_bytes"] or inf,
    )


def _allowed(options: Mapping[str, Any]) -> list[Delivery]:
    """The one of --delivery; without it, all by the parties whose URLs are given, and no others:
    nothing falls back to a plainer one."""
    if options["delivery"]:
        return [delivery_named(options["delivery"])]
    given = {party for party in _PARTIES if options[party] is not None}
    found = [
        way
        for way in all_deliveries()
        if way.about.is_served and way.about.route and set(way.about.connects_to) == given
    ]
    if options["anonymous"]:  # by its name it asks for nothing
        found = [way for way in found if way.about.route == "queries"]
    if not found:
        said = [*given, *(["anonymous"] if options["anonymous"] else [])]
        raise click.UsageError(f"no delivery takes {' and '.join(f'--{each}' for each in said)}")
    return found


def _check(about: DeliveryAbout, options: Mapping[str, Any]) -> None:
    """Each URL belongs to one delivery, which needs it."""
    if options["anonymous"] and options["delivery"] and about.route != "queries":
        raise click.UsageError("--anonymous goes with a --delivery by private queries")
    belongings = ("second", "second_token_file"), ("relay", "relay_token_file")
    for party, belonging in (*belongings, ("relay", "gateway_config")):
        is_needed = party in about.connects_to
        (owner,) = (way.about.name for way in all_deliveries() if party in way.about.connects_to)
        if (options[party] is None) == is_needed:
            raise click.UsageError(f"--{party} and --delivery {owner} belong together")
        if options[belonging] is not None and not is_needed:
            flag = belonging.replace("_", "-")
            raise click.UsageError(f"--{flag} and --delivery {owner} belong together")


def _pinned(path: Path | None) -> bytes | None:
    """What the file of a gateway's keys holds, once it is known to be that."""
    from keyhole.delivery.relay.ohttp import decode_configs

    if path is None:
        return None
    try:
        found = path.read_bytes()
        decode_configs(found)
    except (OSError, MalformedError) as error:
        raise InputError(
            f"the gateway's keys cannot be read: got file {path}; expected a file that `keyhole "
            "token gateway-config` has written; ask the operator of the gateway for it"
        ) from error
    return found


@click.command(
    cls=GroupedCommand,
    roles={
        "Training": "task trust data hold_out rounds states client seed",
        "Check-in": "memory_mb tell_examples",
        "Slice service": "token_file ca cert key trainer_key trust_service insecure",
        "Delivery": "delivery second second_token_file anonymous relay relay_token_file "
        "gateway_config cache max_mb max_bytes",
        "Aggregation": "aggregators aggregator_tokens aggregation min_clients min_noise "
        "min_clients_per_key",
        "Privacy": "ledger max_epsilon",
        "Fetching without training": "table slices out",
        "Log": "log log_level",
    },
)
@click.argument("url")
@option("--token-file", type=FILE, help="The token of this device, from the operator.")
@option("--ca", type=FILE, help="PEM file of the authorities to trust.")
@option("--cert", type=FILE, help="PEM file to show where the service asks for one.")
@option("--key", type=FILE, help="Its private key.")
@option(
    "--trainer-key",
    type=FILE,
    help="Public key of the trainer: rounds that it did not sign are refused.",
)
@option(
    "--trust-service",
    is_flag=True,
    help="With --aggregators: take part without --trainer-key. A service that gives each device a "
    "round of its own can then read an update from the sum.",
)
@option("--insecure", is_flag=True, help="Speak plain http beyond this machine.")
@option(
    "--cache",
    type=DIRECTORY,
    help="Keep slices here: those that have not changed are not sent again.",
)
@option(
    "--states",
    type=DIRECTORY,
    help="Keep here what the client remembers between rounds, such as a personal head; it is never "
    "sent. In memory if left out.",
)
@option(
    "--max-mb",
    type=click.IntRange(1),
    default=256,
    help="Refuse a slice or a segment of more megabytes.",
)
@option(
    "--max-bytes",
    type=click.IntRange(1),
    help="Take no part in a round that could take more bytes, received and sent.",
    show_default="no bound",
)
@option(
    "--rounds",
    type=click.IntRange(1),
    help="Number of rounds to take part in.",
    show_default="until stopped",
)
@option(
    "--delivery",
    type=NameOr(partial(delivery_names, lambda about: about.is_served)),
    show_default="those by the parties whose URLs are given",
    help="Take part only where rounds fetch slices in this way: by keys that the service sees, by "
    "downloading whole rounds, by private queries to two servers or to one, or through a relay "
    "that hides who asks.",
)
@option("--second", metavar="URL", help="With --delivery pir: the second server.")
@option(
    "--second-token-file",
    type=FILE,
    help="The token of this device there, from its operator; the other is never shown to it.",
)
@option(
    "--anonymous",
    is_flag=True,
    help="With private queries: show servers tokens without a name, which the service signs blind.",
)
@option("--relay", metavar="URL", help="With --delivery relay: the relay.")
@option(
    "--relay-token-file",
    type=FILE,
    help="The token of this device there, from its operator; no other is shown to it.",
)
@option(
    "--gateway-config",
    type=FILE,
    help="With --delivery relay: the keys of the gateway, from its operator. Without, what "
    "relay and gateway say is compared.",
)
@device_sum_options
@option(
    "--task",
    metavar="NAME",
    help="Train as a client of this task, as `keyhole train` does: a name, or module:NAME.",
)
@option(
    "--trust",
    multiple=True,
    metavar="MODULE",
    help="Let the run name parts of this Python module, such as a choice of keys. That of --task "
    "is trusted.",
)
@option(
    "--client",
    type=click.IntRange(0),
    help="Simulate: be this client of the data, as `keyhole train` has it.",
    show_default="the data are this device's own",
)
@option(
    "--data",
    metavar="PATH|NAME",
    help="This device's own examples: a .csv, .jsonl, .npz or .parquet file, a folder of them, or "
    "module:NAME of their columns or of a function that returns them. With --client: the data of "
    "all clients, as for `keyhole train`.",
    show_default="synthetic with --client",
)
@option(
    "--hold-out",
    type=NumberRange(0, 1, max_open=True),
    help="Share of the own examples that it does not train on: with these alone it measures the "
    "model, where a round asks for that.",
    show_default="0: it measures with all",
)
@option(
    "--memory-mb",
    type=click.IntRange(1),
    help="Say at the check-in that this device has so much memory, as a power of two.",
)
@option(
    "--tell-examples",
    is_flag=True,
    help="Say at the check-in how many examples it has, as a power of two.",
)
@option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    help="Rehearse: train with the random numbers of a run in process of this seed, and make "
    "synthetic data with it. A round never tells it.",
    show_default="random numbers of each round; synthetic data of seed 0",
)
@option("--table", help="Fetch slices of this table instead.")
@option("--slices", metavar="KEY,KEY,...", help="Keys of those slices.")
@log_options("warning")
@option("--out", type=ArraysFile(), help="Where they go: an .npz file, one array per parameter.")
def device(url: str, **options: Any) -> None:
    """Take part in the rounds of the slice service at URL, or fetch slices of it.

    With --task, the device chooses keys, fetches their slices, trains on its own examples and sends
    its update, round after round. With --table, it fetches slices and writes them to a file.

    How to train comes with each round: the device needs a URL, a token, and its data. Where the
    trainer names cohorts beforehand, it knows device N of the data as `device-N`.
    """
    if (options["task"] is None) == (options["table"] is None):
        raise click.UsageError("pass either --task or --table")
    if options["table"] is not None and options["delivery"] not in (None, DEFAULT_SERVED):
        raise click.UsageError("--table fetches in the clear: leave out --delivery")
    if options["task"] is not None:
        refuse_tokens(options)
    with ExitStack() as stack:
        notices, stop = Notices(), threading.Event()
        if options["task"] is not None:  # a fetch ends where it is; a round is left in order
            from keyhole.signals import stop_on_signals

            stop = stack.enter_context(stop_on_signals())

        def connect(
            name: str, url: str, token_file: Path | None, cache: Path | None = None
        ) -> Device:
            def warn(reason: str) -> None:
                again = f"{name} is asked again"
                notices.tell(f"{name}: {reason}, trying again", logged=again)

            made = _device(url, stop, options, token_file, cache, warn)
            return stack.enter_context(closing(made))

        made = connect("service", url, options["token_file"], options["cache"])
        if options["table"] is not None:
            _fetch(made, options)
            return
        fetch, send = fetch_of(options, connect), send_of(options, connect)
        own = OwnData(options) if options["client"] is None else None
        made.says = _said(options, own)
        _take_part(made, fetch, options, notices, send, own)


def _said(options: Mapping[str, Any], own: OwnData | None) -> CheckIn:
    """What the device says of itself at each check-in."""
    from keyhole.wire.assignment import CheckIn

    if options["tell_examples"] and own is None:
        raise click.UsageError("--tell-examples goes with --data of this device, without --client")
    count = None if own is None else own.examples  # what cannot be read shows before a round
    return CheckIn.of(options["memory_mb"], count if options["tell_examples"] else None)


def _device(
    url: str,
    stop: threading.Event,
    options: Mapping[str, Any],
    token_file: Path | None,
    cache: Path | None,
    tell: Callable[[str], None],
) -> Device:
    from keyhole.device.cache import SliceCache
    from keyhole.device.device import Device
    from keyhole.wire.signing import TrainerKey
    from keyhole.wire.sockets import Certificate, Retry

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
        max_answer=options["max_mb"] << 20,
        trainer_key=TrainerKey.load(options["trainer_key"]) if options["trainer_key"] else None,
        trust_service=options["trust_service"],
        stop=stop,
        insecure=options["insecure"],
    )


def _take_part(
    made: Device,
    fetch: Fetch,
    options: Mapping[str, Any],
    notices: Notices,
    send: Send,
    own: OwnData | None = None,
) -> None:
    from keyhole.device.take_part import PopulationClient, keep_taking_part

    made_by = client_of_data(options) if own is None else own.clients
    client = options["client"] if own is None else own.number
    rehearsed = None if options["seed"] is None else (options["seed"], 0)
    population = PopulationClient(client, made_by, rehearsed, options["states"])

    sent: list[int] = []
    looked, measured = -inf, 0

    def show(taken: Taken) -> None:
        nonlocal looked, measured
        looked = -inf
        notices.forget()
        sent[:] = [taken.number]
        measured += taken.measures
        click.echo(_line_of(taken))
        _tell_taken(taken)

    def wait(seconds: float) -> None:
        nonlocal looked
        if time.monotonic() - looked > _LOOK_EVERY:
            tell("device", "waiting", "there is no round for this device", seconds=seconds)
            why, looked = _why_wait(made, sent), time.monotonic()
            notices.tell(f"{why}, asking again in {seconds:.1f} s", kind=why)

    def miss(error: KeyholeError) -> None:
        notices.tell(f"missed a round: {error}", kind=_kind_of(error))
        kind = type(error).__name__  # what an error says may hold a key of this device
        tell("device", "round missed", f"a round was missed: {kind}", error=kind)

    taken = keep_taking_part(
        made,
        population.participant(fetch, send),
        rounds=options["rounds"] or inf,
        on_round=show,
        on_miss=miss,
        on_wait=wait,
        on_wrong=lambda words: notices.tell(f"{words}: {_LIES}", logged=_LIES),
    )
    rest = f", of which {measured} measured the model" if measured else ""
    click.echo(f"took part in {taken} rounds{rest}")


def _tell_taken(taken: Taken) -> None:
    """Writes a line of a round to the log: bytes, and not how many keys they were for."""
    facts = {"bytes_down": taken.bytes_down, "bytes_up": taken.bytes_up}
    what = "what this device has measured" if taken.measures else "this device's update"
    text = f"round {taken.number} has {what}"
    tell("device", "update sent", text, round=taken.number, **facts)


def _kind_of(error: KeyholeError) -> str:
    """What a miss has in common with others of its kind; the time of a service changes, and why it
    gives no answer."""
    return error.wrong if isinstance(error, UntimelyError | AwayError) else str(error)


def _why_wait(made: Device, sent: Sequence[int]) -> str:
    """Why the service has no round for this device, as far as it tells."""
    try:
        now = made.current()
    except KeyholeError:
        return "no round for this device"
    if now.phase != "open":
        return f"round {now.number} is over, and the next one is not there yet"
    if now.number in sent:
        return f"round {now.number} has this device's update and waits for others"
    before = "" if sent else ", or sent its update before this start"
    return f"this device is not in the cohort of round {now.number}{before}"


def _fetch(made: Device, options: Mapping[str, Any]) -> None:
    """Writes slices to an .npz file."""
    path = options["out"]
    if options["slices"] is None or path is None:
        raise click.UsageError("--table needs --slices and --out")
    try:
        keys = np.array([int(text) for text in options["slices"].split(",")])
    except ValueError:
        raise click.BadParameter(
            f"got {options['slices']!r}; expected whole numbers with commas; write it as in "
            "--slices 7,42",
            param_hint="--slices",
        ) from None
    now = made.current()
    write_arrays(path, made.fetch_slices(now.round, options["table"], keys))
    click.echo(f"{len(keys)} slices of round {now.number}: {path}")


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an .npz file; `np.savez` would take some names of parameters for its own."""
    with storage_errors(path, "write"), ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)


def _line_of(taken: Taken) -> str:
    """What is shown of a round at once: nothing of rows that were missing or wrong."""
    does = " measures the model" if taken.measures else ""
    return (
        f"round {taken.number}{does}: {taken.keys + taken.missing} keys, {taken.bytes_down} bytes "
        f"received, {taken.bytes_up} sent, {taken.reused} slices unchanged"
    )
