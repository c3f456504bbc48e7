"""Numbers as people type them and read them: whole numbers, bytes and seconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import click

__all__ = ["parse_whole", "write_bytes", "write_count", "write_seconds"]

_MOST = 10**15


def parse_whole(_: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Turns `250`, `1_000_000` or `1e6` into a whole number; a callback of click."""
    if text is None:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    # The bound comes first: 1e999999999 is a number of a gigabyte.
    if not value.is_finite() or not 0 <= value <= _MOST or value != int(value):
        raise click.BadParameter(
            f"{text!r} is not a whole number of 0 to {_MOST:,}, such as 250, 1_000_000 or 1e6",
            param=option,
        )
    return int(value)


def write_bytes(count: float) -> str:
    """Returns a size in the unit that leaves few digits.

    >>> write_bytes(5_352_144), write_bytes(72), write_bytes(2e12)
    ('5.4 MB', '72 B', '2.0 TB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{_short(count)} {unit}"
    return f"{_short(count / 1000)} TB"


def write_count(count: int) -> str:
    """Returns a whole number with commas."""
    return f"{count:,}"


def write_seconds(seconds: float) -> str:
    """Returns a time in the unit that leaves few digits.

    >>> [write_seconds(t) for t in (0.0, 2.5e-5, 0.0461, 2.84, 90, 5000, 3e5)]
    ['-', '25 us', '46 ms', '2.8 s', '90 s', '83 min', '83 h']
    """
    if seconds == 0:
        return "-"
    for limit, unit, size in ((1e-3, "us", 1e-6), (1.0, "ms", 1e-3), (300.0, "s", 1.0)):
        if seconds < limit:
            return f"{_short(seconds / size)} {unit}"
    if seconds < 3 * 3600:
        return f"{_short(seconds / 60)} min"
    return f"{_short(seconds / 3600)} h"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
