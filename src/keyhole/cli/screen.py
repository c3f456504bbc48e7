"""Shows how far long commands are, on standard error, also where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from keyhole.service.served import Waiting

_PATIENCE = 5.0  # seconds without an update after which a terminal says who is missing
_NAMED = 20  # devices that one line names


def make_bars() -> Progress:
    """Returns the bars that `progress_bars` shows."""
    return Progress(
        _Shrinking("{task.description}"),  # where a line is too long, words are cut, not counts
        BarColumn(bar_width=16),
        _Count(Column(no_wrap=True)),
        _Rate(Column(no_wrap=True)),
        TimeElapsedColumn(Column(no_wrap=True)),
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _Shrinking("{task.fields[note]}"),
        console=Console(stderr=True),
    )


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Shows bars with a description, the count, the rate and the time that remains; where an error
    ends the work, they are wiped off.

    A task is added with a `note`, which may be empty, and where it helps with a `unit`: what is
    counted, such as "clients"; "bytes" are told as kB and MB.
    """
    bars = make_bars()
    with bars:
        try:
            yield bars
        except BaseException:
            bars.live.transient = True
            bars.console.quiet = not bars.console.is_interactive  # it would end with an empty line
            raise


class _Shrinking(ProgressColumn):
    """A text that is cut where the line is too long."""

    def __init__(self, template: str) -> None:
        super().__init__(Column(no_wrap=False))
        self._template = template

    def render(self, task: Task) -> Text:
        """Returns the text of a task, which never takes a second line."""
        return Text(self._template.format(task=task), no_wrap=True, overflow="ellipsis")


def import_shown(source: str | Path) -> Path:
    """Returns the directory of a dataset, imported where it is not, with a bar for each step."""
    from keyhole.data.cache import cache_root, find_source
    from keyhole.data.open import find_current, import_dataset, locate

    if (found := find_current(source, cache_root())) is not None:
        return found
    path = locate(source)
    known = find_source(path)
    with progress_bars() as bars:
        hashing = bars.add_task(f"hash {known.name}", total=None, note="", unit="bytes")
        what = f"import {known.name}"
        reading = bars.add_task(what, total=None, start=False, note="", unit=known.unit)

        def show_hashing(done: int, total: int) -> None:
            bars.update(hashing, completed=done, total=total)
            if done == total:  # the first client may take long, and its time counts
                bars.start_task(reading)

        directory = import_dataset(
            path,
            hashing=show_hashing,
            progress=lambda done, total: bars.update(reading, completed=done, total=total),
        )
        if not bars.tasks[-1].completed:  # bytes that are known already are not read
            bars.update(reading, visible=False)
    return directory


class _Count(ProgressColumn):
    """How much is done, of how much."""

    def render(self, task: Task) -> Text:
        """Returns 3/7, 3/7 clients, or 3.0 MB/7.1 MB; ? stands for what is not known yet."""
        unit = task.fields.get("unit", "")
        done = _number(task.completed, unit)
        total = "?" if task.total is None else _number(task.total, unit)
        named = f" {unit}" if unit not in ("", "bytes") else ""
        return Text(f"{done:>{len(total)}}/{total}{named}", style="progress.download")


class _Rate(ProgressColumn):
    """Rounds, bytes or whatever is counted, per second."""

    def render(self, task: Task) -> Text:
        """Returns the rate of late, or that since the start where there was one step alone."""
        speed = task.finished_speed or task.speed
        seconds = task.finished_time or task.elapsed
        if speed is None and task.completed and seconds:
            speed = task.completed / seconds
        if speed is None:
            return Text("")
        is_bytes = task.fields.get("unit") == "bytes"
        said = decimal(int(speed)) if is_bytes else f"{speed:,.1f}"
        return Text(f"{said}/s", style="progress.data.speed")


def _number(value: float, unit: str) -> str:
    return decimal(int(value)) if unit == "bytes" else str(int(value))


class Notices:
    """Lines on standard error, each kind once until something has changed."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, kind: str | None = None) -> None:
        """Prints a line, unless one of its kind is there already: the text, unless told."""
        kind = text if kind is None else kind
        if kind not in self._told:
            self._told.add(kind)
            click.echo(text, err=True)

    def forget(self) -> None:
        """Things go on: what happens from now on is news again."""
        self._told.clear()


class WaitingNotice:
    """Says on a terminal which devices a round waits for, by name, once it stands still. A log
    names none: `keyhole.service.telling`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._since, self._is_told = (-1, True, -1), 0.0, False

    def __call__(self, waiting: Waiting) -> None:
        """Takes note of what a round waits for."""
        from keyhole.service.status import gathers

        if (now := (waiting.round, waiting.is_drawn, waiting.here)) != self._last:
            self._last, self._since, self._is_told = now, self._clock(), False
        is_still = self._clock() - self._since >= _PATIENCE
        if not self._is_told and is_still and not waiting.is_drawn:
            self._is_told = True
            click.echo(gathers(waiting.round, waiting.here, waiting.goal), err=True)
        if not self._is_told and is_still and waiting.missing:
            self._is_told = True
            more = len(waiting.missing) - _NAMED
            click.echo(
                f"round {waiting.round}: {waiting.here} of {waiting.goal} updates are here; "
                f"waiting for {', '.join(waiting.missing[:_NAMED])}"
                + (f" and {more} more" if more > 0 else ""),
                err=True,
            )
