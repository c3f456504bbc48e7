"""Random numbers as a function of where they are used, not of when."""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["Place", "generator"]


class Place(IntEnum):
    """What a random number is for: the word between the trial and the round."""

    COHORT = 1
    LOST_BEFORE = 2
    LOST_AFTER = 3
    KEYS = 4
    CLIENT = 5
    DEVICE = 6
    DURATION = 7
    ROUND_KEYS = 8
    MODEL = 9


def generator(seed: int, *place: int) -> np.random.Generator:
    """Returns the generator of one place in a run, such as (trial, Place.CLIENT, round, client).

    Two arms of a comparison that ask for the same place draw the same numbers, in whatever order
    and on however many workers they run.

    Args:
        seed: of the run, 0 or more.
        place: whole numbers, 0 or more.

    >>> generator(7, 0, 3).integers(100) == generator(7, 0, 3).integers(100)
    np.True_
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, *place])))
