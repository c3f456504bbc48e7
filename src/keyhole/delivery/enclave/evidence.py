"""Describes what an enclave shows of itself: evidence, the params of its table, claims of a quote.

Roles as in RFC 9334: the enclave is the attester, the client verifies and decides by itself.

A quote is a head of 48 bytes, a report, the length of what follows, two values of 64 bytes
(signature and attestation key), the report of the quoting enclave with its signature, data of that
enclave, and certificates. Version 3 (SGX) has these in a row; version 4 (TDX) puts them from the
report of the quoting enclave on into a block of type 6 with a length of its own (Intel's "SGX ECDSA
Quote Library API" and "TDX DCAP Quoting Library API"). The library that verifies quotes ignores
what stands behind them, and some of these lengths. We accept one length, so that evidence that was
verified once cannot take another shape.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256, sha512
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from keyhole.crypto.codec import read_facts
from keyhole.errors import AttestationError, InputError, MalformedError, ShapeError

if TYPE_CHECKING:
    from hashlib import _Hash


EvidenceKind: TypeAlias = Literal["tdx", "sgx", "simulated"]
"""What vouches for the enclave: Intel TDX, Intel SGX, or nothing at all."""

NONCE_BYTES = 32
"""Of the client's nonce, which makes evidence its own."""

REPORT_DATA_BYTES = 64
"""Of the field of a quote that the enclave fills itself."""

_EVIDENCE_MAGIC = b"KHA1"
_KINDS = get_args(EvidenceKind)
_HEAD = struct.Struct("<4sB3xII32s32s")
_MAX_QUOTE = 64 << 10  # bytes; quotes have about 5,000
_MAX_COLLATERAL = 1 << 20  # bytes; collateral has about 16,000


@dataclass(frozen=True)
class Evidence:
    """What an enclave shows to one client. All of it is public.

    Args:
        quote: as the hardware signed it, with nothing before or behind.
        collateral: what is needed to verify the quote: for tdx and sgx the JSON of the certificate
            chains, revocation lists, TCB information and identity of the quoting enclave.
        public: 32 bytes: the key to which requests are sealed.
        config: 32 bytes: the digest of the params of the table that the enclave holds.
    """

    kind: EvidenceKind
    quote: bytes
    collateral: bytes
    public: bytes
    config: bytes

    def __post_init__(self) -> None:
        lengths = (len(self.quote), len(self.collateral), len(self.public), len(self.config))
        is_long = lengths[0] > _MAX_QUOTE or lengths[1] > _MAX_COLLATERAL
        if self.kind not in _KINDS or is_long or lengths[2:] != (32, 32):
            raise InputError(
                f"evidence of no enclave: got kind {self.kind!r}, fields of {lengths} bytes; "
                f"expected {', '.join(_KINDS)}; at most {_MAX_QUOTE}, {_MAX_COLLATERAL}, 32, 32; "
                "take it from the enclave as it is"
            )

    def encode(self) -> bytes:
        """Returns the evidence as it travels."""
        head = _HEAD.pack(
            _EVIDENCE_MAGIC,
            _KINDS.index(self.kind),
            len(self.quote),
            len(self.collateral),
            self.public,
            self.config,
        )
        return head + self.quote + self.collateral

    @staticmethod
    def decode(data: bytes | bytearray) -> Evidence:
        """Returns the evidence that `data` holds. It is not verified."""
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
            f"report data of fields that have another length: got {len(public)}, {len(config)} and "
            f"{len(nonce)} bytes; expected 32 bytes each; draw a nonce with fresh_nonce()"
        )
    return sha512(b"keyhole-enclave-v1" + public + config + nonce).digest()


def _not_evidence(length: int) -> MalformedError:
    return MalformedError(
        f"this is not evidence of an enclave: got {length} bytes; expected a head and fields of "
        "the lengths it names, as docs/wire.md describes them; check that both sides are of one "
        "version"
    )


