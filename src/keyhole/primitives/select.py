"""Federated select: each client receives the slices it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from keyhole.errors import KeySpaceError
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.placement import ClientValue, ServerValue, map_clients
from keyhole.types import SelectFn

__all__ = ["generalized_select", "select"]

T = TypeVar("T")


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

    >>> from keyhole.primitives.aggregate import aggregate_sum
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
            "keys have not been checked against a key space",
            got=type(keys).__name__,
            allowed="Keys",
            fix="place them with KeySpace.place, or use generalized_select",
        )
    return keys
