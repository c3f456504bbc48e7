"""Names a small table of popular keys, which a fixed share of every client's keys is asked of.

A query for m keys then asks a table of few rows for most of them, and the whole table for the rest
or for none, whatever a client wants: lengths and work are the same for everyone. That is
distributional private retrieval (Lehmkuhl, Henzinger and Corrigan-Gibbs, USENIX Security 2025),
for batches. A client puts its popular keys into the first part and all others into the second; what
does not fit is dropped, which the client alone sees, and it trains without those keys.

The second part is made cheap: each key lies in one place of the whole table in place of three, so
that of two keys in one place one is dropped. Which one changes from round to round.

Which keys are popular is public, and the same for all clients of a round: the manifest says it. It
says what its author knows of popularity, so it is to be made from what is public already, such as
counts of a public corpus, and never from clients' keys.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.errors import InputError
from keyhole.primitives.coding import mix
from keyhole.primitives.layout import Layout, Part, max_keys_of

_DeliveryT = TypeVar("_DeliveryT")

_NUMBER = re.compile(r"[0-9]{1,13}")
_KEY_OR_RANGE = re.compile(r"([0-9]{1,13})(?:-([0-9]{1,13}))?")
_HEAD, _RANGE = struct.Struct("<QQ"), struct.Struct("<QQ")
_LAST = 1 << 40

PLACES_A_KEY = 2
"""Places of the whole table for each key that is asked of it beside popular ones."""


@dataclass(frozen=True)
class PopularKeys:
    """The popular keys of a table, and how many of a query's keys are asked of them.

    Args:
        ranges: (first, last) of consecutive popular keys, ascending and apart.
        slots: keys of a query that are asked of the popular ones.

    >>> popular = PopularKeys.read("0-2+7", slots=2)
    >>> popular.keys.tolist(), popular.count, popular.words
    ([0, 1, 2, 7], 4, '0-2+7')
    """

    ranges: tuple[tuple[int, int], ...]
    slots: int

    def __post_init__(self) -> None:
        ends = [end for each in self.ranges for end in each]
        is_apart = all(b[0] > a[1] + 1 for a, b in zip(self.ranges, self.ranges[1:], strict=False))
        if not ends or ends != sorted(ends) or ends[0] < 0 or ends[-1] >= _LAST or not is_apart:
            raise _bad(f"{len(self.ranges)} ranges", "ascending ranges of keys, from 0 on")
        if not 1 <= self.slots < self.count:
            raise _bad(
                f"{self.count} popular keys, of which a query asks for {self.slots}",
                "more popular keys than a query asks them for, and one or more of those",
            )

    @staticmethod
    def read(words: str, slots: int) -> PopularKeys:
        """Returns the keys that words say; see `read_words`."""
        return PopularKeys(read_words(words), slots)

    @property
    def words(self) -> str:
        """The keys as `read` takes them."""
        return "+".join(str(a) if a == b else f"{a}-{b}" for a, b in self.ranges)

    @cached_property
    def keys(self) -> KeyArray:
        """All of them, ascending: key i of the popular table is the i-th."""
        return np.concatenate([np.arange(first, last + 1) for first, last in self.ranges])

    @property
    def count(self) -> int:
        """How many keys are popular."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def encoded_bytes(self) -> int:
        """The number of bytes of `encode`."""
        return _HEAD.size + _RANGE.size * len(self.ranges)

    def encode(self) -> bytes:
        """Returns them as params hold them: slots, the number of ranges, and their ends."""
        ends = b"".join(_RANGE.pack(*each) for each in self.ranges)
        return _HEAD.pack(self.slots, len(self.ranges)) + ends

    @staticmethod
    def decode(data: bytes) -> PopularKeys:
        """Returns what `encode` wrote; raises struct.error or InputError for anything else."""
        slots, count = _HEAD.unpack_from(data)
        if len(data) != _HEAD.size + _RANGE.size * count:
            raise _bad(f"{len(data)} bytes", f"{count} ranges")
        return PopularKeys(tuple(_RANGE.iter_unpack(data[_HEAD.size :])), slots)

    def check(self, num_keys: int, max_keys: int) -> None:
        """Raises InputError unless they are keys of a table, and slots of its queries."""
        if self.ranges[-1][1] >= num_keys or self.count >= num_keys or self.slots > max_keys:
            raise _bad(
                f"{self.count} popular keys up to {self.ranges[-1][1]}, {self.slots} a query",
                f"some of {num_keys} keys, and at most {max_keys} a query",
            )

    def split(self, keys: KeyArray, rest: int, seed: int) -> tuple[KeyArray, KeyArray, KeyArray]:
        """Divides a client's keys.

        Args:
            keys: (u,) int64, all different.
            rest: how many keys the whole table is asked for.
            seed: public, of the round; the same for all its tables, so that a key is asked of all
                of them or of none.

        Returns:
            Places in `keys` of those asked of the popular table, of those asked of the whole one,
            and the former's places in the popular table. Who comes first is drawn from the seed.
        """
        order = np.argsort(mix(mix(keys.astype(np.uint64)) ^ np.uint64(seed)), kind="stable")
        at = np.minimum(np.searchsorted(self.keys, keys), self.count - 1)
        is_popular = self.keys[at] == keys
        popular = order[is_popular[order]][: self.slots]
        is_left = np.ones(len(keys), bool)
        is_left[popular] = False
        whole: NDArray[np.int64] = order[is_left[order]][:rest]
        return popular, whole, at[popular]