_TERMS_MAGIC = b"KHT2"
_FORM = struct.Struct("<4s4x16sQQQ32s")
_MAX = 1 << 40  # of keys: beyond what anybody can scan
_MAX_SEALED = (1 << 31) - 4096  # bytes of keys, or of records, that can be sealed at once
_KEY_BYTES = 8  # of a key in a request


@dataclass(frozen=True)
class EnclaveParams:
    """The public facts of one table in an enclave.

    What the host can see of a request and its answer depends on these and on nothing else.

    Args:
        round: 16 bytes: which slices these are.
        max_keys: m, to which every request is padded.
        database: 32 bytes: the digest of all slices.
    """

    round: bytes
    num_keys: int
    record_bytes: int
    max_keys: int
    database: bytes

    def __post_init__(self) -> None:
        numbers = (self.num_keys, self.record_bytes, self.max_keys)
        if (len(self.round), len(self.database)) != (16, 32):
            raise _bad(f"names of {len(self.round)} and {len(self.database)} bytes")
        if min(numbers) < 1 or max(numbers) > _MAX or self.max_keys > self.num_keys:
            raise _bad(f"{self.num_keys} keys, {self.record_bytes} bytes, {self.max_keys} a query")
        if self.max_keys * max(_KEY_BYTES, self.record_bytes) > _MAX_SEALED:
            raise _bad(f"{self.max_keys} keys a query, for records of {self.record_bytes} bytes")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it: the config digest of the evidence."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the params as a client fetches them."""
        return _FORM.pack(
            _TERMS_MAGIC,
            self.round,
            self.num_keys,
            self.record_bytes,
            self.max_keys,
            self.database,
        )

    @staticmethod
    def decode(data: bytes) -> EnclaveParams:
        """Returns the params that `data` holds."""
        return read_facts(data, "params of an enclave's table", _unpack)


def params_of(round: bytes, records: NDArray[np.uint8], max_keys: int) -> EnclaveParams:
    """The params of a table.

    Args:
        records: (K, record_bytes).
    """
    if records.ndim != 2 or records.dtype != np.uint8:
        raise ShapeError(
            f"records that are not a table of bytes: got {records.dtype} of shape {records.shape}; "
            "expected uint8 of shape (num_keys, record_bytes); pass the slices as bytes, a row "
            "for each key"
        )
    num_keys, record_bytes = records.shape
    digest = start_digest(round, num_keys, record_bytes)
    digest.update(np.ascontiguousarray(records).data)
    return EnclaveParams(round, num_keys, record_bytes, min(max_keys, num_keys), digest.digest())


def start_digest(round: bytes, num_keys: int, record_bytes: int) -> _Hash:
    """The digest of a table before its records: SHA-256, which the records are added to."""
    return sha256(b"keyhole-enclave-table" + round + struct.pack("<QQ", num_keys, record_bytes))


def _unpack(data: bytes) -> EnclaveParams:
    _, *rest = _FORM.unpack(data)
    return EnclaveParams(*rest)


def _bad(got: str) -> InputError:
    return InputError(
        f"params of an enclave's table that make no sense: got {got}; expected names of 16 and 32 "
        "bytes; 1..2^40; a request for at most num_keys, with 2 GB of keys, 8 bytes each, or "
        "records; check num_keys, record_bytes and max_keys"
    )


NO_HARDWARE_PROTECTION = "NO HARDWARE PROTECTION"
"""What stands in the record of everything that relies on simulated evidence."""

TcbStatus: TypeAlias = Literal[
    "UpToDate",
    "SWHardeningNeeded",
    "ConfigurationNeeded",
    "ConfigurationAndSWHardeningNeeded",
    "OutOfDate",
    "OutOfDateConfigurationNeeded",
    "Revoked",
]
"""How Intel rates a platform's trusted computing base, in its own words."""

TCB_STATUSES: tuple[TcbStatus, ...] = get_args(TcbStatus)

_REGISTERS = {"tdx": (48,) * 5, "sgx": (32, 32), "simulated": (32,)}  # bytes of each


