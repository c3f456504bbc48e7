"""What makes `keyhole serve` a server of a private way: options, and the routes they add."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

from keyhole.errors import InputError

if TYPE_CHECKING:
    from keyhole.private.oblivious.key_config import GatewayKey
    from keyhole.serving.pir.settings import PirSettings
    from keyhole.serving.service.guards import Guards
    from keyhole.serving.service.routes import Route
    from keyhole.serving.tables import RoundSource

    ExtraRoutes: TypeAlias = list[Callable[[Guards], Sequence[Route]]]

__all__ = ["check_tables", "extra_routes", "private_options"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_MEMORY_MB = 4096  # for tables of private retrieval, unless told

_OPTIONS = (
    click.option(
        "--pir",
        type=click.Choice(["0", "1", "one"]),
        help="Answer private queries: as server 0 or 1 of two that do not collude, or as the one "
        "server. One process.",
    ),
    click.option(
        "--pir-keys",
        multiple=True,
        metavar="[TABLE=]N",
        help="Keys that a private query of a table is padded to, where the round does not say how "
        "many a client chooses; 1 or more. All servers must agree.",
    ),
    click.option(
        "--pir-memory-mb",
        type=click.IntRange(1),
        help="With --pir: for the tables of the two newest rounds; 4096 unless told.",
    ),
    click.option(
        "--gateway-key",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="Answer sealed requests that come through a relay, with the keys of this file: see "
        "`keyhole token gateway-key`. One process.",
    ),
)


def private_options(command: _Command) -> _Command:
    """Adds the options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def extra_routes(options: Mapping[str, Any], workers: int) -> Callable[[RoundSource], ExtraRoutes]:
    """Returns what makes further routes, once a worker has opened its rounds.

    Args:
        options: those of `private_options`.
        workers: processes of the service.
    """
    _check(options, workers)
    settings = None if options["pir"] is None else _pir_settings(options)
    keys = None if options["gateway_key"] is None else _gateway_keys(options["gateway_key"])

    def make(rounds: RoundSource) -> ExtraRoutes:
        routes: ExtraRoutes = []
        if settings is not None:
            from keyhole.serving.pir.routes import pir_routes

            routes.append(pir_routes(rounds, settings))
        if keys is not None:
            from keyhole.serving.relay.gateway_routes import gateway_routes

            routes.append(gateway_routes(rounds, keys))
        return routes

    return make


def check_tables(options: Mapping[str, Any], rounds: RoundSource) -> None:
    """Refuses --pir-keys of a table that is not there: most likely it is spelled otherwise.

    Args:
        options: those of `private_options`.
        rounds: of the service. Before the first there is nothing to compare with.

    Raises:
        InputError: the current round has no such table.
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
                "--pir-keys names a table that the current round does not have",
                got=repr(name),
                allowed=", ".join(map(repr, there)) or "a table of slices",
                fix="check how it is spelled, or leave it out",
            )


def _check(options: Mapping[str, Any], workers: int) -> None:
    """No option is passed over in silence."""
    for name in ("pir_keys", "pir_memory_mb"):
        if options["pir"] is None and options[name]:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --pir")
    for name in ("pir", "gateway_key"):
        # Whoever has seen a message must refuse it the second time; workers do not tell each other.
        if options[name] is not None and workers > 1:
            flag = name.replace("_", "-")
            raise click.UsageError(
                f"--{flag} remembers in one process what it has answered: leave out --workers"
            )


def _gateway_keys(path: Path) -> tuple[GatewayKey, ...]:
    from keyhole.serving.relay.gateway_keys import load_gateway_keys

    return load_gateway_keys(path)


def _pir_settings(options: Mapping[str, Any]) -> PirSettings:
    from keyhole.serving.pir.settings import ROLES, PirSettings

    by_table = dict(_pair(text) for text in options["pir_keys"])
    return PirSettings(
        ROLES[options["pir"]],
        most_keys=by_table.pop("", None),
        most_keys_of=by_table,
        most_bytes=(options["pir_memory_mb"] or _MEMORY_MB) << 20,
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
