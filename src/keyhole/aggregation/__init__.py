"""Adds the updates of a round up (section 4.2): in the clear, or hidden from the servers that add.

This module is the catalogue, which finds aggregations by the names that they declare. It imports
them when it is asked: a device that adds nothing up loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from keyhole.errors import InputError
from keyhole.parts import pick

if TYPE_CHECKING:
    from keyhole.aggregation.base import Aggregation, AggregationAbout, Rounding
    from keyhole.aggregation.exchange import SharedSum

__all__ = ["aggregation_named", "aggregation_names", "all_aggregations", "shared_sum"]


def all_aggregations(
    rounding: Rounding | None = None, signed: bool = False
) -> tuple[Aggregation, ...]:
    """Returns every aggregation that comes with keyhole, sums in the clear first.

    Args:
        rounding: of secure sums; the default one if left out.
        signed: of those in which clients can sign which of them are left.
    """
    from keyhole.aggregation.base import Rounding
    from keyhole.aggregation.masked.method import DENSE_FORM, SKETCH_FORM, SecureSum
    from keyhole.aggregation.plain import DENSE, PLAIN
    from keyhole.aggregation.two_servers.method import TwoServers

    ring = rounding or Rounding()
    masked = (SecureSum(form, ring, signed) for form in (DENSE_FORM, SKETCH_FORM))
    return PLAIN, DENSE, *masked, TwoServers(ring)


def aggregation_names(
    where: Callable[[AggregationAbout], bool] = lambda about: True,
) -> tuple[str, ...]:
    """Returns the names of all aggregations, or of those whose declaration fits.

    >>> aggregation_names(lambda about: about.is_in_clear)
    ('plain', 'dense')
    """
    return tuple(each.about.name for each in all_aggregations() if where(each.about))


def aggregation_named(
    name: str, rounding: Rounding | None = None, *, signed: bool = False
) -> Aggregation:
    """Returns an aggregation.

    Args:
        name: one of `aggregation_names()`, or "module:NAME" of your own, which keeps its own ring.
        rounding: of secure sums; the default one if left out.
        signed: clients sign which of them are left; for masked sums with one server.

    Raises:
        InputError: there is no such aggregation, or nothing in it to sign.
    """
    from keyhole.aggregation.base import AGGREGATION

    known = {each.about.name: each for each in all_aggregations(rounding, signed)}
    found = pick(AGGREGATION, name, known)
    if signed and not (name in known and found.about.can_sign):
        words = ", ".join(aggregation_names(lambda about: about.can_sign))
        raise InputError(
            f"a sum in which clients sign nothing: got signed with {name}; expected {words}; leave "
            "it out: only masked sums with one server have lists to sign"
        )
    return found


def shared_sum(name: str | None = None) -> SharedSum:
    """Returns the sum that two aggregators and devices make of shares.

    Args:
        name: of an aggregation; the one that comes with keyhole if left out.

    Raises:
        InputError: there is no such aggregation, or aggregators cannot run it.
    """
    from keyhole.aggregation.exchange import check_shared

    (shipped,) = aggregation_names(lambda about: about.is_shared)
    return check_shared(aggregation_named(name or shipped))
