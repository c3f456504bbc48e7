"""Evidence: what an enclave shows of itself, before it is told anything.

Roles as in RFC 9334: the enclave is the attester, the client verifies and decides by itself.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import sha512
from typing import Literal, Protocol, TypeAlias, get_args

from keyhole.errors import InputError, MalformedError

__all__ = [
    "NONCE_BYTES",
    "REPORT_DATA_BYTES",
    "Attester",
    "Evidence",
    "EvidenceKind",
    "report_data_of",
]

EvidenceKind: TypeAlias = Literal["tdx", "sgx", "simulated"]
"""What vouches for the enclave: Intel TDX, Intel SGX, or nothing at all."""

NONCE_BYTES = 32
"""Of the client's nonce, which makes evidence its own."""

REPORT_DATA_BYTES = 64
"""Of the field of a quote that the enclave fills itself."""

_MAGIC = b"KHA1"
_KINDS = get_args(EvidenceKind)
_HEAD = struct.Struct("<4sB3xII32s32s")
_MOST_QUOTE = 64 << 10  # bytes; quotes have about 5,000
_MOST_COLLATERAL = 1 << 20  # bytes; collateral has about 16,000


@dataclass(frozen=True)
class Evidence:
    """What an enclave shows to one client. All of it is public.

    Args:
        kind: what vouches for it.
        quote: as the hardware signed it, with nothing before or behind.
        collateral: what is needed to verify the quote: for tdx and sgx the JSON of the certificate
            chains, revocation lists, TCB information and identity of the quoting enclave.
        public: 32 bytes: the key to which requests are sealed.
        config: 32 bytes: the digest of the terms of the table that the enclave holds.

    Raises:
        InputError: a field has another length.
    """

    kind: EvidenceKind
    quote: bytes
    collateral: bytes
    public: bytes
    config: bytes

    def __post_init__(self) -> None:
        lengths = (len(self.quote), len(self.collateral), len(self.public), len(self.config))
        is_long = lengths[0] > _MOST_QUOTE or lengths[1] > _MOST_COLLATERAL
        if self.kind not in _KINDS or is_long or lengths[2:] != (32, 32):
            raise InputError(
                "evidence of no enclave",
                got=f"kind {self.kind!r}, fields of {lengths} bytes",
                allowed=f"{', '.join(_KINDS)}; at most {_MOST_QUOTE}, {_MOST_COLLATERAL}, 32, 32",
                fix="take it from the enclave as it is",
            )

    def encode(self) -> bytes:
        """Returns the evidence as it travels."""
        head = _HEAD.pack(
            _MAGIC,
            _KINDS.index(self.kind),
            len(self.quote),
            len(self.collateral),
            self.public,
            self.config,
        )
        return head + self.quote + self.collateral

    @staticmethod
    def decode(data: bytes | bytearray) -> Evidence:
        """Returns the evidence that `data` holds. It is not verified.

        Raises:
            MalformedError: not evidence of this version, cut, or with something behind it.
        """
        data = bytes(data)
        try:
            _, kind, quote, collateral, public, config = _HEAD.unpack_from(data)
            middle = _HEAD.size + quote
            if len(data) != middle + collateral:
                raise _not_evidence(len(data))
            found = Evidence(_KINDS[kind], data[_HEAD.size : middle], data[middle:], public, config)
        except (struct.error, IndexError, InputError) as error:
            raise _not_evidence(len(data)) from error
        if found.encode() != data:
            raise _not_evidence(len(data))
        return found


class Attester(Protocol):
    """What makes evidence, inside the enclave."""

    @property
    def kind(self) -> EvidenceKind:
        """What vouches for the enclave."""
        ...

    def attest(self, report_data: bytes, now: int) -> tuple[bytes, bytes]:
        """Returns a quote over 64 bytes of report data, and its collateral.

        Args:
            report_data: what the quote binds to the enclave.
            now: seconds since 1970.
        """
        ...


def report_data_of(public: bytes, config: bytes, nonce: bytes) -> bytes:
    """What the quote must bind: the enclave's key, its table, and the client that asks.

    SHA-512("keyhole-enclave-v1" || public || config || nonce); each of the three has 32 bytes.

    Raises:
        InputError: one of them has another length, so that two choices could be mistaken for each
            other.

    >>> len(report_data_of(bytes(32), bytes(32), bytes(32)))
    64
    """
    if (len(public), len(config), len(nonce)) != (32, 32, NONCE_BYTES):
        raise InputError(
            "report data of fields that have another length",
            got=f"{len(public)}, {len(config)} and {len(nonce)} bytes",
            allowed="32 bytes each",
            fix="draw a nonce with fresh_nonce()",
        )
    return sha512(b"keyhole-enclave-v1" + public + config + nonce).digest()


def _not_evidence(length: int) -> MalformedError:
    return MalformedError(
        "this is not evidence of an enclave",
        got=f"{length} bytes",
        allowed="a head and fields of the lengths it names, as docs/wire.md describes them",
        fix="check that both sides are of one version",
    )
