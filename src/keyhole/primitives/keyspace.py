"""Key spaces and keys: which numbers a client may ask for, checked in one place.

A key space is `[K] = {0, ..., K-1}`. The paper counts from 1; keyhole counts from 0. `Keys` are
what one client asks for: a sequence, so order and repeats mean something, and clients may have
different numbers of keys, none included. Anyone who holds a `Keys` knows that it has been checked.

Maps between key spaces: products, sequences as one key, and buckets (sections 3.3 and 6).

All arithmetic is unsigned 64-bit, so that the last key of the largest space, 2^63 - 1, is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.errors import KeySpaceError
from keyhole.primitives.placement import ClientValue, at_clients, map_clients

MAX_KEYS = 2**63
"""The largest key space: its last key, 2^63 - 1, is the largest int64."""


@dataclass(frozen=True)
class KeySpace:
    """The keys 0 to num_keys - 1, under a name that tells them from other keys.

    Args:
        name: what a key stands for, such as "word" or "filter".
        num_keys: K, from 1 to 2^63.

    Raises:
        KeySpaceError: `num_keys` is not a whole number in that range.

    >>> word = KeySpace("word", 10_000)
    >>> list(word.keys([42, 7, 42]))
    [42, 7, 42]
    >>> word.keys([10_000])
    Traceback (most recent call last):
    keyhole.errors.KeySpaceError: key is outside key space 'word': got 10000; expected 0..9999; \
