"""Finds aggregations by the names that they declare."""

from __future__ import annotations

from keyhole.aggregation.base import Aggregation, Rounding
from keyhole.aggregation.masked.method import DenseForm, SecureSum, SketchForm
from keyhole.aggregation.plain import PLAIN, DenseSum
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.errors import InputError


def all_aggregations(
    rounding: Rounding | None = None, signed: bool = False
) -> tuple[Aggregation, ...]:
    """Returns every aggregation that comes with keyhole, sums in the clear first.

    Args:
        rounding: of secure sums.
        signed: of those in which clients can sign.
    """
    ring = rounding or Rounding()
    masked = (SecureSum(form, ring, signed) for form in (DenseForm(), SketchForm()))
    return PLAIN, DenseSum(), *masked, TwoServers(ring)


_ABOUTS = tuple(each.about for each in all_aggregations())

AGGREGATIONS: tuple[str, ...] = tuple(about.name for about in _ABOUTS)
"""Names of all of them."""

SECURE: tuple[str, ...] = tuple(about.name for about in _ABOUTS if about.ring is not None)
"""Those that add in a ring, and hide updates from the server."""

SIGNED: tuple[str, ...] = tuple(about.name for about in _ABOUTS if about.can_sign)
"""Those in which clients can sign which of them are left."""

(SHARED,) = (about.name for about in _ABOUTS if about.is_served and about.servers == 2)
"""The one that two aggregators make of shares that devices send."""


def aggregation_named(
    name: str, rounding: Rounding | None = None, *, signed: bool = False
) -> Aggregation:
    """Returns an aggregation.

    Args:
        name: of `AGGREGATIONS`.
        rounding: of secure sums.
        signed: of secure sums with one server: clients sign which of them are left.

    Raises:
        InputError: there is no such aggregation, or nothing in it to sign.
    """
    if name not in AGGREGATIONS:
        raise InputError(
            "no such way to add updates up",
            got=name,
            allowed=", ".join(AGGREGATIONS),
            fix="choose one of them",
        )
    if signed and name not in SIGNED:
        raise InputError(
            "a sum in which clients sign nothing",
            got=f"signed with {name}",
            allowed=", ".join(SIGNED),
            fix="leave it out: only masked sums with one server have lists to sign",
        )
    return {each.about.name: each for each in all_aggregations(rounding, signed)}[name]
