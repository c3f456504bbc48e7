"""Runs `keyhole mirror`: rounds to an object store, and from there to other machines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from keyhole.cli.bars import progress_bars
from keyhole.cli.options import DIRECTORY, NumberRange, option, options_of
from keyhole.cli.screen import Notices
from keyhole.errors import KeyholeError

if TYPE_CHECKING:
    from keyhole.service.directory import CurrentRound
    from keyhole.service.mirror import Moved
    from keyhole.service.object_store import StoreSettings


_both_ways = options_of(
    option("--endpoint", metavar="URL", help="Address of a store that is not AWS."),
    option("--region", metavar="NAME", help="Region of the bucket."),
    option("--anonymous", is_flag=True, help="Send no signature."),
    option("--keep", default=2, help="Rounds to keep at the destination."),
    option("--workers", default=4, help="Files to copy at a time."),
    option("--again", is_flag=True, help="Copy again what seems to be there."),
    option("--watch", is_flag=True, help="Go on: copy each round once it is current."),
    option(
        "--every",
        default=1.0,
        type=NumberRange(0.05, 86_400),
        help="With --watch: seconds between two looks.",
    ),
    option("--back", is_flag=True, help="Let an older round replace a newer one."),
    option("--json", "as_json", is_flag=True, help="Print JSON."),
)


@click.group()
def mirror() -> None:
    """Copy published rounds to an object store and back.

    URL is s3://bucket/prefix, file:///directory or similar. Credentials come from the environment:
    AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL.
    """


@mirror.command()
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@click.argument("url", metavar="URL")
@_both_ways
def push(directory: Path, url: str, **options: Any) -> None:
    """Store the current round of the rounds directory DIR under URL.

    The round is current there once all of it is stored. The same command
    resumes an upload that broke off.
    """
    from keyhole.service.directory import read_current
    from keyhole.service.mirror import push_round

    copy = partial(push_round, directory, url)
    _run("push to", url, copy, lambda _: read_current(directory), options)


@mirror.command()
@click.argument("url", metavar="URL")
@click.argument("directory", metavar="DIR", type=DIRECTORY)
@_both_ways
def pull(url: str, directory: Path, **options: Any) -> None:
    """Fetch the current round of URL into the rounds directory DIR.

    Everything is checked against the manifest before the round is current in DIR; a service that
    serves DIR then changes over by itself.
    """
    from keyhole.service.mirror import fetch_round, stored_current
    from keyhole.service.object_store import open_store

    copy = partial(fetch_round, url, directory)
    _run("pull from", url, copy, lambda store: stored_current(open_store(url, store)), options)


def _run(
    verb: str,
    url: str,
    copy: Callable[..., Moved],
    look: Callable[[StoreSettings], CurrentRound | None],
    options: dict[str, Any],
) -> None:
    """Copies the current round; with --watch, every round from then on."""
    from keyhole.service.mirror import MirrorSettings
    from keyhole.service.object_store import StoreSettings, open_store

    store = StoreSettings(options["endpoint"], options["region"], options["anonymous"])
    open_store(url, store)  # what is missing here, or no store, is so in a second, too
    title = f"{verb} {_without_secrets(url)}"
    settings = MirrorSettings(*(options[n] for n in ("keep", "workers", "again", "back")))

    def copy_shown() -> None:
        found = partial(copy, store=store, settings=settings)
        _show(title, found, options["as_json"], is_watching=options["watch"])

    if options["watch"]:
        _watch(title, copy_shown, partial(look, store), options["every"])
    else:
        copy_shown()


def _watch(
    title: str, copy: Callable[[], None], look: Callable[[], CurrentRound | None], every: float
) -> None:
    """Copies each round once it is current, until interrupted; what fails is tried again."""
    from keyhole.errors import NotFoundError
    from keyhole.signals import stop_on_signals

    notices, last = Notices(), None
    with stop_on_signals() as stop:
        while not stop.is_set():
            try:
                current = look()
                if current is not None and current != last:
                    copy()
                    last = current
                    notices.forget()
            except NotFoundError:  # no round yet, or one that was replaced while it was copied
                notices.tell(f"{title}: waiting for a round")
            except KeyholeError as error:
                notices.tell(f"keyhole: {title}: {error}; trying again")
            stop.wait(every)


def _show(title: str, copy: Callable[..., Moved], as_json: bool, *, is_watching: bool) -> None:
    """Copies with a bar, and says what was done. Who watches is shown no bars in a log, and no
    round that was there already."""
    if is_watching and not sys.stderr.isatty():
        moved = copy()
    else:
        with progress_bars() as bars:
            task = bars.add_task(title, total=None, note="", unit="bytes")

            def tell(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            moved = copy(progress=tell)
    if is_watching and not (moved.bytes_moved or moved.removed):
        return
    if as_json:
        click.echo(json.dumps(asdict(moved), indent=2))
        return
    known = f", {decimal(moved.bytes_known)} were there" if moved.bytes_known else ""
    gone = f"; removed {', '.join(moved.removed)}" if moved.removed else ""
    click.echo(f"{moved.round} is current: {decimal(moved.bytes_moved)} copied{known}{gone}")


def _without_secrets(url: str) -> str:
    """The URL without a name and password, or a query."""
    scheme, _, rest = url.partition("?")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