PopularShares = Mapping[str, tuple[str, float]]
"""Key space -> its popular keys in words, and the share of a query that is asked of them."""

NO_POPULAR: PopularShares = MappingProxyType({})


def with_popular(
    delivery: _DeliveryT,
    shares: PopularShares,
    layout: Layout,
    keys_per_client: Mapping[str, int],
) -> _DeliveryT:
    """Returns a delivery with the popular keys of a run, if there are any; raises InputError where
    it, or the model, has no use for them."""
    if not shares:
        return delivery
    limits = zip(layout.parts, max_keys_of(layout, keys_per_client), strict=True)
    asked = {part.space.name for part, m in limits if popular_of_part(shares, part, m)}
    if unused := ", ".join(sorted(shares.keys() - asked)):
        raise _bad(
            f"those of {unused}, of which no table is asked",
            "key spaces that cut a table alone, and of which clients do not take every key",
        )
    open_one: Any = delivery  # base.py, which says what a delivery is, knows this module
    if not open_one.about.has_popular:
        raise InputError(
            f"this delivery has no table of popular keys: got {open_one.about.name} with those of "
            f"{', '.join(shares)}; expected private retrieval; leave --popular out, or choose a "
            "delivery that has one"
        )
    made: _DeliveryT = replace(open_one, popular=shares)
    return made


def popular_of(
    shares: PopularShares, spaces: Sequence[str], num_keys: int, max_keys: int
) -> PopularKeys | None:
    """Returns the popular keys of a table that key spaces cut, whose queries are for at most
    `max_keys` keys; None where it has none: not one space alone cuts it, or clients take every
    key."""
    if len(spaces) != 1 or spaces[0] not in shares or not 0 < max_keys < num_keys:
        return None
    words, share = shares[spaces[0]]
    found = PopularKeys.read(words, max(1, min(max_keys, round(share * max_keys))))
    found.check(num_keys, max_keys)
    return found


def popular_of_part(shares: PopularShares, part: Part, max_keys: int) -> PopularKeys | None:
    """Returns the popular keys of a part of a model."""
    names = [factor.name for factor in part.product.factors]
    return popular_of(shares, names, part.space.num_keys, max_keys)


def shares_of(delivery: Any) -> PopularShares:
    """Returns the popular keys of a delivery; none where it has no use for them."""
    return getattr(delivery, "popular", NO_POPULAR) if delivery.about.has_popular else NO_POPULAR


def held_bytes(
    delivery: Any, num_keys: int, row_bytes: int, max_keys: int, popular: PopularKeys | None
) -> int:
    """Returns what a server keeps in memory for a table, with its popular keys."""
    told = {} if popular is None else {"popular": popular}
    held: int = delivery.held_bytes(num_keys, row_bytes, max_keys, **told)
    return held


POPULAR_SETTING = "popular"
"""Name of the popular keys in the settings of a round."""


def popular_settings(shares: PopularShares) -> dict[str, Any]:
    """Returns what the settings of a round say of popular keys; nothing where there are none."""
    return {POPULAR_SETTING: {name: [*each] for name, each in shares.items()}} if shares else {}


def shares_of_round(settings: Mapping[str, Any]) -> PopularShares:
    """Returns what the settings of a round say, which can hold anything; nothing if they make no
    sense, and then params that name popular keys are not those of the round."""
    told = settings.get(POPULAR_SETTING)
    pairs = told.items() if isinstance(told, dict) else ()
    return {
        str(space): (each[0], float(each[1]))
        for space, each in pairs
        if isinstance(each, list | tuple)
        and [type(one) for one in each] in ([str, float], [str, int])
        and 0 < each[1] <= 1  # no NaN, and no integer too long for a float
    }


def read_words(words: str) -> tuple[tuple[int, int], ...]:
    """Returns the ranges of keys that words say: `2000` for the first 2,000, or keys and ranges.

    >>> read_words("2000"), read_words("107+0-99+100")
    (((0, 1999),), ((0, 100), (107, 107)))
    """
    if _NUMBER.fullmatch(words):
        return ((0, int(words) - 1),)
    pairs = [_KEY_OR_RANGE.fullmatch(each) for each in words.split("+")]
    ranges = [(int(pair[1]), int(pair[2] or pair[1])) for pair in pairs if pair]
    if len(ranges) < len(pairs):
        raise _bad(repr(words[:40]), "a number of keys, or keys and ranges such as 0-99+250")
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first == found[-1][1] + 1:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def _bad(got: str, allowed: str) -> InputError:
    return InputError(
        f"popular keys that cannot be used: got {got}; expected {allowed}; check --popular and "
        "--popular-share"
    )
