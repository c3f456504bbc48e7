"""Says how blind tokens look: what a device has signed, and what it shows.

    token, 354 bytes    2 (2 bytes)  nonce (32)  purpose (32)  SHA-256 of the key (32)
                        signature (256)

Numbers are big-endian, as RFC 9578 lays out its publicly verifiable tokens. The nonce is the
device's own and random; the purpose names a round and where in it the token counts, so that one
service cannot spend at another what it was shown. The signature, of everything before it, is under
a key that is good for one round.
"""

from __future__ import annotations

from hashlib import sha256

from keyhole.crypto.blind import SIGNATURE_BYTES, Blinded, BlindPublic, blind
from keyhole.crypto.prg import Prg
from keyhole.errors import MalformedError

TOKEN_BYTES = 98 + SIGNATURE_BYTES
GATEWAY = "gateway"
"""Where tokens in batches of sealed requests count."""

_TYPE = (2).to_bytes(2)
_NONCE = 32


def queries_at(server: int) -> str:
    """Where a token is changed for a round token without a name: at a server of private queries."""
    return f"queries/{server}"


def admission_path(round_id: str) -> str:
    """The key of a round, and where blinded tokens are signed."""
    return f"/v1/rounds/{round_id}/admission"


def redeem_path(round_id: str) -> str:
    """Where a token is changed for a round token without a name."""
    return f"/v1/rounds/{round_id}/admission/redeem"


def purpose_of(round_id: str, place: str) -> bytes:
    """The digest that a token names."""
    return sha256(f"keyhole admission\n{place}\n{round_id}".encode("ascii")).digest()


def blind_token(key: BlindPublic, round_id: str, place: str) -> Blinded:
    """A new token, to be signed."""
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
