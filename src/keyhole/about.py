"""Says what a delivery or an aggregation is: its name, who learns what, and what that rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Leak:
    """What one party learns of a client.

    Args:
        keys: which keys are asked for.
        whose: which client asks; with `keys`, which client asks for which.
        how_many: how many keys that client asks for, rather than a public maximum.
        updates: what it learns of updates, in words; a delivery leaves it out.

    >>> str(Leak(keys=True, whose=True, how_many=True))
    'keys and whose they are'
    >>> str(Leak(whose=True))
    'who takes part'
    >>> str(Leak(updates="the sum of all updates"))
    'the sum of all updates'
    """

    keys: bool = False
    whose: bool = False
    how_many: bool = False
    updates: str = ""

    def __str__(self) -> str:
        if self.updates:
            return self.updates
        if self.keys:
            return "keys and whose they are" if self.whose else "keys, not whose they are"
        if self.how_many:
            return "who takes part, and how many keys each asks for"
        return "who takes part" if self.whose else "nothing"


@dataclass(frozen=True, kw_only=True)
class About:
    """What a delivery or an aggregation declares: the only place where planner, account,
    screens and services read it.

    Args:
        name: the word on the command line, in run.json and on the wire.
        title: in figures and tables.
        leaks: party -> what it learns.
        rests_on: the assumption, in one sentence.
        servers: how many take part.
        is_private: whether something is kept from the server.
        is_served: whether devices can use it over a network.
        options: frozen class of its settings, whose fields become flags; None if it has none.
    """

    name: str
    title: str
    leaks: Mapping[str, Leak] = field(hash=False)
    rests_on: str
    servers: int = 1
    is_private: bool = False
    is_served: bool = True
    options: type | None = None
