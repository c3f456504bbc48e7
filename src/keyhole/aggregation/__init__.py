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
    from keyhole.aggregation.robust import Untouched

__all__ = ["aggregation_named", "aggregation_names", "all_aggregations", "shared_sum"]


def all_aggregations(
    rounding: Rounding | None = None,
    signed: bool = False,
    trim: float | None = None,
    untouched: Untouched | None = None,
    min_per_key: int = 0,
    count_noise: float = 0.0,
) -> tuple[Aggregation, ...]:
    """Returns every aggregation that comes with keyhole, those in the clear first.

    Args:
        rounding: of secure sums; the default one if left out.
        signed: of those in which clients can sign which of them are left.
        trim: of those that leave out a share of values at each end; the default one if left out.
        untouched: of robust ones, what clients count as that did not choose a key.
        min_per_key: of those that can drop rows which fewer clients sent before they are opened.
        count_noise: on the counts by which they do, in clients.
    """
    from keyhole.aggregation.base import Rounding
    from keyhole.aggregation.masked.method import DENSE_FORM, SKETCH_FORM, SecureSum
    from keyhole.aggregation.plain import DENSE, PLAIN
    from keyhole.aggregation.robust import DEFAULT_TRIM, HALF, TrimmedMean
    from keyhole.aggregation.two_servers.method import TwoServers

    ring = rounding or Rounding()
    masked = (SecureSum(form, ring, signed) for form in (DENSE_FORM, SKETCH_FORM))
    shares = (DEFAULT_TRIM if trim is None else trim, HALF)
    robust = (TrimmedMean(share, untouched or "left-out") for share in shares)
    shared = TwoServers(ring, min_per_key=min_per_key, count_noise=count_noise)
    return PLAIN, DENSE, *robust, *masked, shared


def aggregation_names(
    where: Callable[[AggregationAbout], bool] = lambda about: True,
) -> tuple[str, ...]:
    """Returns the names of all aggregations, or of those whose declaration fits.

    >>> aggregation_names(lambda about: about.is_in_clear)
    ('plain', 'dense', 'trimmed-mean', 'median')
    """
    return tuple(each.about.name for each in all_aggregations() if where(each.about))


def aggregation_named(
    name: str,
    rounding: Rounding | None = None,
    *,
    signed: bool = False,
    trim: float | None = None,
    untouched: Untouched | None = None,
    min_per_key: int = 0,
    count_noise: float = 0.0,
) -> Aggregation:
    """Returns an aggregation.

    Args:
        name: one of `aggregation_names()`, or "module:NAME" of your own, which keeps its own ring.
        rounding: of secure sums; the default one if left out.
        signed: clients sign which of them are left; for masked sums with one server.
        trim: the share of values that is left out at each end; for the trimmed mean.
        untouched: what clients count as that did not choose a key; for robust sums.
        min_per_key: rows that fewer clients sent are dropped before they are opened; for sums of
            two servers.
        count_noise: on the counts by which they are, in clients.

    Raises:
        InputError: there is no such aggregation, or nothing in it to sign, to trim or to drop.
    """
    from keyhole.aggregation.base import AGGREGATION

    every = all_aggregations(rounding, signed, trim, untouched, min_per_key, count_noise)
    known = {each.about.name: each for each in every}
    found = pick(AGGREGATION, name, known)
    about = found.about if name in known else None
    if signed and not (about and about.can_sign):
        words = ", ".join(aggregation_names(lambda about: about.can_sign))
        raise InputError(
            f"a sum in which clients sign nothing: got signed with {name}; expected {words}; leave "
            "it out: only masked sums with one server have lists to sign"
        )
    if (trim is not None and not (about and about.can_trim)) or (
        untouched is not None and not (about and about.is_robust)
    ):
        raise InputError(
            f"a sum that leaves no value out: got {name} with trim {trim}, untouched {untouched}; "
            f"expected {', '.join(aggregation_names(lambda about: about.is_robust))}, trim with "
            "the first alone; leave them out"
        )
    if min_per_key and not (about and about.min_per_key):
        words = ", ".join(each.about.name for each in every if each.about.min_per_key)
        raise InputError(
            f"a sum that opens every row: got {name}, and rows of at least {min_per_key} clients; "
            f"expected {words}; choose it, or leave --min-clients-per-key out"
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
