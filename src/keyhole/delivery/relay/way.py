"""Delivers slices through a blind relay by Oblivious HTTP: one sealed request for each key.

Hidden: from the gateway, whose keys they are; from the relay, the keys. Not hidden: see `client`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from keyhole.arrays import KeyArray
from keyhole.crypto.hpke import PUBLIC_BYTES
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import (
    KEYS_OF_SOMEBODY,
    WHO_TAKES_PART,
    Delivered,
    DeliveryAbout,
    Price,
    making_seconds,
)
from keyhole.delivery.exchange import (
    ByteTally,
    LocalLinks,
    PrivateRound,
    PrivateTable,
    Retrieval,
    Retrieved,
    deliver_privately,
    retrieve,
)
from keyhole.delivery.records import PLAIN, Coding, Demand
from keyhole.delivery.relay.client import BlindClient, BlindQuery, TableShape, slice_handler
from keyhole.delivery.relay.gateway import Gateway, Relay
from keyhole.delivery.relay.ohttp import GatewayKey, KeyConfig
from keyhole.pricing import Speeds, Workload

if TYPE_CHECKING:
    from keyhole.server.state import ServerState

# Of a round with a number of four digits: each digit more is a byte more of every request.
_ROUND_ID = "1000-" + 16 * "0"

_ABOUT = DeliveryAbout(
    name="relay",
    title="relay",
    leaks=MappingProxyType({"relay": WHO_TAKES_PART, "gateway": KEYS_OF_SOMEBODY}),
    rests_on="Relay and gateway do not work together, requests of many clients are mixed, and HPKE "
    "holds.",
    is_private=True,
    basis="no collusion",
    route="sealed requests",
    connects_to=("relay",),
)


_RELAY, _GATEWAY = _ABOUT.leaks


@dataclass(frozen=True)
class BlindRelay:
    """Retrieves by Oblivious HTTP, with requests mixed over the cohort.

    Args:
        keys_per_client: key space -> the most keys that a client may ask for; public.
        coding: of the cut parts.
    """

    keys_per_client: Mapping[str, int] = field(default_factory=dict)
    coding: Coding = PLAIN
    about: DeliveryAbout = field(default=_ABOUT, init=False, repr=False)

    def for_run(
        self, keys_per_client: Mapping[str, int], *, allow_simulation: bool = False
    ) -> BlindRelay:
        """Returns the delivery with the public numbers of a run."""
        return replace(self, keys_per_client=keys_per_client)

    def price(self, load: Workload, speeds: Speeds) -> Price:
        """Prices one sealed request for each key; four bytes an answer by which a relay packs many
        into one body are not counted."""
        shape = TableShape(0, load.num_keys, load.slice_bytes, load.keys_per_client)
        client = BlindClient(KeyConfig(0, bytes(PUBLIC_BYTES)), _ROUND_ID, [shape])
        requests = load.cohort * load.keys_per_client
        return Price(
            self.about,
            client.num_requests * client.reply_bytes(0) + load.broadcast_bytes,
            client.num_requests * client.request_bytes,
            {
                _RELAY: requests * speeds.forward_seconds,
                _GATEWAY: requests * speeds.open_seconds,
            },
            load.keys_per_client * speeds.seal_seconds,
            load.table_bytes,
            load.num_keys,
            {_GATEWAY: making_seconds(load, speeds)},
            passed_on_by=_RELAY,
        )

    def deliver(self, state: ServerState, keys: Demand) -> Delivered:
        """Delivers one round."""
        how = PrivateRound(self.keys_per_client, self.coding, self.about.leaks)
        return deliver_privately(_retrieve, how, state, keys)


def _retrieve(
    table: PrivateTable, wanted: Mapping[int, KeyArray], tally: ByteTally
) -> Mapping[int, Retrieved]:
    """All clients ask; the relay mixes their requests before the gateway opens them."""
    key = GatewayKey.fresh()
    gateway = Gateway([key], slice_handler(table.round_id, [table.records]))
    num_keys, record_bytes = table.records.shape
    shape = TableShape(0, num_keys, record_bytes, table.max_keys)
    client = _OneTable(BlindClient(key.config, table.round_id, [shape]))
    links = LocalLinks(Relay(gateway.answer_many).forward_many, list(wanted), tally)
    found = retrieve([Retrieval(client, keys) for keys in wanted.values()], links)
    return dict(zip(wanted, found, strict=True))


@dataclass(frozen=True)
class _OneTable:
    """The client of a round with one table."""

    blind: BlindClient

    def query(self, keys: KeyArray, prg: Prg | None = None) -> _OneQuery:
        return _OneQuery(self.blind.query([keys], prg))


@dataclass(frozen=True)
class _OneQuery:
    blind: BlindQuery

    def messages(self) -> tuple[bytes, ...]:
        return self.blind.messages()

    def decode(self, replies: Sequence[bytes]) -> Retrieved:
        (records,) = self.blind.decode(replies)
        return Retrieved.whole(records)
