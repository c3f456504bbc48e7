"""How select relates to broadcast and to itself: section 3.3 and the paper's examples, as
functions.

Each takes select functions and gives one select function. `tests/laws/test_reductions.py` holds the
law of each: the reduced form delivers what the separate ones deliver.
"""

from __future__ import annotations

from typing import Any, TypeVar

from keyhole.primitives.keymaps import Buckets, Product, Sequences
from keyhole.primitives.keyspace import Keys, KeySpace
from keyhole.primitives.placement import ClientValue, ServerValue, map_clients
from keyhole.primitives.select import select
from keyhole.types import SelectFn

__all__ = [
    "broadcast_as_select",
    "fuse_broadcast",
    "fuse_selects",
    "many_as_one",
    "select_buckets",
    "shared_as_key",
    "with_shared_key",
]

T = TypeVar("T")

_ONE_KEY = Product(()).space


def broadcast_as_select(server_value: ServerValue[T], to: ClientValue[Any]) -> ClientValue[T]:
    """Broadcast, made of select: psi(x, k) = x, and every client selects key 0."""
    keys = map_clients(lambda _: _ONE_KEY.keys([0]), to)
    slices = select(server_value, keys, lambda x, _: x)
    return map_clients(lambda received: received[0], slices)


def fuse_broadcast(select_fn: SelectFn) -> SelectFn:
    """One select in place of a select of x and a broadcast of y: psi'((x, y), k) = (psi(x, k), y).

    >>> fuse_broadcast(lambda x, k: x[k])((["a", "b"], "everyone"), 1)
    ('b', 'everyone')
    """
    return lambda both, key: (select_fn(both[0], key), both[1])


def fuse_selects(first: SelectFn, second: SelectFn, product: Product) -> SelectFn:
    """One select over `[K1] x [K2]` in place of two: psi'((x, y), (k, l)) = (psi1(x, k), psi2(y,
    l)).

    Args:
        first: psi1, over the first factor of `product`.
        second: psi2, over the second.
        product: the product of the two key spaces; clients join their keys with it.
    """

    def fused(both: Any, key: int) -> tuple[Any, Any]:
        (first_key,), (second_key,) = product.split(product.space.keys([key]))
        return first(both[0], first_key), second(both[1], second_key)

    return fused


def many_as_one(select_fn: SelectFn, sequences: Sequences) -> SelectFn:
    """One key in place of m: psi'(x, z') is the list of psi(x, k) for the m keys that z' stands
    for.

    Useful to reason with; pre-generated slices would number K^m.
    """
    return lambda x, key: [select_fn(x, k) for k in sequences.split(key)]


def select_buckets(select_fn: SelectFn, buckets: Buckets) -> SelectFn:
    """Buckets of keys as the keys: psi'(x, b) is the list of psi(x, k) for the members of bucket
    b."""
    return lambda x, bucket: [select_fn(x, k) for k in buckets.members(bucket)]


def shared_as_key(select_fn: SelectFn, components: KeySpace) -> tuple[KeySpace, SelectFn]:
    """Conditional components with a shared one behind a last key (section 3.1).

    The paper's x = (a_1, ..., a_C, b): keys 0..C-1 select a component of `a`, key C selects `b`,
    and every client adds key C to its own. Delivers the same as `fuse_broadcast`, sending `b` once
    per client.

    Args:
        select_fn: psi over the components.
        components: their key space, of size C.

    Returns:
        The key space of size C + 1, and psi'((a, b), k).

    >>> space, psi = shared_as_key(lambda a, k: a[k], KeySpace("task", 2))
    >>> [psi((["read", "write"], "trunk"), key) for key in space.keys([1, 2])]
    ['write', 'trunk']
    """
    last = components.num_keys
    space = KeySpace(f"{components.name} or shared", last + 1)
    return space, lambda both, key: both[1] if key == last else select_fn(both[0], key)


def with_shared_key(keys: Keys, space: KeySpace) -> Keys:
    """Appends the key of the shared component to a client's keys."""
    return space.keys([*keys, space.num_keys - 1])
