"""Where a value lives: at the server, or on the clients of a cohort (section 2.1 of the paper).

A server-placed value is read by the code of the server. A client-placed value is one value per
client; the server may map a function over it, which runs on each client, or aggregate it. It may
not read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from keyhole.arrays import ClientId
from keyhole.errors import CohortError, PlacementError

T = TypeVar("T")


@dataclass(frozen=True)
class ServerValue(Generic[T]):
    """A value at the server, `x@S`.

    >>> at_server(3).value
    3
    """

    value: T


class ClientValue(Generic[T]):
    """One value per client of a cohort, `{x_1, ..., x_N}@C`; it knows who is still there.

    Reading it, in any of the ways Python offers, raises PlacementError: a process that simulates
    the clients holds their values in memory, but code written for the server must not depend on
    that. Made by `at_clients`, `map_clients`, `broadcast` and `select`.

    >>> temperatures = at_clients({"attic": 31.0, "cellar": 14.0})
    >>> temperatures
    ClientValue(2 of 2 clients present)
    >>> temperatures.drop(["attic"]).present
    ('cellar',)
    """

    __slots__ = ("_cohort", "_held")

    def __init__(self, cohort: Sequence[ClientId], held: Mapping[ClientId, T]) -> None:
        self._cohort = tuple(cohort)
        self._held = {client: held[client] for client in self._cohort if client in held}

    @property
    def cohort(self) -> tuple[ClientId, ...]:
        """Everyone who started, in order."""
        return self._cohort

    @property
    def present(self) -> tuple[ClientId, ...]:
        """Those who are still there, in cohort order."""
        return tuple(self._held)

    @property
    def lost(self) -> tuple[ClientId, ...]:
        """Those who have dropped out, in cohort order."""
        return tuple(client for client in self._cohort if client not in self._held)

    def drop(self, clients: Iterable[ClientId]) -> ClientValue[T]:
        """Returns the value after `clients` have dropped out."""
        gone = set(clients)
        if not gone <= set(self._cohort):
            raise CohortError(
                f"clients to drop are not in the cohort: got {len(gone - set(self._cohort))} "
                f"unknown; expected the {len(self._cohort)} clients of the cohort; drop members "
                "only"
            )
        return ClientValue(self._cohort, {c: v for c, v in self._held.items() if c not in gone})

    @property
    def value(self) -> NoReturn:
        """Refused: see the class."""
        _refuse(self)

    def __repr__(self) -> str:
        return f"ClientValue({len(self._held)} of {len(self._cohort)} clients present)"


def _refuse(self: ClientValue[Any], *_: object, **__: object) -> NoReturn:
    raise PlacementError(
        "a client-placed value cannot be read at the server, which may learn aggregates only: got "
        f"{self!r}; expected map_clients, select, aggregates and deselects; aggregate it first, or "
        "move the code that reads it into map_clients"
    )


# Python looks these up on the class, so each way of reading is closed by name.
_WAYS_TO_READ = (
    "__getitem__ __iter__ __len__ __contains__ __array__ __bool__ __int__ __float__ __index__"
    " __complex__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __add__ __radd__ __sub__ __rsub__"
    " __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __abs__ __reduce_ex__"
)
for _name in _WAYS_TO_READ.split():
    setattr(ClientValue, _name, _refuse)


def at_server(value: T) -> ServerValue[T]:
    """Places a value at the server."""
    return ServerValue(value)


def at_clients(values: Mapping[Any, T] | Sequence[T]) -> ClientValue[T]:
    """Places one value on each client; a sequence names its clients 0, 1, 2, ...

    Args:
        values: client -> value, or the values of clients 0 to N-1.

    Returns:
        The client-placed value, everyone present.
    """
    held: dict[ClientId, T] = {}
    held.update(values if isinstance(values, Mapping) else enumerate(values))
    return ClientValue(tuple(held), held)


def map_clients(fn: Callable[..., T], *values: ClientValue[Any]) -> ClientValue[T]:
    """Runs `fn` on each client over its own values: `{x_n}@C -> {fn(x_n)}@C`.

    Args:
        fn: a function of one client; it sees that client's values only.
        values: one or more client-placed values of one cohort.

    Returns:
        The results, on the clients that are present in all of `values`.

    Raises:
        PlacementError: one of `values` is not client-placed.
        CohortError: the values belong to different cohorts.

    >>> from keyhole.primitives.deselect import aggregate_mean
    >>> aggregate_mean(map_clients(round, at_clients([20.4, 22.9]))).value
    np.float64(21.5)
    """
    held = _held_by_all(values)
    return ClientValue(values[0].cohort, {client: fn(*own) for client, own in held.items()})


def _held_by_all(values: Sequence[ClientValue[Any]]) -> dict[ClientId, tuple[Any, ...]]:
    """The values of each client that is present in all of `values`."""
    for value in values:
        if not isinstance(value, ClientValue):
            raise PlacementError(
                f"map_clients runs on the clients: got {type(value).__name__}; expected "
                "client-placed values; broadcast a server-placed value first; place a plain one "
                "with at_clients"
            )
        if value.cohort != values[0].cohort:
            raise CohortError(
                "client-placed values come from different cohorts: got cohorts of "
                f"{len(values[0].cohort)} and {len(value.cohort)} clients; expected one cohort; "
                "derive both from the same round"
            )
    everywhere = [c for c in values[0].present if all(c in value._held for value in values)]
    return {c: tuple(value._held[c] for value in values) for c in everywhere}


def contributions(values: ClientValue[T]) -> list[T]:
    """Returns what the clients that remain hand to an aggregation, in cohort order.

    The one door out of a client placement. A test names the modules that may use it.
    """
    if not values.present:
        raise CohortError(
            f"nobody is left in the cohort: got {values!r}; expected 1 client or more; skip the "
            "round, or select more clients"
        )
    return list(values._held.values())
