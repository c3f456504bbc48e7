"""Encodes the messages of a sum that two servers make of shares, whatever a share is.

    public   client to server 0, which relays it to server 1: head, nonce (16), payload
    own      client to one server: head, SHA-256 of public (32), payload, check (16)
    list     one server to the other: head, SHA-256 of the cohort's names (32), number of clients
             (u64), their places in the cohort, ascending (u64 each), SHA-256 of each one's public
             message (32 each), check (16)
    receipt  what a server adds, told to the other before it adds, and to the trainer: head, digest
             of the manifest (32), SHA-256 of the params (32), of the names (32), number (u64),
             places (u64 each), SHA-256 of places and digests (32), check (16)
    counts   one server to the other, where rows of few clients are dropped: head, its share of how
             many clients sent each key, check (16)
    share    one server to the trainer: head, number of clients (u64), rows that were dropped (u64),
             SHA-256 of the receipt without head and check (32), SHA-256 of both messages of counts,
             the first server's first (32; zeros where there are none), payload, check (16)

Heads and checks are those of `crypto/codec.py`, with the magic "KHX2"; numbers are little-endian.
The digest in a head is that of the params and of the manifest of the round: what was made from
another model is no message of this sum. A public message has no check, since both own messages hold
its digest. What a client sends to a server is sealed to that server's key, under the client's name
and with its token (`seal_share`), since TLS may end before it. Payloads are the aggregation's own:
their lengths stand in its facts, and depend on nothing that a client keeps to itself.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from math import inf

import numpy as np

from keyhole.crypto.codec import CHECK_BYTES, Body, Framing, sha_check
from keyhole.crypto.hpke import PUBLIC_BYTES, TAG_BYTES, PrivateKey, open_from, seal_to
from keyhole.crypto.prg import SEED_BYTES, Prg
from keyhole.errors import InputError, MalformedError

_KINDS = {"public": 1, "own": 2, "list": 3, "receipt": 4, "share": 5, "counts": 6}
FRAMING = Framing(b"KHX2", _KINDS, "a message of a sum")
_NAME_BYTES, _DIGEST_BYTES = 16, 32
_LISTED, _RECEIPT, _SHARE = (struct.Struct(form) for form in ("<32sQ", "<32s32s32sQ", "<QQ32s32s"))
_PUBLIC_BYTES = FRAMING.head_bytes + SEED_BYTES
_OWN_BYTES = FRAMING.head_bytes + _DIGEST_BYTES + CHECK_BYTES
_SHARE_BYTES = FRAMING.head_bytes + _SHARE.size + CHECK_BYTES
_ENTRY_BYTES = 8 + _DIGEST_BYTES  # of a client in a list

_KEY_ID_BYTES = 8
_SEALED = b"keyhole share 3"  # what sealing is for

SEAL_BYTES = _KEY_ID_BYTES + PUBLIC_BYTES + TAG_BYTES
"""What sealing adds to what a client sends to a server."""

NO_MODEL = bytes(_DIGEST_BYTES)
"""Stands for the model of a sum in one process, where all clients are given the same."""

HIDING_NOISE = 0.5
"""The noise multiplier from which the noise of one server hides a client in a sum of any size.

