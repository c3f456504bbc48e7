"""Counts the keys in a client's data, and chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from traceback import walk_tb
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.errors import InputError
from keyhole.keys.budget import DeviceClass
from keyhole.parts import near_miss
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import KeysBySpace

_COUNTED = 1 << 14  # keys that are counted in a list of all, however few occur


@dataclass(frozen=True, eq=False)
class KeyCounts:
    """What occurs in a client's own data: keys of one key space, and how often.

    Args:
        space: all keys there are.
        keys: those that occur, int64 (own,), each once, rising.
        counts: how often, int64 (own,), 1 or more.

    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([7, 3, 7]))
    >>> counts.keys.tolist(), counts.counts.tolist()
    ([3, 7], [1, 2])
    """

    space: KeySpace
    keys: KeyArray
    counts: Array

    @staticmethod
    def of(space: KeySpace, occurrences: Array) -> KeyCounts:
        """Counts keys in the order they occur in; out of range is an error."""
        keys = space.keys(occurrences).array
        if len(keys) and keys.max() <= _COUNTED + 8 * len(keys):  # counting takes no sort
            every = np.bincount(keys)
            found = np.flatnonzero(every > 0)
            return KeyCounts(space, found, every[found])
        found, counts = np.unique(keys, return_counts=True)
        return KeyCounts(space, found, counts.astype(np.int64))

    @staticmethod
    def none(space: KeySpace) -> KeyCounts:
        """Nothing in the data names a key, as with pixels and filters."""
        return KeyCounts(space, np.empty(0, np.int64), np.empty(0, np.int64))


def draw_distinct(below: int, count: int, rng: np.random.Generator) -> KeyArray:
    """Draws different numbers, uniformly and in random order.

    These are the first `count` places of a Fisher-Yates shuffle of 0..below-1, of which only the
    numbers that moved are held: time and memory go by `count`. Of equal generators, a smaller draw
    is the beginning of a larger one.

    Args:
        below: n, from 0 to 2^63.
        count: how many; all n in random order if there are not more.

    >>> draw_distinct(10**12, 3, np.random.default_rng(0)).tolist()
    [636961687321, 269786713764, 40973523938]
    """
    count = min(count, below)
    partners = rng.integers(np.arange(count), below - 1, endpoint=True).tolist()
    if below <= 8 * count:  # a list of all is shorter work than a dict of those that moved
        every = list(range(below))
        for place, partner in enumerate(partners):
            every[place], every[partner] = every[partner], every[place]
        return np.array(every[:count], np.int64)
    moved: dict[int, int] = {}
    drawn = []
    for place, partner in enumerate(partners):
        drawn.append(moved.get(partner, partner))
        moved[partner] = moved.get(place, place)
    return np.array(drawn, np.int64)


@dataclass(frozen=True, eq=False)
class KeyTable:
    """Numbers of some keys of a key space; all other keys have 0.

    Args:
        keys: int64 (n,), each once, rising.
        values: float64 (n,).

    >>> KeyTable(np.array([3, 7]), np.array([0.5, 2.0])).of(np.array([7, 4]))
    array([2., 0.])
    """

    keys: KeyArray
    values: Array

    @staticmethod
    def empty() -> KeyTable:
        """Every key has 0."""
        return KeyTable(np.empty(0, np.int64), np.empty(0))

    def of(self, keys: KeyArray) -> Array:
        """Returns the numbers of some keys, float64, in their order."""
        if not len(self.keys):
            return np.zeros(len(keys))
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[at] == keys, self.values[at], 0.0)


@dataclass(frozen=True, eq=False)
class KeyUsers:
    """How many clients have each key.

    Args:
        clients: how many there are.
        make_tables: returns, by key space, how many clients have a key; called when it is first
            asked.
    """

    clients: int
    make_tables: Callable[[], Mapping[str, KeyTable]]

    @staticmethod
    def among(
        clients: int,
        data: Callable[[int], Any],
        count_keys: Callable[[Any], Mapping[str, KeyCounts]],
    ) -> KeyUsers:
        """Returns what counts users in the data of all clients.

        Args:
            data: `client -> its data`.
            count_keys: `data -> {key space: what occurs}`.
        """
        return KeyUsers(clients, partial(_count_users, clients, data, count_keys))

    @cached_property
    def tables(self) -> Mapping[str, KeyTable]:
        """Key space -> how many clients have a key."""
        return self.make_tables()


def _count_users(
    clients: int, data: Callable[[int], Any], count_keys: Callable[[Any], Mapping[str, KeyCounts]]
) -> dict[str, KeyTable]:
    found: dict[str, list[KeyArray]] = {}
    for client in range(clients):
        for name, counts in count_keys(data(client)).items():
            found.setdefault(name, []).append(counts.keys)
    each = {n: np.unique(np.concatenate(keys), return_counts=True) for n, keys in found.items()}
    return {n: KeyTable(keys, users.astype(np.float64)) for n, (keys, users) in each.items()}


@dataclass(frozen=True, eq=False)
class KeyContext:
    """What a client knows when it chooses keys of one key space.

    Args:
        counts: what occurs in its data.
        max_keys: m, how many keys it may hold; a device with less memory has fewer.
        rng: random numbers of this client in this round; those of the round, the same for all
            clients, where keys are shared.
        round: from 0.
        client: its number in the population. On a device it is the number that its operator gave
            it; a choice runs on the device, so nobody else learns it from there.
        device: its class, None where the run has no classes.
        norms: the norm of each key's last update, summed over clients, where the run keeps them;
            0 for keys that have not moved.
        users: how many clients have each key, where the run knows it.

    >>> counts = KeyCounts.of(KeySpace("word", 100), np.array([7, 3, 7]))
    >>> context = KeyContext(counts, 2, np.random.default_rng(0), round=5)
    >>> context.space.num_keys, context.max_keys, context.round
    (100, 2, 5)
    """

    counts: KeyCounts
    max_keys: int
    rng: np.random.Generator
    round: int = 0
    client: int = 0
    device: DeviceClass | None = None
    norms: KeyTable | None = None
    users: KeyUsers | None = None

    @property
    def space(self) -> KeySpace:
        """All keys there are."""
        return self.counts.space

    def known_norms(self) -> KeyTable:
        """Returns `norms`; raises InputError where the run keeps none."""
        if self.norms is None:
            raise InputError(
                f"this choice of {self.space.name!r} needs the norms of last updates: got a round "
                "that keeps none; expected synchronous rounds, of a choice that is marked "
                '@needs("norms") or with RunParts(norms={}); choose keys another way'
            )
        return self.norms

    def known_users(self) -> tuple[KeyTable, int]:
        """Returns how many clients have each key, and how many clients there are; raises InputError
        where the run does not tell."""
        if self.users is None:
            raise InputError(
                f"this choice of {self.space.name!r} needs to know how many clients have a key: "
                "got a client that knows its own data alone; expected a run of a choice that is "
                'marked @needs("users"), or Clients(users=KeyUsers.among(...)); mark it'
            )
        return self.users.tables.get(self.space.name, KeyTable.empty()), self.users.clients


@dataclass(frozen=True, eq=False)
class ClientContext:
    """What a client knows besides its data when it chooses keys of all key spaces; see
    `KeyContext`. `max_keys` has a number for each key space, `norms` a table.
    """

    max_keys: Mapping[str, int]
    rng: np.random.Generator
    round: int = 0
    client: int = 0
    device: DeviceClass | None = None
    norms: Mapping[str, KeyTable] | None = None
    users: KeyUsers | None = None

    def of(self, counts: KeyCounts, rng: np.random.Generator) -> KeyContext:
        """What it knows when it chooses keys of one key space, with random numbers for that."""
        limit, name = self.max_keys[counts.space.name], counts.space.name
        norms = None if self.norms is None else self.norms.get(name, KeyTable.empty())
        about = self.round, self.client, self.device
        return KeyContext(counts, limit, rng, *about, norms, self.users)


class Choice(Protocol):
    """A way to choose keys of one key space: `context -> keys`."""

    def __call__(self, context: KeyContext, /) -> KeyArray:
        """Returns at most `context.max_keys` different keys, in the order they are to have."""
        ...


Fact = Literal["norms", "users"]
_C = TypeVar("_C", bound=Choice)


def needs(*facts: Fact) -> Callable[[_C], _C]:
    """Marks a choice that reads `context.norms` or `context.users`, so that a run provides them, or
    refuses the choice before the first round.

    >>> @needs("norms")
    ... def calmest(context):
    ...     own, norms = context.counts.keys, context.known_norms()
    ...     return own[np.argsort(norms.of(own), kind="stable")[: context.max_keys]]
    >>> facts_of(calmest)
    ('norms',)
    """
    for fact in facts:
        if fact not in get_args(Fact):
            known = get_args(Fact)
            raise InputError(
                f"a run tells choices no such fact: got {fact!r}; expected {' or '.join(known)}; "
                f"{near_miss(str(fact), known)}"
            )

    def mark(choice: _C) -> _C:
        choice.needs = facts  # type: ignore[attr-defined]
        return choice

    return mark


def facts_of(choice: Choice) -> tuple[Fact, ...]:
    """Returns what a choice was marked to need."""
    found: tuple[Fact, ...] = getattr(choice, "needs", ())
    return found


def _chosen(choice: Choice, context: KeyContext) -> KeyArray:
    """What a choice returns; raises InputError where it reads a fact that it is not told."""
    try:
        return choice(context)
    except AttributeError as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        read = frame.f_code.co_names if error.obj is None else ()
        if "norms" in read and context.norms is None:
            context.known_norms()
        if "users" in read and context.users is None:
            context.known_users()
        raise


def choose_with(
    choices: Mapping[str, Choice], count_keys: Callable[[Any], Mapping[str, KeyCounts]]
) -> Callable[[Any, ClientContext], KeysBySpace]:
    """Returns what `Clients.choose` takes: one choice for each key space (section 4.1.3).

    Each key space has random numbers of its own, so what is drawn in one does not depend on the
    client's data in another.

    Args:
        choices: key space -> how its keys are chosen.
        count_keys: `client's data -> {key space: counts}`, all key spaces in the same order at
            every client.

    >>> from keyhole import KeySpace
    >>> from keyhole.keys import independent, top
    >>> word, neuron = KeySpace("word", 100), KeySpace("neuron", 8)
    >>> choose = choose_with(
    ...     {"word": top, "neuron": independent},
    ...     lambda own: {"word": KeyCounts.of(word, own), "neuron": KeyCounts.none(neuron)},
    ... )
    >>> context = ClientContext({"word": 1, "neuron": 3}, np.random.default_rng(0))
    >>> keys = choose(np.array([5, 9, 9]), context)
    >>> list(keys["word"]), len(keys["neuron"])
    ([9], 3)
    """

    def choose(data: Any, context: ClientContext) -> KeysBySpace:
        counted = count_keys(data)
        own_rngs = context.rng.spawn(len(counted))
        return {
            name: counts.space.keys(_chosen(choices[name], context.of(counts, own_rng)))
            for (name, counts), own_rng in zip(counted.items(), own_rngs, strict=True)
        }

    return choose
