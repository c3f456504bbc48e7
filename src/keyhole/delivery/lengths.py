"""Lengths: what one client receives and sends in a round, by way, in exact bytes.

Counted are slices, keys and the messages of a protocol, as the modules of `private/` make them.
HTTP and TLS around them, and the terms that a client fetches first, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from keyhole.delivery.demand import bytes_of_keys
from keyhole.delivery.names import DeliveryName
from keyhole.delivery.need import Need
from keyhole.private.pir import two_server
from keyhole.private.pir.messages import FRAME_BYTES
from keyhole.private.pir.terms import Scheme, Terms

__all__ = ["Traffic", "terms_for", "traffic_of"]


@dataclass(frozen=True)
class Traffic:
    """Bytes of one client.

    Args:
        down: received, from all servers together.
        up: sent, to all servers together.
    """

    down: int
    up: int

    @property
    def total(self) -> int:
        """Both directions."""
        return self.down + self.up


def traffic_of(way: DeliveryName, need: Need) -> Traffic:
    """Returns what a client receives and sends, with what everyone receives."""
    traffic = _TRAFFIC[way](need)
    return Traffic(traffic.down + need.broadcast_bytes, traffic.up)


def terms_for(scheme: Scheme, need: Need) -> Terms:
    """Terms with the public numbers of a need; names and digests do not change a length."""
    return Terms(
        scheme, bytes(16), need.num_keys, need.slice_bytes, need.keys_per_client, bytes(32)
    )


def _broadcast(need: Need) -> Traffic:
    return Traffic(need.table_bytes, 0)


def _clear(need: Need) -> Traffic:
    return Traffic(need.asked_bytes, bytes_of_keys(need.keys_per_client, need.num_keys))


def _relay(need: Need) -> Traffic:
    m = need.keys_per_client
    return Traffic(m * (need.slice_bytes + 32 + 10), m * (55 + 70))


def _two_server(need: Need) -> Traffic:
    terms = terms_for("two-server", need)
    return Traffic(2 * two_server.reply_bytes(terms), 2 * two_server.query_bytes(terms))


def _chor(need: Need) -> Traffic:
    m, row = need.keys_per_client, need.slice_bytes + 16
    return Traffic(2 * (FRAME_BYTES + m * row), 2 * (FRAME_BYTES + m * -(-need.num_keys // 8)))


def _one_server(need: Need) -> Traffic:
    m, row = need.keys_per_client, need.slice_bytes + 16
    best = max(1, round((m * need.num_keys / (row * (1024 + m))) ** 0.5))
    columns = -(-need.num_keys // best)
    return Traffic(
        4 * 1024 * row * best + FRAME_BYTES + 4 * m * row * best, FRAME_BYTES + 4 * m * columns
    )


def _enclave(need: Need) -> Traffic:
    m = need.keys_per_client
    return Traffic(m * need.slice_bytes + 16 + 5006, 32 + 16 + 8 * m)


_TRAFFIC: Mapping[DeliveryName, Callable[[Need], Traffic]] = MappingProxyType(
    {
        "broadcast": _broadcast,
        "on-demand": _clear,
        "pregenerated": _clear,
        "relay": _relay,
        "pir": _two_server,
        "pir-chor": _chor,
        "pir-one-server": _one_server,
        "enclave": _enclave,
    }
)