One who knows all other updates, and the noise of the other server, has the last update plus this
noise. The best guess whether a given update was sent, or none, is wrong in Phi(-1 / 2z) of cases: 1
in 6.3 for 0.5, 1 in 21 for 0.3, 1 in 3.5 million for 0.1, which hides nothing. That is for one sum:
what many tell together, a budget bounds (`privacy.ledger`).
"""


@dataclass(frozen=True, kw_only=True)
class SumFacts:
    """The public facts of one sum, as services and devices read them from its params.

    Args:
        params: all that is agreed on, encoded: the aggregation's own bytes.
        round: 16 bytes: the sum's name. A name is used once.
        model: SHA-256 of the manifest of the round, 32 bytes. The drivers of `exchange.py` put it
            in: the params stand in the manifest and cannot hold it.
        min_clients: below which neither server releases anything.
        max_clients: whose updates may be added; the ring holds no more.
        public_bytes: of what a client sends for both servers alike.
        own_bytes: of what it sends to each server alone.
        share_bytes: of a server's share of the sum, which it also holds while it adds up.
        clip: numbers beyond it are clipped by the client.
        norm: clients shorten an update that measures more; infinite for none.
        noise: standard deviation of the noise that each server adds, in the units of updates.
        with_counts: whether the trainer learns how many clients sent each key.
        min_per_key: rows that fewer clients sent are dropped by both servers before anything is
            opened; 0 drops none.
        count_bytes: of a server's share of the counts, which the other one learns; 0 where no row
            is dropped.
    """

    params: bytes = field(repr=False)
    round: bytes
    min_clients: int
    max_clients: int
    public_bytes: int
    own_bytes: tuple[int, int]
    share_bytes: int
    clip: float = inf
    norm: float = inf
    noise: float = 0.0
    with_counts: bool = False
    min_per_key: int = 0
    count_bytes: int = 0
    model: bytes = NO_MODEL

    def __post_init__(self) -> None:
        sizes = self.public_bytes, *self.own_bytes, self.share_bytes, self.count_bytes
        clients = self.min_clients, self.max_clients
        names = len(self.round), len(self.model)
        if names != (_NAME_BYTES, _DIGEST_BYTES) or min(clients) < 1 or min(sizes) < 0:
            raise InputError(
                f"facts of a sum that make no sense: got a name and a model of {names} bytes, "
                f"{clients} clients, sizes {sizes}; expected {_NAME_BYTES} and {_DIGEST_BYTES} "
                "bytes, 1 or more clients, sizes from 0; check what `facts` of the aggregation "
                "returns"
            )

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it, and for the model, in every message."""
        return sha256(self.params + self.model).digest()

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise of one server over the most that an update measures; 0
        where that has no bound, and where counts of clients are told or rows dropped by them, for
        which it does not account."""
        is_counted = self.with_counts or self.min_per_key > 0
        return 0.0 if self.norm == inf or is_counted else self.noise / self.norm

    @property
    def hides_each_client(self) -> bool:
        """Whether the noise hides a client however few are added (see `HIDING_NOISE`)."""
        return self.noise_multiplier >= HIDING_NOISE

    @property
    def public_message_bytes(self) -> int:
        """The number of bytes of a client's public message."""
        return _PUBLIC_BYTES + self.public_bytes

    def own_message_bytes(self, party: int) -> int:
        """Returns the number of bytes of a client's own message to one server."""
        return _OWN_BYTES + self.own_bytes[party]

    def body_bytes(self, party: int) -> int:
        """Returns the number of bytes of all that a client sends to one server, sealed: to the
        first both its messages."""
        public = self.public_message_bytes if party == 0 else 0
        return SEAL_BYTES + self.own_message_bytes(party) + public

    @property
    def upload_bytes(self) -> int:
        """The number of bytes of all that a client sends."""
        return self.body_bytes(0) + self.body_bytes(1)

    @property
    def share_message_bytes(self) -> int:
        """The number of bytes of what a server gives out."""
        return _SHARE_BYTES + self.share_bytes

    def split_body(self, party: int, body: bytes) -> tuple[bytes, bytes]:
        """Returns a client's own message and, at the first server, its public one, once it is
        opened."""
        at = self.own_message_bytes(party)
        return body[:at], body[at:]


@dataclass(frozen=True, repr=False)
class SplitUpdate:
    """An update as an aggregation splits it. A party that has both of `own` can read it.

    Args:
        own: the payload for each server, which nobody else may see.
        public: the payload for both servers alike.
        unplaced: how many keys found no place; their rows are left out. The client's secret.
    """

    own: tuple[bytes, bytes]
    public: bytes = b""
    unplaced: int = 0


@dataclass(frozen=True, repr=False)
class SumShares:
    """What one client sends, once. A party that has both messages of `to` can read the update.

    Args:
        public: for both servers alike: sent to server 0, which relays it to server 1.
        to: one message for each server, which nobody else may see.
        unplaced: how many keys found no place; their rows are left out. The client's secret.
    """

    public: bytes
    to: tuple[bytes, bytes]
    unplaced: int

    def __repr__(self) -> str:
        """Printing shows what everybody sees."""
        own = " and ".join(str(len(message)) for message in self.to)
        return f"SumShares({len(self.public)} bytes, and {own} for the servers)"

    @property
    def bodies(self) -> tuple[bytes, bytes]:
        """What is sent to each server, before it is sealed."""
        return self.to[0] + self.public, self.to[1]


