"""Where a quote of Intel's hardware ends: its lengths, added up before anybody verifies it.

A quote is a head of 48 bytes, a report, the length of what follows, two values of 64 bytes
(signature and attestation key), the report of the quoting enclave with its signature, data of that
enclave, and certificates. Version 3 (SGX) has these in a row; version 4 (TDX) puts them from the
report of the quoting enclave on into a block of type 6 with a length of its own. Source: Intel's
"SGX ECDSA Quote Library API" and "TDX DCAP Quoting Library API", the appendices on quote formats.

The library that verifies quotes ignores what stands behind them, and some of these lengths. We
accept one length, so that evidence that was verified once cannot take another shape.
"""

from __future__ import annotations

import struct

from keyhole.errors import AttestationError
from keyhole.private.enclave.evidence import EvidenceKind

__all__ = ["check_form"]

_HEAD_BYTES = 48
_SGX, _TDX = 0x00, 0x81  # the type of hardware in the head
_FORMS = {"sgx": (3, _SGX, 384), "tdx": (4, _TDX, 584)}  # version, type, bytes of the report
_KEYS_BYTES = 64 + 64  # signature and attestation key
_BLOCK_TYPE = 6
_QUOTING_BYTES = 384 + 64  # report of the quoting enclave and its signature


def check_form(quote: bytes, kind: EvidenceKind, *, is_padded: bool) -> None:
    """Refuses a quote whose lengths do not add up.

    Args:
        quote: to be checked.
        kind: "tdx" or "sgx".
        is_padded: zeros may follow, since the whole length is pinned.

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
        "a quote of another form",
        got=got,
        allowed="a version 3 quote of SGX or a version 4 quote of TDX, and nothing behind it",
        fix="take the quote as the enclave made it; pin quote_bytes if it is padded with zeros",
    )
