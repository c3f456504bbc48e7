"""Federated select: each client receives the slices it names; broadcast sends all the same value.

How select relates to broadcast and to itself, section 3.3 and the paper's examples, are functions.
Each takes select functions and gives one select function. `tests/laws/test_reductions.py` holds the
law of each: the reduced form delivers what the separate ones deliver.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from keyhole.arrays import SelectFn
from keyhole.errors import KeySpaceError
from keyhole.primitives.keyspace import Buckets, Keys, KeySpace, Product, Sequences
from keyhole.primitives.placement import ClientValue, ServerValue, map_clients

T = TypeVar("T")


def broadcast(server_value: ServerValue[T], to: ClientValue[Any]) -> ClientValue[T]:
    r"""Sends a server value to every client that is still there.

    Eq. 1: $\text{Broadcast}(x@S) = \{x, x, \dots, x\}@C$.

    Args:
        server_value: x, at the server.
        to: any client-placed value of the cohort; who is present in it receives x.

    Returns:
        x on every present client.

    >>> from keyhole.primitives.placement import at_clients, at_server
    >>> broadcast(at_server(7), to=at_clients(["a", "b", "c"]))
    ClientValue(3 of 3 clients present)
    """
    return map_clients(lambda _: server_value.value, to)


def select(
    server_value: ServerValue[Any], keys: ClientValue[Keys], select_fn: SelectFn
) -> ClientValue[list[Any]]:
    r"""Sends each client the slices it names, in the order it names them, repeats kept.

    Eq. 4: $\text{FedSelect}(x@S, \{z_n\}@C, \psi) = \{[\psi(x, z_{n,1}), \dots, \psi(x,
    z_{n,m})]\}@C$.

    Args:
        server_value: x, at the server; any value.
        keys: z_n, the checked keys of each client; their number may differ, none is allowed.
        select_fn: psi, `(x, key) -> slice`; any function, also one that transforms what it picks.

    Returns:
        On each client, its list of slices.

    Raises:
        KeySpaceError: a client's keys were not made by `KeySpace.keys`.

    >>> from keyhole.primitives.deselect import aggregate_sum
    >>> from keyhole.primitives.keyspace import KeySpace
    >>> from keyhole.primitives.placement import at_server
    >>> letters = KeySpace("letter", 5).place([[1, 0, 1], [4]])
    >>> words = select(at_server("abcde"), letters, lambda text, key: text[key])
    >>> aggregate_sum(map_clients(len, words)).value
    np.int64(4)
    """
    return generalized_select(
        server_value, keys, lambda x, z: [select_fn(x, key) for key in _checked(z)]
    )


def generalized_select(
    server_value: ServerValue[Any], values: ClientValue[Any], rho: Callable[[Any, Any], T]
) -> ClientValue[T]:
    r"""Sends each client any function of the server's value and its own.

    Eq. 3: $(x@S, \{z_n\}@C) \mapsto \{\rho(x, z_n)\}@C$, for client values of any kind. Only two
    ways of delivery can do this: broadcast, where the client computes it, and on demand, where the
    server sees z_n. What is known for a finite key space only (pre-generated and private slices)
    needs `select`.

    Args:
        server_value: x, at the server.
        values: z_n, any client-placed value.
        rho: `(x, z_n) -> y_n`.

    Returns:
        y_n on each client.
    """
    return map_clients(lambda z: rho(server_value.value, z), values)


def _checked(keys: Keys) -> Keys:
    if not isinstance(keys, Keys):
        raise KeySpaceError(
            f"keys have not been checked against a key space: got {type(keys).__name__}; expected "
            "Keys; place them with KeySpace.place, or use generalized_select"
        )
    return keys


_ONE_KEY = Product(()).space


def broadcast_as_select(server_value: ServerValue[T], to: ClientValue[Any]) -> ClientValue[T]:
    """Broadcast, made of select: psi(x, k) = x, and every client selects key 0."""
    keys = map_clients(lambda _: _ONE_KEY.keys([0]), to)
    slices = select(server_value, keys, lambda x, _: x)
    return map_clients(lambda received: received[0], slices)


def fuse_broadcast(select_fn: SelectFn) -> SelectFn:
    """Returns one select in place of a select of x and a broadcast of y: psi'((x, y), k) = (psi(x,
    k), y).

    >>> fuse_broadcast(lambda x, k: x[k])((["a", "b"], "everyone"), 1)
    ('b', 'everyone')
    """
    return lambda both, key: (select_fn(both[0], key), both[1])


def fuse_selects(first: SelectFn, second: SelectFn, product: Product) -> SelectFn:
    """Returns one select over `[K1] x [K2]` in place of two: psi'((x, y), (k, l)) = (psi1(x, k),
    psi2(y, l)).

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
    """Returns one key in place of m: psi'(x, z') is the list of psi(x, k) for the m keys that z'
    stands for.

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