@dataclass(frozen=True)
class Receipt:
    """Says what a server adds. The two compare theirs before they add, and the trainer before it
    combines their shares.

    Args:
        model: SHA-256 of the manifest.
        params: SHA-256 of the params.
        cohort: SHA-256 of the names of everybody asked, in order.
        places: of those who are added, ascending.
        messages: SHA-256 of their places and of the digests of their public messages.
    """

    model: bytes
    params: bytes
    cohort: bytes
    places: tuple[int, ...]
    messages: bytes

    @staticmethod
    def of(facts: SumFacts, cohort: bytes, digests: Mapping[int, bytes]) -> Receipt:
        """Returns the receipt of a sum of these messages, each client's digest by its place."""
        params, places = sha256(facts.params).digest(), tuple(sorted(digests))
        return Receipt(facts.model, params, cohort, places, sha256(_listed(digests)).digest())

    def encode(self) -> bytes:
        """Returns what stands between head and check."""
        head = _RECEIPT.pack(self.model, self.params, self.cohort, len(self.places))
        return head + np.array(self.places, "<u8").tobytes() + self.messages

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for it in a share."""
        return sha256(self.encode()).digest()


@dataclass(frozen=True, repr=False)
class Share:
    """A server's share of a sum; alone it is noise. `receipt` is the digest of its receipt,
    `counts` that of both messages of counts, `dropped` how many rows both left out, the payload
    the aggregation's own."""

    party: int
    clients: int
    dropped: int
    receipt: bytes
    counts: bytes
    payload: memoryview

    @property
    def told(self) -> tuple[int, int, bytes, bytes]:
        """What the shares of both servers must have in common."""
        return self.clients, self.dropped, self.receipt, self.counts

    def __repr__(self) -> str:
        return f"Share(party {self.party}, {self.clients} clients)"


def pack_shares(facts: SumFacts, split: SplitUpdate, prg: Prg) -> SumShares:
    """Returns what a client sends; `prg` gives a nonce, by which no two messages are the same."""
    public = FRAMING.head(facts, "public", 0) + prg.bytes(SEED_BYTES) + split.public
    digest = sha256(public).digest()
    one, other = (
        FRAMING.seal(facts, "own", party, digest, own) for party, own in enumerate(split.own)
    )
    return SumShares(public, (one, other), split.unplaced)


def seal_share(public: bytes, round_id: str, device: str, token: str, body: bytes) -> bytes:
    """Returns what a client sends to the server with this public key, for one round and under one
    name: the first 8 bytes of the SHA-256 of the key, an ephemeral key (32), the body sealed by
    HPKE.

    Args:
        device: the name by which the server counts the client; under another, it does not open.
        token: that lets the client in at the server, whole. It goes into the key: what is
            shown of it does not suffice to seal anything in the client's name.

    Raises:
        MalformedError: not a public key.
    """
    enc, context = seal_to(public, _info(token))
    return _key_id(public) + enc + context.seal(_bound(round_id, device), body)


def open_share(private: PrivateKey, round_id: str, device: str, token: str, data: bytes) -> bytes:
    """Returns what the client of this name and token sealed to this server.

    Raises:
        MalformedError: sealed to another key, for another round or name, with another token, or
            damaged.
    """
    if data[:_KEY_ID_BYTES] != _key_id(private.public):
        raise MalformedError(
            f"a share was sealed for another key: got key {data[:_KEY_ID_BYTES].hex()}; expected "
            f"{_key_id(private.public).hex()}, the first bytes of the SHA-256 of this aggregator's "
            "key; name the key that its operator gives out behind its URL: URL#KEY"
        )
    start = _KEY_ID_BYTES + PUBLIC_BYTES
    context = open_from(private, data[_KEY_ID_BYTES:start], _info(token))
    return context.open(_bound(round_id, device), data[start:])


def _info(token: str) -> bytes:
    """What the key of a share is made with, beside what both sides agree on."""
    return _SEALED + b"\0" + token.encode("utf-8", "surrogatepass")


def _bound(round_id: str, device: str) -> bytes:
    """What a share is tied to; no round has a zero byte, and any text is taken for a name."""
    return f"{round_id}\0{device}".encode("utf-8", "surrogatepass")


def _key_id(public: bytes) -> bytes:
    return sha256(public).digest()[:_KEY_ID_BYTES]


def read_public(facts: SumFacts, data: bytes) -> bytes:
    """Returns the payload of a public message."""
    FRAMING.check_length(data, facts.public_message_bytes)
    FRAMING.check_head(facts, "public", 0, data)
    return data[_PUBLIC_BYTES:]


def read_own(facts: SumFacts, party: int, data: bytes) -> tuple[bytes, bytes]:
    """Returns the digest of a client's public message, and its payload for one server."""
    body = FRAMING.unseal(facts, "own", party, data, _DIGEST_BYTES + facts.own_bytes[party])
    return bytes(body[:_DIGEST_BYTES]), bytes(body[_DIGEST_BYTES:])


def list_message_bytes(clients: int) -> int:
    """Returns the number of bytes of the list of this many clients."""
    return FRAMING.head_bytes + _LISTED.size + _ENTRY_BYTES * clients + CHECK_BYTES


