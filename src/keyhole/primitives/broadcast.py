"""Broadcast: every client receives the same value."""

from __future__ import annotations

from typing import Any, TypeVar

from keyhole.primitives.placement import ClientValue, ServerValue, map_clients

__all__ = ["broadcast"]

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
