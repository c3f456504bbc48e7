"""What attacks on secure sums share: two real aggregators, a victim, and a trainer that is the
attacker, with devices of its own whose updates it knows."""

import numpy as np

from tests.service.sums.aggregators import COHORT, plain_sum, round_name, rows_of, terms_of

VICTIM, *OTHERS = COHORT
OWN = OTHERS[:3]  # the attacker's own devices
SEEDS = {name: seed for seed, name in enumerate(COHORT)}


def terms(name=b"a", **more):
    """Of a sum that is not released with fewer than four of the six: two thirds."""
    return terms_of(name, minimum=4, **more)


def what_remains(of, total, names):
    """The sum without the updates of devices that the attacker knows."""
    known = plain_sum(of, [rows_of(of, SEEDS[name]) for name in names])
    return [one - other for one, other in zip(total, known, strict=True)]


def is_the_victims(of, tables):
    """Whether the attacker holds the update of the victim, to the bit."""
    update = plain_sum(of, [rows_of(of, SEEDS[VICTIM])])
    return all(np.array_equal(one, other) for one, other in zip(tables, update, strict=True))


__all__ = [
    "COHORT",
    "OWN",
    "SEEDS",
    "VICTIM",
    "is_the_victims",
    "round_name",
    "terms",
    "what_remains",
]