rebuild the vocabulary or raise num_keys
    """

    name: str
    num_keys: int

    def __post_init__(self) -> None:
        whole = isinstance(self.num_keys, (int, np.integer)) and not isinstance(self.num_keys, bool)
        if not whole or not 1 <= self.num_keys <= MAX_KEYS:
            raise KeySpaceError(
                f"key space {self.name!r} has an impossible size: got {self.num_keys}; expected a "
                f"whole number from 1 to 2^63 ({MAX_KEYS}); count the keys; a product of key "
                "spaces must stay below that too"
            )
        object.__setattr__(self, "num_keys", int(self.num_keys))

    def keys(self, values: Any) -> Keys:
        """Returns `values` as the keys of one client, in their order, repeats kept.

        Args:
            values: integers in 0..num_keys-1, shape (m,); m = 0 is allowed.

        Raises:
            KeySpaceError: wrong rank, not integers, or out of range.
        """
        array = np.asarray(values)
        if array.ndim != 1:
            raise KeySpaceError(
                f"keys of {self.name!r} have the wrong rank: got shape {array.shape}; expected one "
                "dimension, (m,); pass a flat sequence of keys"
            )
        if array.size and not np.issubdtype(array.dtype, np.integer):
            self._refuse_dtype(array)
        if array.size:
            self._check_range(array)
        return Keys(self, array.astype(np.int64))

    def all_keys(self) -> Keys:
        """Returns every key in order: selecting them all is training without select."""
        return Keys(self, np.arange(self.num_keys, dtype=np.int64))

    def place(self, values: Mapping[Any, Any] | Sequence[Any]) -> ClientValue[Keys]:
        """Places keys on clients; each client's keys are checked there.

        >>> KeySpace("row", 5).place([[0, 3], [4], []])
        ClientValue(3 of 3 clients present)
        """
        return map_clients(self.keys, at_clients(values))

    def _refuse_dtype(self, array: np.ndarray[Any, Any]) -> None:
        """Python integers beyond 64 bits make an object array: those are out of range, not typed
        wrong."""
        if array.dtype == object and all(isinstance(key, int) for key in array):
            self._check_range(array)
        raise KeySpaceError(
            f"keys of {self.name!r} are not integers: got dtype {array.dtype}; expected integers; "
            "convert them where they are made; rounding here would hide a mistake"
        )

    def _check_range(self, array: np.ndarray[Any, Any]) -> None:
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self.num_keys:
            raise KeySpaceError(
                f"key is outside key space {self.name!r}: got {low if low < 0 else high}; expected "
                f"0..{self.num_keys - 1}; rebuild the vocabulary or raise num_keys"
            )


@dataclass(frozen=True, eq=False, repr=False)
class Keys:
    """The keys of one client, checked: `z_n = [z_{n,1}, ..., z_{n,m}]`.

    Made by `KeySpace.keys`. Iterating gives Python integers; `array` is int64, read-only. Printing
    shows how many there are and never which: keys may be private.

    >>> z = KeySpace("word", 10).keys([3, 1, 3])
    >>> z
    Keys(3 of 'word')
    >>> z == KeySpace("word", 10).keys([3, 1, 3])
    True
    """

    space: KeySpace
    array: KeyArray

    def __post_init__(self) -> None:
        self.array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> KeyArray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        return self.space == other.space and np.array_equal(self.array, other.array)

    def __hash__(self) -> int:
        return hash((self.space, self.array.tobytes()))

    def __reduce__(self) -> tuple[object, ...]:
        """Keys stay read-only in another process."""
        return Keys, (self.space, self.array)

    def __repr__(self) -> str:
        return f"Keys({len(self)} of {self.space.name!r})"


@dataclass(frozen=True)
class Product:
    """Tuples of keys as one key, in mixed radix with the last factor fastest (footnote of section
    3.3).

    `(k_1, ..., k_r)` is the key `(...(k_1 K_2 + k_2) K_3 + ...) K_r + k_r` of `[K_1 K_2 ... K_r]`.
    The product of no spaces has one key, 0: that is the key space of a broadcast.

    Args:
        factors: the key spaces, in order.

    >>> pair = Product((KeySpace("row", 3), KeySpace("column", 4)))
    >>> rows, columns = pair.factors
    >>> list(pair.join(rows.keys([0, 2]), columns.keys([3, 1])))
    [3, 9]
    >>> [list(keys) for keys in pair.split(pair.space.keys([3, 9]))]
    [[0, 2], [3, 1]]
    """

    factors: tuple[KeySpace, ...]

    @cached_property
    def space(self) -> KeySpace:
        """The product space; raises KeySpaceError if it has more than 2^63 keys."""
        name = "*".join(factor.name for factor in self.factors) or "everyone"
        return KeySpace(name, prod(factor.num_keys for factor in self.factors))

    def join(self, *keys: Keys) -> Keys:
        """Returns the product keys of tuples taken position by position.

        Args:
            keys: one sequence per factor, all of the same length.
        """
        self._check(keys)
        if len(keys) == 1:
            return keys[0]
        if len({len(k) for k in keys}) > 1:
            raise KeySpaceError(
                "sequences to join differ in length: got "
                f"{', '.join(str(len(k)) for k in keys)}; expected equal lengths; use grid to "
                "pair each key with each"
            )
        joined = np.zeros(len(keys[0]) if keys else 1, np.uint64)
        for factor, k in zip(self.factors, keys, strict=True):
            joined = joined * np.uint64(factor.num_keys) + k.array.view(np.uint64)
        return Keys(self.space, joined.view(np.int64))

    def split(self, keys: Keys) -> tuple[Keys, ...]:
        """Returns the factors' keys: the inverse of `join`."""
        check_space(keys, self.space)
        rest, parts = keys.array.view(np.uint64), []
        for factor in reversed(self.factors):
            rest, digit = np.divmod(rest, np.uint64(factor.num_keys))
            parts.append(Keys(factor, digit.view(np.int64)))
        return tuple(reversed(parts))

    def grid(self, *keys: Keys) -> Keys:
        """Returns the product keys of every combination, the last sequence running fastest."""
        if len(self.factors) < 2:  # as they are: most models are cut once
            return self.join(*keys)
        self._check(keys)
        spread = np.meshgrid(*(k.array for k in keys), indexing="ij")
        return self.join(*(Keys(k.space, s.ravel()) for k, s in zip(keys, spread, strict=True)))

    def _check(self, keys: tuple[Keys, ...]) -> None:
        if len(keys) != len(self.factors):
            raise KeySpaceError(
                f"a product takes one sequence of keys per factor: got {len(keys)} sequences; "
                f"expected {len(self.factors)}; pass them in the order of the factors"
            )
        for factor, k in zip(self.factors, keys, strict=True):
            check_space(k, factor)


@dataclass(frozen=True)
class Sequences:
    """Sequences of `length` keys as one key of `[K^length]` (end of section 3.3).

    Args:
        items: the key space of one element.
        length: m, the number of keys in a sequence.

    >>> triples = Sequences(KeySpace("digit", 10), 3)
    >>> list(triples.join(triples.items.keys([4, 0, 7])))
    [407]
    >>> list(triples.split(407))
    [4, 0, 7]
    """

    items: KeySpace
    length: int

    @cached_property
    def space(self) -> KeySpace:
        """The space of all sequences; raises KeySpaceError if there are more than 2^63."""
        return KeySpace(f"{self.items.name}^{self.length}", self.items.num_keys**self.length)

    def join(self, keys: Keys) -> Keys:
        """Returns the one key that stands for the sequence."""
        check_space(keys, self.items)
        if len(keys) != self.length:
            raise KeySpaceError(
                f"sequence has the wrong length: got {len(keys)}; expected {self.length}; make one "
                "Sequences for each length"
            )
        number = 0
        for key in keys:
            number = number * self.items.num_keys + key
        return self.space.keys([number])

    def split(self, key: int) -> Keys:
        """Returns the sequence that `key` stands for."""
        (number,) = self.space.keys([key])
        digits: list[int] = []
        for _ in range(self.length):
            number, digit = divmod(number, self.items.num_keys)
            digits.append(digit)
        return self.items.keys(digits[::-1])


