"""Sums that are withheld because too few clients came: how often one client decides that.

Everybody sees that no model came of a round, and no noise covers that. Where each client is drawn
for itself, one client more can be the one with which a sum is opened. Given that exactly one was
missing, which has probability b, the two populations differ where that client is drawn, which has
probability q, and nowhere else: apart from an event of probability q b, the round is the one that
was accounted for. Told of that event, nobody learns less; so rounds cost what they cost without it,
and T q b more in delta.

Of cohorts of a fixed size nothing is to be charged: how many come does not depend on whose data one
of them has, if clients do not drop out because of their data.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p

__all__ = ["odds_of_deciding"]


def odds_of_deciding(population: int, probability: float, least: int) -> float:
    """The probability q b that a client is in a round, and that the others are one too few.

        q b,    b = C(n - 1, t - 1) q^(t-1) (1 - q)^(n-t)

    Args:
        population: n, clients, each drawn for itself.
        probability: q, with which each takes part to the end.
        least: t, clients below which nothing is released.

    >>> f"{odds_of_deciding(342_477, 50 / 342_477, least=2):.1g}"
    '1e-24'
    >>> odds_of_deciding(2, 0.5, least=2)  # the other one came, alone
    0.25
    """
    others, missing = population - 1, least - 1
    if least <= 0 or missing > others or probability <= 0:
        return 0.0
    if probability >= 1:
        return float(missing == others)
    ways = lgamma(others + 1) - lgamma(missing + 1) - lgamma(others - missing + 1)
    odds = ways + missing * log(probability) + (others - missing) * log1p(-probability)
    return probability * exp(odds)
