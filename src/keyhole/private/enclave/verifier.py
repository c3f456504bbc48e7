"""The verifier: from evidence to claims, or to a refusal with its reason.

The signatures of quotes, certificate chains, revocation lists and TCB levels are checked by the
library `dcap_qvl` against Intel's root; form, policy and the binding to key, table and nonce are
checked here. All of it is real and tested on genuine quotes, except one thing: no public quote
binds a key of ours, so a binding that holds is shown with simulated evidence, and on genuine quotes
only that a foreign one is refused. Whether an enclave isolates what runs in it is up to the
hardware: isolation is neither provided nor tested here.
"""

from __future__ import annotations

import hmac
import json
from datetime import datetime
from types import ModuleType
from typing import Any

from keyhole.errors import AttestationError, InputError
from keyhole.private.enclave.claims import Claims, Measurement
from keyhole.private.enclave.evidence import Evidence, report_data_of
from keyhole.private.enclave.policy import Policy
from keyhole.private.enclave.quotes import check_form
from keyhole.private.enclave.simulated import read_simulated

__all__ = ["verify", "verify_quote"]

_COLLATERAL = {  # the fields, and whether they are bytes, written in hexadecimal digits
    "pck_crl_issuer_chain": False,
    "root_ca_crl": True,
    "pck_crl": True,
    "tcb_info_issuer_chain": False,
    "tcb_info": False,
    "tcb_info_signature": True,
    "qe_identity_issuer_chain": False,
    "qe_identity": False,
    "qe_identity_signature": True,
}
_TDX_DEBUG, _SGX_DEBUG = 0xFF, 0x02  # of byte 0: any of TDX's TUD group, or SGX's DEBUG


def verify(evidence: Evidence, policy: Policy, nonce: bytes, now: int) -> Claims:
    """Verifies that evidence is an enclave's own, fresh, and enough for a policy.

    Args:
        evidence: as it came from the host, who is not trusted.
        policy: what it must show.
        nonce: 32 bytes that this client drew for this evidence.
        now: seconds since 1970.

    Returns:
        What the quote says. From here on a message sealed to `evidence.public` can be opened by
        the enclave that was measured, and by nobody else, if the hardware keeps its promise.

    Raises:
        AttestationError: it is not; the message names the reason.
        InputError: quotes cannot be verified here since the extra `enclave` is not installed.
    """
    claims = verify_quote(evidence, policy, now)
    bound = report_data_of(evidence.public, evidence.config, nonce)
    if not hmac.compare_digest(claims.report_data, bound):
        raise AttestationError(
            "a quote that does not belong to this key, table and nonce",
            got="other report data",
            allowed="the digest of all three",
            fix="ask for evidence with a fresh nonce; if it happens again, do not talk to it",
        )
    return claims


def verify_quote(evidence: Evidence, policy: Policy, now: int) -> Claims:
    """Verifies all but the binding to key, table and nonce: not enough to send anything.

    Raises:
        AttestationError, InputError: as `verify` does.
    """
    policy.check_before(evidence)
    claims = (
        read_simulated(evidence)
        if evidence.kind == "simulated"
        else _read(evidence, now, is_padded=policy.quote_bytes is not None)
    )
    policy.check(claims, now)
    return claims


def _read(evidence: Evidence, now: int, *, is_padded: bool) -> Claims:
    """What a quote of real hardware says, if every signature holds."""
    library = _library()
    check_form(evidence.quote, evidence.kind, is_padded=is_padded)
    fields = _collateral(evidence.collateral)
    try:
        report = library.verify(evidence.quote, library.QuoteCollateralV3(**fields), now)
    except ValueError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise AttestationError(
            "a quote that cannot be verified",
            got=reason,
            allowed="signatures up to Intel's root, under collateral that holds now",
            fix="fetch collateral anew and check the clock; else do not talk to it",
        ) from error
    # Only what was verified is looked at: signed collateral, and the report as the library read it.
    infos = [json.loads(fields[name]) for name in ("tcb_info", "qe_identity")]
    issued = [_seconds(info["issueDate"]) for info in infos]
    body = json.loads(report.to_json())["report"]
    measurement, attributes, report_data = _read_body(body)
    debug_mask = _TDX_DEBUG if measurement.kind == "tdx" else _SGX_DEBUG
    return Claims(
        measurement=measurement,
        is_debug=bool(attributes[0] & debug_mask),
        tcb_status=report.status,
        advisories=frozenset(report.advisory_ids),
        report_data=report_data,
        oldest=min(issued),
        newest=max(issued),
        expires=min(_seconds(info["nextUpdate"]) for info in infos),
    )


def _read_body(body: dict[str, dict[str, Any]]) -> tuple[Measurement, bytes, bytes]:
    """The measurement, the attributes and the report data of a report."""
    if "TD10" in body:
        report, names = body["TD10"], ["mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3"]
        registers = tuple(bytes.fromhex(report[name]) for name in names)
        attributes = bytes.fromhex(report["td_attributes"])
        return Measurement("tdx", registers), attributes, bytes.fromhex(report["report_data"])
    report = body["SgxEnclave"]
    registers = tuple(bytes.fromhex(report[name]) for name in ("mr_enclave", "mr_signer"))
    attributes = bytes.fromhex(report["attributes"])
    return Measurement("sgx", registers), attributes, bytes.fromhex(report["report_data"])


def _collateral(data: bytes) -> dict[str, Any]:
    """The fields of collateral: all of them, and no others."""
    try:
        found = json.loads(data)
        if not isinstance(found, dict) or found.keys() != _COLLATERAL.keys():
            raise ValueError("other fields")
        return {
            name: bytes.fromhex(found[name]) if is_bytes else "".join([found[name]])
            for name, is_bytes in _COLLATERAL.items()
        }
    except (ValueError, TypeError, RecursionError) as error:
        raise AttestationError(
            "collateral that cannot be read",
            got=f"{len(data)} bytes",
            allowed=f"a JSON object of {', '.join(_COLLATERAL)}",
            fix="fetch collateral anew",
        ) from error


def _seconds(date: str) -> int:
    return int(datetime.fromisoformat(date).timestamp())


def _library() -> ModuleType:
    try:
        import dcap_qvl  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "quotes cannot be verified",
            got="no dcap_qvl",
            allowed="the extra 'enclave'",
            fix="pip install 'keyhole[enclave]'",
        ) from error
    found: ModuleType = dcap_qvl
    return found
