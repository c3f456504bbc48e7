"""What training commands read: data, and options that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from keyhole.cli.progress import import_shown
from keyhole.data.cache import cache_root, load
from keyhole.data.federated import Dataset, Kind
from keyhole.data.synthetic import make_synthetic

if TYPE_CHECKING:
    from keyhole.tasks.arms import Arm

__all__ = [
    "SYNTHETIC",
    "data_option",
    "json_option",
    "load_data",
    "out_option",
    "parse_pairs",
    "seed_option",
    "start_jax",
    "synthetic_sizes",
]

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
    from keyhole.training.cores import keep_compiled, use_one_thread

    use_one_thread()
    keep_compiled(cache_root() / "compiled")
