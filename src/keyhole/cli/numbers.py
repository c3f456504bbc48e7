"""Reads and writes numbers as people do: whole numbers, bytes and seconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

import click

_MAX = 10**15


def parse_whole(_: click.Context, option: click.Parameter, text: str | None) -> int | None:
    """Returns the whole number that `250`, `1_000_000` or `1e6` says; a callback of click."""
    if text is None:
        return None
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("nan")
    # The bound comes first: 1e999999999 is a number of a gigabyte.
    if not value.is_finite() or not 0 <= value <= _MAX or value != int(value):
        raise click.BadParameter(
            f"{text!r} is not a whole number of 0 to {_MAX:,}, such as 250, 1_000_000 or 1e6",
            param=option,
        )
    return int(value)


def write_bytes(count: float) -> str:
    """Returns a size in the unit that leaves few digits.

    >>> write_bytes(5_352_144), write_bytes(72), write_bytes(2e12), write_bytes(3e24)
    ('5.4 MB', '72 B', '2.0 TB', '3.0e6 EB')
    """
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        count /= 1000
        if count < 999.5:
            return f"{_short(count)} {unit}"
    return f"{_short(count / 1000)} EB"


def write_count(count: float) -> str:
    """Returns a whole number with commas, or what is long in the field's short form.

    >>> write_count(1_000_000), write_count(4 * 10**17)
    ('1,000,000', '4.0e17')
    """
    return f"{count:,.0f}" if count < 1e9 else _power(count)


def write_seconds(seconds: float) -> str:
    """Returns a time in the unit that leaves few digits.

    >>> [write_seconds(t) for t in (0.0, 2.5e-5, 0.0461, 2.84, 90, 5000, 3e5, 3e6, 3e20)]
    ['-', '25 us', '46 ms', '2.8 s', '90 s', '83 min', '83 h', '35 days', '9.5e12 years']
    """
    if seconds == 0:
        return "-"
    units = ((1e-3, "us", 1e-6), (1.0, "ms", 1e-3), (300.0, "s", 1.0), (3 * 3600.0, "min", 60.0))
    for limit, unit, size in (*units, (1e6, "h", 3600.0), (1e8, "days", 86_400.0)):
        if seconds < limit:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds / 31_557_600)} years"


def _short(value: float) -> str:
    """Two digits of what is small, whole numbers of what is not, powers of ten of what is large."""
    if value < 9.95:
        return f"{value:.1f}"
    return f"{value:,.0f}" if value < 99_999.5 else _power(value)


def _power(value: float) -> str:
    """Two digits and a power of ten: 4.0e17."""
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}"
