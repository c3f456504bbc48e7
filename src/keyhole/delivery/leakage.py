"""What a party learns of the keys that a client asks for: an output of every delivery."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["KEYS_AND_WHOSE", "KEYS_OF_SOMEBODY", "NOTHING", "WHO_TAKES_PART", "Learned"]


@dataclass(frozen=True)
class Learned:
    """What one party learns.

    Args:
        keys: which keys are asked for.
        whose: which client asks; with `keys`, which client asks for which.
        how_many: how many keys that client asks for, rather than a public maximum.

    >>> str(Learned(keys=True, whose=True, how_many=True))
    'keys and whose they are'
    >>> str(Learned(whose=True))
    'who takes part'
    """

    keys: bool = False
    whose: bool = False
    how_many: bool = False

    def __str__(self) -> str:
        if self.keys:
            return "keys and whose they are" if self.whose else "keys, not whose they are"
        if self.how_many:
            return "who takes part, and how many keys each asks for"
        return "who takes part" if self.whose else "nothing"


NOTHING = Learned()
WHO_TAKES_PART = Learned(whose=True)
KEYS_OF_SOMEBODY = Learned(keys=True)
KEYS_AND_WHOSE = Learned(keys=True, whose=True, how_many=True)
