"""Says what services and devices agree on for private retrieval: roles, paths, tokens, numbers.

A blind token admits a device to a round without its name. Its layout:

    token, 354 bytes    2 (2 bytes)  nonce (32)  purpose (32)  SHA-256 of the key (32)
                        signature (256)

Numbers are big-endian, as RFC 9578 lays out its publicly verifiable tokens. The nonce is the
device's own and random. The purpose names a round and where in it the token counts, so that no
service can spend elsewhere a token that it was shown. The signature covers everything before it;
its key is good for one round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from keyhole.crypto.blind import SIGNATURE_BYTES, Blinded, BlindPublic, blind
from keyhole.crypto.prg import Prg
from keyhole.delivery import all_deliveries, delivery_named
from keyhole.delivery.base import QueryDelivery, name_of_round, served_by_queries
from keyhole.delivery.paths import path_bytes
from keyhole.delivery.popular import PopularKeys, popular_of, shares_of_round
from keyhole.errors import InputError, MalformedError, NotFoundError
from keyhole.wire.manifest import Manifest, TableInfo, keys_of_round

SERVER_HEADER = "keyhole-server"
"""The header of params that says which server gave them."""

GATEWAY_PATH = "/v1/gateway"
KEYS_PATH = "/v1/gateway/keys"
RELAY_PATH = "/v1/relay"
RELAY_KEYS_PATH = "/v1/relay/keys"
MAX_CONFIG = 1 << 16
"""Bytes of a list of key configurations."""

TOKEN_BYTES = 98 + SIGNATURE_BYTES

_TYPE = (2).to_bytes(2)
_NONCE = 32


@dataclass(frozen=True)
class Role:
    """Which server a service is: one alone, since anyone who held both would learn every key."""

    delivery: QueryDelivery
    server: int


def role_named(text: str) -> Role:
    """Returns the role that an operator names: the place of one of two servers, `one`, or a
    delivery by its name or "module:NAME", with the place of the server behind a slash.

    >>> role_named("1").server, role_named("1").delivery.about.servers
    (1, 2)
    """
    name, _, place = text.partition("/")
    if found := _short_roles().get(text):
        return found
    delivery = served_by_queries(delivery_named(name))
    servers = delivery.about.servers
    if not (place or "0").isdecimal() or int(place or 0) >= servers or (servers > 1 and not place):
        raise InputError(
            f"no such server of {name}: got {place!r}; expected 0..{servers - 1}; name its place, "
            f"as in {name}/0"
        )
    return Role(delivery, int(place or 0))


def _short_roles() -> dict[str, Role]:
    """Roles of the deliveries that come with keyhole, which differ by the number of servers."""
    queried = [each for each in all_deliveries() if each.about.route == "queries"]
    return {
        str(server) if each.about.servers > 1 else "one": Role(served_by_queries(each), server)
        for each in queried
        for server in range(each.about.servers)
    }


@dataclass(frozen=True)
class QuerySettings:
    """Private retrieval at one service."""

    role: Role
    # of one query, where the manifest does not say how many a client chooses. Where it does, that
    # number holds: devices compare
    max_keys: int | None = None
    max_keys_of: Mapping[str, int] = field(default_factory=dict)  # likewise, of a table by name
    # of memory for the tables of all rounds that are kept; a scan works on top of it, and so does
    # what a delivery remembers of queries
    max_bytes: int = 4 << 30
    together: int = 64
    scans: int = 1

    def __post_init__(self) -> None:
        numbers = [*self.max_keys_of.values(), self.max_bytes, self.together, self.scans]
        if self.max_keys is not None:
            numbers.append(self.max_keys)
        if min(numbers) < 1:
            raise InputError(
                f"settings of private retrieval that let nobody in: got {min(numbers)}; expected 1 "
                "or more; raise it"
            )


def max_keys_of_table(settings: QuerySettings, manifest: Manifest, table: TableInfo) -> int:
    """Returns how many keys every query of a table is padded to: public, and the same for all
    devices."""
    told = keys_of_round(manifest, table)
    if told is None:
        told = settings.max_keys_of.get(table.name, settings.max_keys)
    if told is None:
        raise NotFoundError(
            f"table {table.name!r} cannot be retrieved from in private: got a round that does not "
            "say how many keys a client chooses; expected keys_per_client of each key space in "
            "the settings of the round; publish it with them, or serve with --pir-keys"
        )
    return min(told, table.num_keys)


def popular_of_table(
    delivery: QueryDelivery, manifest: Manifest, table: TableInfo, max_keys: int
) -> PopularKeys | None:
    """Returns the popular keys of a table, of which a delivery asks a table of their own: public,
    and the same for all devices."""
    if not delivery.about.has_popular:
        return None
    shares = shares_of_round(manifest.settings)
    return popular_of(shares, table.factors or (), table.num_keys, max_keys)


def table_id(round_id: str, place: int | str) -> str:
    """Returns what a table of a round is called in `PrivateTable.id`."""
    return f"{round_id}/tables/{place}"


def name_table(round_id: str, place: int) -> bytes:
    """Returns the 16 bytes that stand for one table of a round in params and messages."""
    return name_of_round(table_id(round_id, place))


def top_path(round_id: str, place: int | str) -> str:
    """Returns where the top of a table of a round is fetched: the same bytes for everybody."""
    return f"/v1/rounds/{table_id(round_id, place)}/top"


def root_of_table(info: TableInfo) -> bytes | None:
    """Returns the root of a table's tree; None where slices are computed on demand: bound to
    nothing."""
    return bytes.fromhex(info.root) if info.root else None


def row_bytes_of(info: TableInfo) -> int:
    """Returns the number of bytes of a row that a gateway answers with: a record, and its path
    where the table has a tree."""
    return info.record_bytes + (path_bytes(info.num_keys) if info.root else 0)


def query_path(round_id: str, place: int, delivery: QueryDelivery) -> str:
    """Returns where a table of a round is retrieved from by a delivery."""
    return f"/v1/rounds/{table_id(round_id, place)}/pir/{delivery.about.path_name}"


def queries_at(server: int) -> str:
    """Returns where a token is changed for a round token without a name: at a server of private
    queries."""
    return f"queries/{server}"


def admission_path(round_id: str) -> str:
    """Returns the key of a round, and where blinded tokens are signed."""
    return f"/v1/rounds/{round_id}/admission"


def redeem_path(round_id: str) -> str:
    """Returns where a token is changed for a round token without a name."""
    return f"/v1/rounds/{round_id}/admission/redeem"


def purpose_of(round_id: str, place: str) -> bytes:
    """Returns the digest that a token names."""
    return sha256(f"keyhole admission\n{place}\n{round_id}".encode("ascii")).digest()


def blind_token(key: BlindPublic, round_id: str, place: str) -> Blinded:
    """Returns a new token, to be signed."""
    named = _TYPE + Prg.fresh().bytes(_NONCE) + purpose_of(round_id, place)
    return blind(key, named + sha256(key.encoded).digest())


def check_token(key: BlindPublic, round_id: str, place: str, token: bytes) -> bytes:
    """Returns the nonce of a token; raises MalformedError unless it is good here, once."""
    named, signature = token[:-SIGNATURE_BYTES], token[-SIGNATURE_BYTES:]
    nonce = named[2 : 2 + _NONCE]
    ours = _TYPE + nonce + purpose_of(round_id, place) + sha256(key.encoded).digest()
    if len(token) != TOKEN_BYTES or named != ours or not key.is_signed(named, signature):
        raise MalformedError(
            f"not a token of this round and service: got {len(token)} bytes; expected one that the "
            "coordinator has signed for them; check in, and have a new one signed"
        )
    return nonce