@dataclass(frozen=True)
class Measurement:
    """What runs in an enclave, as its hardware measured it.

    Args:
        registers: tdx: MRTD and RTMR 0 to 3, 48 bytes each; sgx: MRENCLAVE and MRSIGNER, 32 bytes
            each; simulated: a digest of the program's source, 32 bytes.
    """

    kind: EvidenceKind
    registers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        lengths = tuple(len(register) for register in self.registers)
        if lengths != _REGISTERS.get(self.kind):
            raise InputError(
                f"a measurement that is not whole: got kind {self.kind!r}, registers of {lengths} "
                "bytes; expected tdx: MRTD and four RTMRs; sgx: MRENCLAVE and MRSIGNER; "
                "simulated: one; take all registers from a quote of the program that you built"
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.registers[0].hex()[:16]}..."


@dataclass(frozen=True)
class Claims:
    """What a quote says whose signatures hold. Whether that is enough is for a policy to say.

    Args:
        is_debug: its memory can be read from outside.
        tcb_status: how the platform is rated.
        advisories: security advisories that apply to it.
        report_data: 64 bytes that the enclave had signed.
        oldest: when the older part of the collateral was issued, in seconds since 1970.
        newest: when the newer part was.
        expires: until when all of it holds.
    """

    measurement: Measurement
    is_debug: bool
    tcb_status: str
    advisories: frozenset[str]
    report_data: bytes
    oldest: int
    newest: int
    expires: int

    @property
    def kind(self) -> EvidenceKind:
        """What vouches for it."""
        return self.measurement.kind

    @property
    def warning(self) -> str:
        """What to print and record wherever it is relied on; nothing if hardware vouches for it."""
        return NO_HARDWARE_PROTECTION if self.kind == "simulated" else ""


_HEAD_BYTES = 48
_SGX, _TDX = 0x00, 0x81  # the type of hardware in the head
_FORMS = {"sgx": (3, _SGX, 384), "tdx": (4, _TDX, 584)}  # version, type, bytes of the report
_KEYS_BYTES = 64 + 64  # signature and attestation key
_BLOCK_TYPE = 6
_QUOTING_BYTES = 384 + 64  # report of the quoting enclave and its signature


def check_form(quote: bytes, kind: EvidenceKind, *, is_padded: bool) -> None:
    """Refuses a quote whose lengths do not add up.

    Raises:
        AttestationError: another version or hardware, lengths that contradict each other, or bytes
            behind the end.
    """
    try:
        end = _end_of(quote, kind)
    except struct.error as error:
        raise _refused(f"{len(quote)} bytes, cut short") from error
    behind = quote[end:]
    if len(quote) < end or behind.strip(b"\0") or (behind and not is_padded):
        raise _refused(f"{len(quote)} bytes where its fields take {end}")


def _end_of(quote: bytes, kind: EvidenceKind) -> int:
    """Adds up the lengths of the fields."""
    version, _, hardware = struct.unpack_from("<HHI", quote)
    wanted_version, wanted_hardware, report_bytes = _FORMS[kind]
    if (version, hardware) != (wanted_version, wanted_hardware):
        raise _refused(f"version {version} of hardware {hardware:#x}")
    start = _HEAD_BYTES + report_bytes + 4
    (signed_bytes,) = struct.unpack_from("<I", quote, start - 4)
    at = start + _KEYS_BYTES
    if kind == "tdx":
        block_type, block_bytes = struct.unpack_from("<HI", quote, at)
        at += 6
        if block_type != _BLOCK_TYPE or at + block_bytes != start + signed_bytes:
            raise _refused("lengths that contradict each other")
    at += _QUOTING_BYTES
    (data_bytes,) = struct.unpack_from("<H", quote, at)
    at += 2 + data_bytes
    _, certificate_bytes = struct.unpack_from("<HI", quote, at)
    at += 6 + certificate_bytes
    if at != start + signed_bytes:
        raise _refused("lengths that contradict each other")
    return int(at)


def _refused(got: str) -> AttestationError:
    return AttestationError(
        f"a quote of another form: got {got}; expected a version 3 quote of SGX or a version 4 "
        "quote of TDX, and nothing behind it; take the quote as the enclave made it; pin "
        "quote_bytes if it is padded with zeros"
    )
