"""Runs `keyhole serve`: gives out the slices of a rounds directory, and takes updates in.

Further options make it a server of private retrieval or a gateway, and add routes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click

from keyhole.cli.listening import (
    LISTENS,
    client_of,
    deny_list_of,
    deny_option,
    keyring_of,
    listen_options,
    serve_with,
)
from keyhole.cli.options import (
    EXISTING_DIRECTORY,
    EXISTING_FILE,
    GroupedCommand,
    NumberRange,
    option,
    refuse,
)
from keyhole.cli.runs import coding_option, draws_of, open_saved, run_settings
from keyhole.cli.spec_options import data_option
from keyhole.errors import InputError

if TYPE_CHECKING:
    from keyhole.service.access import Access
    from keyhole.service.admission import BlindAdmission
    from keyhole.service.app import App
    from keyhole.service.guards import Guards
    from keyhole.service.limits import Limits
    from keyhole.service.metrics import Metrics
    from keyhole.service.routes import Application, Route
    from keyhole.wire.assignment import RoundSource
    from keyhole.wire.private import QuerySettings

    ExtraRoutes: TypeAlias = list[Callable[[Guards], Sequence[Route]]]


_MEMORY_MB = 4096  # for tables of private retrieval, unless told


def extra_routes(options: Mapping[str, Any], workers: int) -> Callable[..., ExtraRoutes]:
    """Returns what makes further routes, once a worker has opened the rounds of a run.

    It is called with these rounds, and with the folder and the name of the run where the service
    keeps what it signed and took, to admit devices without a name.
    """
    if workers > 1:
        # A server refuses a message that it has seen; workers do not tell each other what they saw.
        alone = "remembers in one process what it has answered: leave out --workers"
        refuse(options, ("pir", "gateway_key"), alone)
    makers: list[Callable[[RoundSource], Callable[[Guards], Sequence[Route]]]] = []
    server: int | None = None
    if options["pir"] is None:
        refuse(options, ("pir_keys", "pir_memory_mb", "open_queries", "admission"), "needs --pir")
    else:
        _check_queries(options)
        from keyhole.service.private import query_routes

        settings = _pir_settings(options)
        server = settings.role.server
        makers.append(partial(query_routes, settings=settings))
    if options["gateway_key"] is not None:
        from keyhole.delivery.relay.ohttp import load_gateway_keys
        from keyhole.service.gateway import gateway_routes

        makers.append(partial(gateway_routes, keys=load_gateway_keys(options["gateway_key"])))

    def extra(rounds: RoundSource, folder: Path | None = None, run: str = "") -> ExtraRoutes:
        found = [make(rounds) for make in makers]
        if folder is not None and (options["token_key"] or options["admission"]):
            from keyhole.service.admission import admission_routes

            admission = _admission(folder, run, options)
            found.append(admission_routes(rounds, admission=admission, server=server))
        return found

    return extra


def _admission(folder: Path, run: str, options: Mapping[str, Any]) -> BlindAdmission:
    """What admits devices without a name: by keys of its own, or of the service of --admission."""
    from keyhole.service.admission import AdmissionFiles, BlindAdmission, KeysOf

    if options["admission"] is None:
        return BlindAdmission(AdmissionFiles(folder))
    of_run = options["admission"].rstrip("/") + (f"/runs/{run}" if run else "")
    keys = KeysOf(client_of({**options, "admission": of_run}, "admission"))
    return BlindAdmission(AdmissionFiles(folder), keys)


def _check_queries(options: Mapping[str, Any]) -> None:
    """Refuses a server of private queries that nobody could ask, or anybody by mistake."""
    if not (options["token_key"] or options["admission"] or options["open_queries"]):
        raise click.UsageError(
            "private queries take a token of the round: pass --token-key or --admission to check "
            "them with, or --open-queries to answer everyone"
        )


def check_tables(options: Mapping[str, Any], rounds: RoundSource) -> None:
    """Refuses --pir-keys of a table that is not there: most likely it is spelled otherwise.

    Before the first round there is nothing to compare with.
    """
    named = [name for name, _ in map(_pair, options["pir_keys"]) if name]
    current = rounds.current() if named else None
    if current is None:
        return
    with rounds.hold(current.round) as held:
        there = [table.name for table in held.manifest.tables if table.factors]
    for name in named:
        if name not in there:
            raise InputError(
                f"--pir-keys names a table that the current round does not have: got {name!r}; "
                f"expected {', '.join(map(repr, there)) or 'a table of slices'}; check how it is "
                "spelled, or leave it out"
            )


def _pir_settings(options: Mapping[str, Any]) -> QuerySettings:
    from keyhole.wire.private import QuerySettings, role_named

    by_table = dict(_pair(text) for text in options["pir_keys"])
    try:
        role = role_named(options["pir"])
    except InputError as error:
        raise click.BadParameter(str(error), param_hint="--pir") from error
    return QuerySettings(
        role,
        max_keys=by_table.pop("", None),
        max_keys_of=by_table,
        max_bytes=(options["pir_memory_mb"] or _MEMORY_MB) << 20,
    )


def _pair(text: str) -> tuple[str, int]:
    """The table and the number of `[TABLE=]N`; an empty name stands for all tables."""
    name, _, number = text.rpartition("=")
    if not number.isdecimal() or int(number) < 1:
        raise click.BadParameter(
            f"{text!r} is not [TABLE=]N with a whole number N of 1 or more",
            param_hint="--pir-keys",
        )
    return name, int(number)


def _origins(_: click.Context, option: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    """The origins of pages that are let in."""
    from keyhole.service.origins import check_origin

    try:
        return tuple(map(check_origin, given))
    except InputError as error:
        raise click.BadParameter(str(error), param=option) from error


@click.command(
    cls=GroupedCommand,
    roles={
        **LISTENS,
        "Who is let in": "token_key deny open_reads allow_origin max_keys max_body_mb",
        "Rounds": "verify spread again",
        "Slices on demand": "on_demand coding data memory_mb",
        "Private queries": "pir pir_keys pir_memory_mb admission admission_ca open_queries "
        "queries_per_token cpu_per_address",
        "Relayed requests": "gateway_key",
    },
)
@click.argument("directory", type=EXISTING_DIRECTORY)
@listen_options(8100)
@option(
    "--workers",
    default=1,
    type=click.IntRange(1, 256),
    help="Processes that answer; each counts the rates of devices for itself.",
)
@option("--token-key", type=EXISTING_FILE, help="Signing keys; without them no updates are taken.")
@deny_option
@option(
    "--open-reads/--token-reads",
    default=True,
    help="Whether slices are for everyone, or for devices with a token of the round.",
)
@option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    callback=_origins,
    help="Let pages of this origin use the service from a browser, such as https://app.example; "
    "may be repeated. Without it browsers keep its answers from all pages.",
)
@option(
    "--max-keys",
    default=65_536,
    type=click.IntRange(1, 2**31),
    help="Max keys per query.",
)
@option("--max-body-mb", default=64, type=click.IntRange(1, 4096), help="Max size of an update.")
@option(
    "--spread",
    default=0.0,
    type=NumberRange(0, 86_400),
    help="Seconds over which devices of a round begin to fetch.",
)
@option(
    "--again",
    default=5.0,
    type=NumberRange(0.01, 86_400),
    help="Seconds, on average, until a device without a round asks again.",
)
@option("--verify", is_flag=True, help="Read and check the current round first.")
@option(
    "--on-demand",
    is_flag=True,
    help="DIRECTORY is a trial's of `keyhole train`: compute slices of its model as they are asked "
    "for, each once. One process; takes no updates.",
)
@coding_option
@data_option
@option(
    "--memory-mb",
    default=1024,
    type=click.IntRange(1),
    help="With --on-demand: memory for slices that are kept.",
)
@option(
    "--pir",
    metavar="SERVER",
    help="Answer private queries: as server 0 or 1 of two that do not collude, as the one "
    "server (one), or as a server of a delivery of your own (module:NAME/0). One process.",
)
@option(
    "--pir-keys",
    multiple=True,
    metavar="[TABLE=]N",
    help="Keys that a private query of a table is padded to, where the round does not say how "
    "many a client chooses; 1 or more. All servers must agree.",
)
@option(
    "--pir-memory-mb",
    type=click.IntRange(1),
    show_default=str(_MEMORY_MB),
    help="With --pir: memory for the tables of the two newest rounds.",
)
@option(
    "--admission",
    metavar="URL",
    help="With --pir: let in devices without a name that the service at URL, which coordinates the "
    "rounds, has signed a token for.",
)
@option(
    "--admission-ca",
    type=EXISTING_FILE,
    help="Authorities to trust there, instead of the system's.",
)
@option(
    "--open-queries",
    is_flag=True,
    help="With --pir: answer everyone; else queries are for devices with a token of the round.",
)
@option(
    "--queries-per-token",
    default=64,
    type=click.IntRange(1),
    help="With --pir: private queries per token of a round; used ones come back within an hour.",
)
@option(
    "--cpu-per-address",
    default=0.5,
    type=NumberRange(0),
    help="With --pir: CPU seconds per second that queries of one address may take, 0 for any; "
    "addresses of this machine, a proxy's, are not counted.",
)
@option(
    "--gateway-key",
    type=EXISTING_FILE,
    help="Answer sealed requests that come through a relay, with the keys of this file: see "
    "`keyhole token gateway-key`. One process.",
)
def serve(directory: Path, workers: int, **options: Any) -> None:
    """Serve the slices of the rounds in DIRECTORY until interrupted.

    Several runs can share a service: rounds in DIRECTORY/NAME are those of run NAME, whose URL is
    that of the service with /runs/NAME behind it.
    """
    from keyhole.service.access import Access, Keyring, new_key
    from keyhole.service.limits import Limits
    from keyhole.service.origins import WithOrigins

    keyring = keyring_of(options)
    if keyring is None and options["admission"]:  # for guests alone: it may end with the process
        keyring = Keyring((bytes.fromhex(new_key()),))
    reads = not options["open_reads"]
    denied, is_open = deny_list_of(options), options["open_queries"]
    access = Access(keyring, reads_need_token=reads, denied=denied, open_queries=is_open)
    limits = Limits(
        max_keys=options["max_keys"],
        max_body=options["max_body_mb"] << 20,
        queries_per_token=options["queries_per_token"],
        cpu_per_address=options["cpu_per_address"] or inf,
    )
    extra = extra_routes(options, workers)
    if options["on_demand"] and workers > 1:
        raise click.UsageError("--on-demand computes each slice once, in one process")
    if not options["on_demand"]:
        _check(directory, options)
    make_app = _on_demand_app if options["on_demand"] else _published_app

    def make(metrics: Metrics) -> Application:
        app = make_app(directory, options, extra, access=access, limits=limits, metrics=metrics)
        return WithOrigins(app, options["allow_origin"]) if options["allow_origin"] else app

    def told(url: str) -> str:
        return f"serving {directory} at {url}"

    rounds = None if options["on_demand"] else directory
    serve_with(options, make, told, workers, part="service", rounds=rounds)


def _published_app(
    directory: Path,
    options: Mapping[str, Any],
    extra: Callable[..., ExtraRoutes],
    access: Access,
    limits: Limits,
    metrics: Metrics,
) -> Application:
    """Makes the service of one worker, for the run of the folder itself and those below it."""
    from keyhole.service.guards import Guards
    from keyhole.service.runs import RunsApp
    from keyhole.service.status import RunsFiles
    from keyhole.service.telling import gauges_of

    metrics.show(partial(gauges_of, RunsFiles(directory)))
    guards = Guards(access, limits, metrics, time.time)
    make = partial(_run_app, directory, options, extra, guards)
    return RunsApp(make(""), directory, make)


def _run_app(
    directory: Path,
    options: Mapping[str, Any],
    extra: Callable[..., ExtraRoutes],
    guards: Guards,
    run: str,
) -> App:
    """Makes what answers for one run."""
    from keyhole.service.app import App
    from keyhole.service.lobby import WaitingRoom
    from keyhole.service.reading import RoundsDirectory
    from keyhole.service.spool import UpdateSpool
    from keyhole.service.status import UPDATES
    from keyhole.wire.assignment import Pace, admit

    folder, rng = directory / run, random.SystemRandom()
    rounds, pace = RoundsDirectory(folder), Pace(options["spread"], options["again"])
    return App(
        rounds,
        spool=None if options["token_key"] is None else UpdateSpool(folder / UPDATES),
        admit=partial(admit, pace=pace, uniform=rng.random),
        note=WaitingRoom(folder).note,
        extra_routes=extra(rounds, folder, run),
        rng=rng,
        guards=guards.of_run(run),
    )


def _on_demand_app(
    run: Path,
    options: Mapping[str, Any],
    extra: Callable[..., ExtraRoutes],
    metrics: Metrics,
    **known: Any,
) -> App:
    """Makes a service that computes slices of a run's model as they are asked for.

    In the worker: what computes slices has threads of its own, which no fork carries over.
    """
    from concurrent.futures import ThreadPoolExecutor

    from keyhole.delivery.records import Coding
    from keyhole.delivery.sources import sources_of
    from keyhole.service.app import App
    from keyhole.service.on_demand import Counts, OnDemandRounds

    saved = open_saved(run, options["data"])
    found = saved.recover()
    found.store.close()  # the run may go on: this worker holds its state as it is now
    draws, number = draws_of(saved.directory), found.state.steps
    rounds = OnDemandRounds(
        max_bytes=options["memory_mb"] << 20,
        executor=ThreadPoolExecutor(1),
        counts=Counts(tell=metrics.add),
    )
    rounds.publish(
        sources_of(found.state, Coding(options["coding"], draws.rounding())),
        found.state.layout,
        number=number,
        step=number,
        settings=run_settings(saved.experiment, draws, number),
    )
    check_tables(options, rounds)  # the round is there no sooner
    return App(rounds, metrics=metrics, extra_routes=extra(rounds), **known)


def _check(directory: Path, options: Mapping[str, Any]) -> None:
    """Holds the current round of each run against the options; compares every record with its sum
    if told."""
    from keyhole.service.reading import RoundsDirectory, verify_round
    from keyhole.service.status import run_names

    for run in ("", *run_names(directory)):
        with closing(RoundsDirectory(directory / run)) as rounds:
            check_tables(options, rounds)
            current = rounds.current()
            if options["verify"] and current is not None:
                with rounds.hold(current.round) as held:
                    verify_round(held)