@dataclass(frozen=True)
class Buckets:
    """Groups of keys that are selected together, so that fewer slices need to be made (section 6).

    Contiguous buckets hold neighbouring keys: bucket b is `b s, ..., b s + s - 1` for bucket size
    s. Striped buckets deal keys out in turn, key k to bucket k mod B, which spreads the frequent
    keys of a vocabulary ordered by frequency.

    Args:
        items: the key space that is grouped.
        size: the most keys in a bucket; fewer in the last one (contiguous) or by one in some
            (striped).
        striped: deal keys out instead of keeping neighbours together.

    >>> buckets = Buckets(KeySpace("word", 10), size=4)
    >>> [list(buckets.members(b)) for b in buckets.space.all_keys()]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> list(buckets.covering(buckets.items.keys([9, 1, 8])))
    [2, 0]
    """

    items: KeySpace
    size: int
    striped: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.items.num_keys:
            raise KeySpaceError(
                f"bucket size does not fit the key space: got {self.size}; expected "
                f"1..{self.items.num_keys}; choose a size that divides the keys into a moderate "
                "number of buckets"
            )

    @cached_property
    def space(self) -> KeySpace:
        """The space of buckets."""
        return KeySpace(f"{self.items.name} bucket", -(-self.items.num_keys // self.size))

    def split(self, keys: Keys) -> tuple[Keys, Array]:
        """Returns each key's bucket and its place in that bucket, shape (m,) uint64."""
        check_space(keys, self.items)
        numbers = keys.array.view(np.uint64)
        if self.striped:
            place, bucket = np.divmod(numbers, np.uint64(self.space.num_keys))
        else:
            bucket, place = np.divmod(numbers, np.uint64(self.size))
        return Keys(self.space, bucket.view(np.int64)), place

    def join(self, buckets: Keys, places: Array) -> Keys:
        """Returns the keys at `places` of `buckets`: the inverse of `split`."""
        check_space(buckets, self.space)
        bucket, place = buckets.array.view(np.uint64), np.asarray(places, np.uint64)
        if self.striped:
            return self.items.keys(place * np.uint64(self.space.num_keys) + bucket)
        return self.items.keys(bucket * np.uint64(self.size) + place)

    def covering(self, keys: Keys) -> Keys:
        """Returns the distinct buckets that hold `keys`, in the order in which they are first
        needed."""
        buckets = self.split(keys)[0].array
        _, first = np.unique(buckets, return_index=True)
        return Keys(self.space, buckets[np.sort(first)])

    def members(self, bucket: int) -> Keys:
        """Returns the keys of one bucket, in order."""
        (number,) = self.space.keys([bucket])
        start, step = (number, self.space.num_keys) if self.striped else (number * self.size, 1)
        stop = self.items.num_keys if self.striped else start + self.size
        return self.items.keys(list(range(start, min(stop, self.items.num_keys), step)))


def check_space(keys: Keys, space: KeySpace) -> None:
    """Raises KeySpaceError unless `keys` are checked keys of `space`."""
    found = keys.space if isinstance(keys, Keys) else None
    if found is not space and found != space:
        got = f"{found.name!r} of {found.num_keys}" if found is not None else type(keys).__name__
        raise KeySpaceError(
            f"keys belong to another key space: got {got}; expected {space.name!r} of "
            f"{space.num_keys}; make them with KeySpace.keys of that space"
        )


def are_same_rising(keys: Sequence[KeyArray]) -> bool:
    """Returns whether clients hold the same keys, each once and in order: all of them, as a rule.

    >>> are_same_rising([np.array([1, 4]), np.array([1, 4])]), are_same_rising([np.array([4, 1])])
    (True, False)
    """
    first, *others = keys
    if not all(z is first or np.array_equal(z, first) for z in others):
        return False
    return bool(np.all(first[1:] > first[:-1]))


def distinct_keys(keys: Sequence[KeyArray]) -> KeyArray:
    """Returns the distinct keys of several clients, ascending; at once where all hold the same.

    >>> distinct_keys([np.array([4, 1]), np.array([1, 7])]).tolist()
    [1, 4, 7]
    """
    return keys[0] if are_same_rising(keys) else np.unique(np.concatenate(keys))


_KEY_BYTES = 8  # an int64 on the wire


def key_bytes(keys: Iterable[Keys]) -> int:
    """Returns the number of bytes that name keys on the wire: 0 for a client that takes every key
    of a space."""
    return sum(bytes_of_keys(len(z), z.space.num_keys) for z in keys)


def bytes_of_keys(count: int, num_keys: int) -> int:
    """Returns the number of bytes that name `count` keys of a space of `num_keys` on the wire."""
    return _KEY_BYTES * count if count < num_keys else 0
