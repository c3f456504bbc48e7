"""Lengths: what one client receives and sends in a round, by way, in exact bytes.

Counted are slices, keys and the messages of a protocol, as the modules of `private/` make them.
HTTP and TLS around them, the terms that a client fetches first, and the four bytes an answer by
which a relay packs many into one body, are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from keyhole.delivery.demand import bytes_of_keys
from keyhole.delivery.names import DeliveryName
from keyhole.delivery.plan.need import Need
from keyhole.private.enclave import sealed
from keyhole.private.enclave.evidence import NONCE_BYTES, Evidence
from keyhole.private.enclave.terms import EnclaveTerms
from keyhole.private.hpke import PUBLIC_BYTES
from keyhole.private.oblivious.blind_select import BlindClient
from keyhole.private.oblivious.key_config import KeyConfig
from keyhole.private.oblivious.slice_requests import TableShape
from keyhole.private.pir import chor, one_server, two_server
from keyhole.private.pir.terms import Scheme, Terms

__all__ = ["Traffic", "terms_for", "traffic_of"]

# Of a round with a number of four digits: each digit more is a byte more of every request.
_ROUND_ID = "1000-" + 16 * "0"

# Of a genuine TDX quote and the certificates that go with it; those of other makes differ little.
_QUOTE_BYTES = 5_006
_COLLATERAL_BYTES = 16_072


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
    """Returns what a client receives and sends, with what everyone receives.

    Raises:
        InputError: the need is beyond what messages of this way can hold.
    """
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
    shape = TableShape(0, need.num_keys, need.slice_bytes, need.keys_per_client)
    client = BlindClient(KeyConfig(0, bytes(PUBLIC_BYTES)), _ROUND_ID, [shape])
    requests = client.num_requests
    return Traffic(requests * client.reply_bytes(0), requests * client.request_bytes)


def _two_server(need: Need) -> Traffic:
    terms = terms_for("two-server", need)
    return Traffic(2 * two_server.reply_bytes(terms), 2 * two_server.query_bytes(terms))


def _chor(need: Need) -> Traffic:
    terms = terms_for("chor", need)
    return Traffic(2 * chor.reply_bytes(terms), 2 * chor.query_bytes(terms))


def _one_server(need: Need) -> Traffic:
    terms = terms_for("one-server", need)
    down = one_server.hint_bytes(terms) + one_server.reply_bytes(terms)
    return Traffic(down, one_server.query_bytes(terms))


def _enclave(need: Need) -> Traffic:
    terms = EnclaveTerms(
        bytes(16), need.num_keys, need.slice_bytes, need.keys_per_client, bytes(32)
    )
    evidence = Evidence("tdx", bytes(_QUOTE_BYTES), bytes(_COLLATERAL_BYTES), bytes(32), bytes(32))
    down = len(evidence.encode()) + sealed.reply_bytes(terms)
    return Traffic(down, NONCE_BYTES + sealed.request_bytes(terms))


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
