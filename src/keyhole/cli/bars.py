"""Draws bars of progress on standard error, also where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import ceil

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from keyhole.logs import is_for_machines


def make_bars() -> Progress:
    """Returns the bars that `progress_bars` shows."""
    return Progress(
        _Shrinking("{task.description}"),  # where a line is too long, words are cut, not counts
        BarColumn(bar_width=16),
        _Count(Column(no_wrap=True)),
        _Rate(Column(no_wrap=True)),
        TimeElapsedColumn(Column(no_wrap=True)),
        TextColumn("left"),
        _Left(Column(no_wrap=True)),
        _Shrinking("{task.fields[note]}"),
        console=Console(stderr=True),
        disable=is_for_machines(),
    )


@contextmanager
def progress_bars() -> Iterator[Progress]:
    """Shows bars with a description, the count, the rate and the time that remains; where an error
    ends the work, they are wiped off.

    A task is added with a `note`, which may be empty, and where it helps with a `unit`: what is
    counted, such as "clients"; "bytes" are told as kB and MB. What was done before, by another
    process, is told with `reset` and in `before`, and counts in no rate.
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
        """Returns the rate since the start."""
        speed = _speed(task)
        if speed is None:
            return Text("")
        is_bytes = task.fields.get("unit") == "bytes"
        said = decimal(int(speed)) if is_bytes else f"{speed:,.1f}"
        return Text(f"{said}/s", style="progress.data.speed")


class _Left(ProgressColumn):
    """The time that remains at the rate since the start, which waiting lengthens."""

    def render(self, task: Task) -> Text:
        """Returns 0:01:05, or dashes while nothing is done."""
        speed, style = _speed(task), "progress.remaining"
        if task.remaining is None or not speed:
            return Text("-:--:--", style=style)
        return Text(str(timedelta(seconds=ceil(task.remaining / speed))), style=style)


def _speed(task: Task) -> float | None:
    """Steps of this process per second; None before the first."""
    done = task.completed - task.fields.get("before", 0)
    seconds = task.finished_time or task.elapsed
    return done / seconds if done and seconds else None


def _number(value: float, unit: str) -> str:
    return decimal(int(value)) if unit == "bytes" else str(int(value))
