"""Looks up rows of a published model, such as embeddings, without telling anybody which.

What a trained model serves is what rounds serve: the newest round of a service, published by the
trainer or by `keyhole publish`. A `Lookup` asks as a device does, by private queries to one server
or two, and keeps the hint and the top of a round for the next call. Queries of many callers that
arrive together are answered in one pass (`service.passes`).

Hidden: which keys are looked up and how many, from every server, under what the delivery rests on;
each call sends one query for each table, padded to the keys per client that the round says, and
fetches what no key space cuts, which is the same for everyone. Not hidden: who calls, when and how
often. A caller that repeats a call because of what it found, or did
not find, shows that: see `Submodel.keys`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keyhole import tree
from keyhole.arrays import Array
from keyhole.delivery import all_deliveries
from keyhole.delivery.base import QueryDelivery, served_by_queries
from keyhole.device.device import Device
from keyhole.device.fetch import Submodel
from keyhole.device.private import QueryFetch
from keyhole.errors import KeySpaceError

if TYPE_CHECKING:
    from types import TracebackType

    from keyhole.primitives.layout import Layout


def queried_from(servers: int) -> QueryDelivery:
    """Returns the delivery by private queries to this many servers that comes with keyhole."""
    found = [each for each in all_deliveries() if each.about.route == "queries"]
    return served_by_queries(next(each for each in found if each.about.servers == servers))


@dataclass(frozen=True)
class Rows:
    """What a lookup found.

    Args:
        keys: of each key space that was asked for, those whose rows were found, in their order; a
            key that found no place in a query, or whose row was wrong, is missing.
        arrays: parameter -> (keys, ...), of those that the key spaces cut.
        wrong: rows that were not those of the round.
        bytes_down: received.
        bytes_up: sent.
        model_bytes: of the whole model: a caller that looks up more in the life of a round than
            this is cheaper served by downloading it, and then nobody learns anything.
    """

    keys: Mapping[str, Array]
    arrays: Mapping[str, Array]
    wrong: int
    bytes_down: int
    bytes_up: int
    model_bytes: int


@dataclass
class Lookup:
    """Looks up rows at a service, or at two: a context that closes its connections.

    Args:
        service: the device that speaks to the service.
        second: likewise to the second of two servers, which do not work together; None asks one
            server, under the Module-LWE assumption.
        round: its identifier; the newest one if None.

    >>> with Lookup(Device("http://127.0.0.1:8100")) as look:  # doctest: +SKIP
    ...     found = look({"word": [7, 42]})
    """

    service: Device
    second: Device | None = None
    round: str | None = field(default=None, kw_only=True)
    _fetch: QueryFetch = field(init=False, repr=False)
    _stack: ExitStack = field(default_factory=ExitStack, init=False, repr=False)

    def __post_init__(self) -> None:
        others = () if self.second is None else (self.second,)
        self._fetch = QueryFetch(queried_from(1 + len(others)), others)
        for each in (self.service, *others):
            self._stack.enter_context(closing(each))

    def __enter__(self) -> Lookup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def __call__(self, keys: Mapping[str, Any]) -> Rows:
        """Returns the rows of keys of some key spaces.

        Raises:
            KeySpaceError: no such key space, keys outside of it, or more than a query holds.
            KeyholeError: as `QueryFetch` raises it; a lookup never falls back to one in the clear.
        """
        round_id = self.service.current().round if self.round is None else self.round
        known = self.service.known(round_id)
        names = [space.name for space in known.layout.spaces]
        if not keys or not set(keys) <= set(names):
            got, known_names = ", ".join(sorted(keys)) or "none", ", ".join(sorted(names))
            raise KeySpaceError(
                f"no such key space in the round: got {got}; expected one or more of "
                f"{known_names}; name key spaces of the model"
            )
        # Of the others no row is wanted; a query is sent for their tables all the same.
        asked = {name: keys.get(name, ()) for name in names}
        found = self._fetch(self.service, round_id, asked)
        return _rows_of(found, known.layout, keys)


def _rows_of(found: Submodel, layout: Layout, asked: Mapping[str, Any]) -> Rows:
    leaves = tree.flatten(found.model)
    cut = [
        each.path
        for part in layout.parts
        for each in part.fields
        if part.product.factors and all(f.name in asked for f in part.product.factors)
    ]
    return Rows(
        {name: found.keys[name].array for name in asked},
        {path: leaves[path] for path in cut},
        found.wrong,
        found.traffic.bytes_down,
        found.traffic.bytes_up,
        layout.server_bytes,
    )
