"""Reads options that several commands share: data, seeds, and where a service listens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.screen import import_shown
from keyhole.data.cache import cache_root, load
from keyhole.data.federated import Dataset
from keyhole.data.readers.source import Kind
from keyhole.data.synthetic import make_synthetic

if TYPE_CHECKING:
    from keyhole.experiments.arms import Arm
    from keyhole.service.transport import Listen


SYNTHETIC = "synthetic"
USUAL_WORDS = 10_000

_Command = TypeVar("_Command", bound=Callable[..., Any])


def data_option(command: _Command) -> _Command:
    """`--data`."""
    return click.option(
        "--data",
        default=SYNTHETIC,
        show_default=True,
        metavar="PATH|NAME",
        help="A file or folder of a known format, a name of `keyhole data list`, or `synthetic`.",
    )(command)


def seed_option(command: _Command) -> _Command:
    """`--seed`."""
    return click.option(
        "--seed",
        default=0,
        show_default=True,
        type=click.IntRange(0, 2**32 - 1),
        help="Of everything random; the same seed gives the same bytes.",
    )(command)


def out_option(default: str, about: str) -> Callable[[_Command], _Command]:
    """`--out`, a directory."""
    return click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default=Path(default),
        show_default=True,
        help=about,
    )


def json_option(command: _Command) -> _Command:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")(
        command
    )


def load_data(source: str, kind: Kind, seed: int, **sizes: int) -> Dataset:
    """Opens a dataset, importing it first where that has not been done; shows how far it is.

    Args:
        source: as `--data` takes it.
        kind: what a synthetic dataset is to hold.
        seed: of a synthetic dataset.
        sizes: of a synthetic dataset, where they differ from its defaults.
    """
    if source == SYNTHETIC:
        return make_synthetic(kind, seed, **sizes)
    return load(import_shown(source))


def synthetic_sizes(source: str, arms: Iterable[Arm]) -> dict[str, int]:
    """Sizes of synthetic data that has as many words as arms ask for, or the usual number."""
    words = max((arm.sizes.get("words", 0) for arm in arms), default=0)
    return {"words": max(words, USUAL_WORDS)} if source == SYNTHETIC and words else {}


def parse_pairs(
    _: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Turns `name=value` options into a mapping; a callback of click."""
    pairs = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not (name and sign and value):
            raise click.BadParameter(f"{text!r} is not NAME=VALUE", param=option)
        pairs[name] = value
    return pairs


def start_jax() -> None:
    """One thread for each client that trains, and compiled code kept between runs."""
    # Starting JAX takes a second: commands that do not train go without.
    from keyhole.rounds.cores import keep_compiled, use_one_thread

    use_one_thread()
    keep_compiled(cache_root() / "compiled")


_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def listen_options(port: int) -> Callable[[_Command], _Command]:
    """Adds the options, with a port of the command's own."""
    options = [
        click.option(
            "--host", default="127.0.0.1", show_default=True, help="Address to listen at."
        ),
        click.option(
            "--port",
            default=port,
            show_default=True,
            type=click.IntRange(0, 65535),
            help="Port to listen at; 0 takes any that is free.",
        ),
        click.option(
            "--tls-cert", type=_FILE, help="Certificate chain, PEM; without it plain HTTP."
        ),
        click.option("--tls-key", type=_FILE, help="Its key, PEM; if it is not in the same file."),
        click.option(
            "--client-ca", type=_FILE, help="Demand client certificates signed by this, PEM."
        ),
        click.option(
            "--insecure", is_flag=True, help="Allow plain HTTP beyond this machine, both ways."
        ),
    ]

    def add(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def listen_of(options: Mapping[str, Any]) -> Listen:
    """What the options say."""
    from keyhole.service.transport import Listen

    return Listen(
        options["host"],
        options["port"],
        options["tls_cert"],
        options["tls_key"],
        options["client_ca"],
        insecure=options["insecure"],
    )