def pack_list(facts: SumFacts, party: int, cohort: bytes, digests: Mapping[int, bytes]) -> bytes:
    """Returns the list of clients whose messages a server has: SHA-256 of the `cohort`'s names, and
    of each client's public message by its place."""
    head = _LISTED.pack(cohort, len(digests))
    return FRAMING.seal(facts, "list", party, head, _listed(digests))


def read_list(facts: SumFacts, party: int, data: bytes) -> tuple[bytes, dict[int, bytes]]:
    """Returns the digest of the cohort, and that of each client's public message by its place."""
    if len(data) < list_message_bytes(0):
        raise FRAMING.malformed(f"{len(data)} bytes", f"{list_message_bytes(0)} bytes or more")
    length = len(data) - FRAMING.head_bytes - CHECK_BYTES
    body = FRAMING.unseal(facts, "list", party, data, length)
    cohort, count = _LISTED.unpack_from(body)
    FRAMING.check_length(data, list_message_bytes(count))
    places = _ascending(body, count, _LISTED.size)
    digests = bytes(body[_LISTED.size + 8 * count :])
    found = [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]
    return cohort, dict(zip(places, found, strict=True))


def receipt_message_bytes(clients: int) -> int:
    """Returns the number of bytes of the receipt of a sum of this many clients."""
    body = _RECEIPT.size + 8 * clients + _DIGEST_BYTES
    return FRAMING.head_bytes + body + CHECK_BYTES


def pack_receipt(facts: SumFacts, party: int, receipt: Receipt) -> bytes:
    """Returns what a server says that it adds."""
    return FRAMING.seal(facts, "receipt", party, receipt.encode())


def read_receipt(facts: SumFacts, party: int, data: bytes | memoryview) -> Receipt:
    """Returns what server `party` says that it adds; raises as `read_list` does."""
    if len(data) < receipt_message_bytes(0):
        shortest = receipt_message_bytes(0)
        raise FRAMING.malformed(f"{len(data)} bytes", f"{shortest} bytes or more")
    length = len(data) - FRAMING.head_bytes - CHECK_BYTES
    body = FRAMING.unseal(facts, "receipt", party, data, length)
    model, params, cohort, count = _RECEIPT.unpack_from(body)
    FRAMING.check_length(data, receipt_message_bytes(count))
    places = _ascending(body, count, _RECEIPT.size)
    return Receipt(model, params, cohort, tuple(places), bytes(body[-_DIGEST_BYTES:]))


def count_message_bytes(facts: SumFacts) -> int:
    """Returns the number of bytes of a server's share of the counts."""
    return FRAMING.head_bytes + facts.count_bytes + CHECK_BYTES


def pack_counts(facts: SumFacts, party: int, payload: bytes) -> bytes:
    """Returns a server's share of how many clients sent each key."""
    return FRAMING.seal(facts, "counts", party, payload)


def read_counts(facts: SumFacts, party: int, data: bytes) -> bytes:
    """Returns what server `party` says of counts; raises as `read_list` does."""
    return bytes(FRAMING.unseal(facts, "counts", party, data, facts.count_bytes))


@dataclass(frozen=True)
class DroppedRows:
    """How many rows both servers left out, and the SHA-256 of both messages of counts."""

    rows: int = 0
    counts: bytes = bytes(_DIGEST_BYTES)


def pack_share(
    facts: SumFacts,
    party: int,
    receipt: Receipt,
    payload: Sequence[Body],
    dropped: DroppedRows | None = None,
) -> list[Body]:
    """Returns what a server gives out, in pieces that need not be joined."""
    dropped = dropped or DroppedRows()
    told = _SHARE.pack(len(receipt.places), dropped.rows, receipt.digest, dropped.counts)
    head = FRAMING.head(facts, "share", party) + told
    return [head, *payload, sha_check([head, *payload])]


def read_share(facts: SumFacts, party: int, data: bytes | memoryview) -> Share:
    """Returns the share of server `party`; its payload lies in `data`."""
    body = FRAMING.unseal(facts, "share", party, data, _SHARE.size + facts.share_bytes)
    clients, dropped, receipt, counts = _SHARE.unpack_from(body)
    return Share(party, clients, dropped, receipt, counts, body[_SHARE.size :])


def _listed(digests: Mapping[int, bytes]) -> bytes:
    places = sorted(digests)
    return np.array(places, "<u8").tobytes() + b"".join(digests[place] for place in places)


def _ascending(body: memoryview, count: int, start: int) -> list[int]:
    """Places of clients, each once."""
    places = np.frombuffer(body, "<u8", count, start)
    if (places[1:] <= places[:-1]).any():
        raise FRAMING.malformed("places that do not ascend", "each client once, ascending")
    return list(map(int, places))
