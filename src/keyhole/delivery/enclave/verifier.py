"""Verifies evidence against a policy: claims, or a refusal with its reason.

The signatures of quotes, certificate chains, revocation lists and TCB levels are checked by the
library `dcap_qvl` against Intel's root; form, policy and the binding to key, table and nonce are
checked here. All of it is real and tested on genuine quotes, except one thing: no public quote
binds a key of ours, so a binding that holds is shown with simulated evidence, and on genuine quotes
only that a foreign one is refused. Whether an enclave isolates what runs in it is up to the
hardware: isolation is neither provided nor tested here.

The simulated attester signs the same facts with a key that it made up and that nobody vouches for.
Anyone who can start a process can do that: it protects nothing, and exists so that the protocol can
be run and tested where there is no enclave. A policy refuses it by default.
"""

from __future__ import annotations

import hmac
import json
import struct
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, get_args

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from keyhole.crypto.prg import Prg
from keyhole.delivery.enclave.messages import Evidence, EvidenceKind, report_data_of
from keyhole.errors import AttestationError, InputError

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


@dataclass(frozen=True)
class Policy:
    """What evidence must show. Everything that is not named here is refused.

    Args:
        measurements: of the programs that are known to be good: all registers must be equal.
        tcb_statuses: of platforms that are good enough. "Revoked" never is.
        advisories: that are known and accepted; any other one is refused, whatever the status.
        collateral_from: collateral that was issued earlier is refused; seconds since 1970.
        collateral_until: collateral that was issued later is refused; none if None. Collateral
            must hold at the time of verification in any case.
        quote_bytes: the exact length of a quote, zeros at its end included. If None, it must end
            where its own fields do: whatever stands behind is not signed by anybody.
        allow_simulation: accepts evidence that no hardware stands behind.

    Raises:
        InputError: a policy that nothing can fulfil, or that accepts a revoked platform.
    """

    measurements: frozenset[Measurement]
    tcb_statuses: frozenset[str] = field(default=frozenset({"UpToDate"}))
    advisories: frozenset[str] = frozenset()
    collateral_from: int = 0
    collateral_until: int | None = None
    quote_bytes: int | None = None
    allow_simulation: bool = False

    def __post_init__(self) -> None:
        accepted = set(TCB_STATUSES) - {"Revoked"}
        if not self.measurements or not self.tcb_statuses or self.tcb_statuses - accepted:
            raise InputError(
                f"a policy that makes no sense: got {len(self.measurements)} measurements, "
                f"{sorted(self.tcb_statuses)}; expected a measurement or more, and of "
                f"{sorted(accepted)}; name the programs and the platforms that you trust"
            )

    def check_before(self, evidence: Evidence) -> None:
        """Refuses evidence by what can be seen without verifying it: that it is simulated and must
        not be, or the length of its quote where one is pinned."""
        self._check_kind(evidence.kind)
        if self.quote_bytes is not None and len(evidence.quote) != self.quote_bytes:
            raise AttestationError(
                f"a quote of another length: got {len(evidence.quote)} bytes; expected "
                f"{self.quote_bytes} bytes; take the quote as the enclave made it"
            )

    def check(self, claims: Claims, now: int) -> None:
        """Refuses claims, of a quote whose signatures hold, that are not enough; `now` is in
        seconds since 1970."""
        self._check_kind(claims.kind)
        if claims.measurement not in self.measurements:
            raise AttestationError(
                f"an unknown measurement: got {claims.measurement}; expected one of "
                f"{len(self.measurements)} that the policy lists; do not talk to it; if it is a "
                "new version, build it and list its measurement"
            )
        if claims.is_debug:
            raise AttestationError(
                "an enclave in debug mode: got debug on; expected debug off; start the enclave "
                "without debugging: its memory can be read"
            )
        self._check_platform(claims)
        self._check_time(claims, now)

    def _check_kind(self, kind: EvidenceKind) -> None:
        if kind == "simulated" and not self.allow_simulation:
            raise AttestationError(
                "simulated evidence: got an enclave that no hardware stands behind; expected tdx "
                "or sgx; use hardware, or allow_simulation=True where nothing needs protection"
            )

    def _check_platform(self, claims: Claims) -> None:
        if claims.tcb_status not in self.tcb_statuses:
            raise AttestationError(
                "a platform that is not up to date: got "
                f"{', '.join([claims.tcb_status, *sorted(claims.advisories)])}; expected "
                f"{', '.join(sorted(self.tcb_statuses))}; update the platform, or waive the status "
                "and its advisories in the policy"
            )
        if unknown := claims.advisories - self.advisories:
            raise AttestationError(
                f"a platform with a security advisory: got {', '.join(sorted(unknown))}; expected "
                f"{', '.join(sorted(self.advisories)) or 'none'}; update the platform, or waive "
                "the advisory in the policy"
            )

    def _check_time(self, claims: Claims, now: int) -> None:
        until = now if self.collateral_until is None else min(now, self.collateral_until)
        if not self.collateral_from <= claims.oldest <= claims.newest <= until:
            raise AttestationError(
                f"collateral that is too old, or not yet valid: got issued at {claims.oldest} and "
                f"{claims.newest}; expected {self.collateral_from}..{until}; fetch collateral "
                "again, and check the clock"
            )
        if now > claims.expires:
            raise AttestationError(
                f"collateral that has expired: got valid until {claims.expires}; expected {now} or "
                "later; fetch collateral again, and check the clock"
            )


_MAGIC = b"KHSIMQ01"
_BODY = struct.Struct("<8s32sBB6x64sQQ")
_SIGNATURE_BYTES = 64
_DAY = 86_400  # seconds that simulated collateral holds


@dataclass(frozen=True, repr=False)
class SimulatedAttester:
    """Signs whatever it is asked to, with a throw-away Ed25519 key."""

    measurement: Measurement
    is_debug: bool = False
    tcb_status: TcbStatus = "UpToDate"
    _root: Ed25519PrivateKey = field(
        default_factory=lambda: Ed25519PrivateKey.from_private_bytes(Prg.fresh().bytes(32))
    )

    def __repr__(self) -> str:
        return "SimulatedAttester(NO HARDWARE PROTECTION)"

    @property
    def kind(self) -> EvidenceKind:
        """Nothing vouches for it."""
        return "simulated"

    def attest(self, report_data: bytes, now: int) -> tuple[bytes, bytes]:
        """Returns a signed structure in the place of a quote, and the root's public key."""
        status = TCB_STATUSES.index(self.tcb_status)
        program = self.measurement.registers[0]
        body = _BODY.pack(_MAGIC, program, self.is_debug, status, report_data, now, now + _DAY)
        return body + self._root.sign(body), self._root.public_key().public_bytes_raw()


def read_simulated(evidence: Evidence) -> Claims:
    """Returns what simulated evidence says, if its own root signed it: damage shows, forgery does
    not."""
    if len(evidence.quote) != _BODY.size + _SIGNATURE_BYTES:
        raise _refused(f"{len(evidence.quote)} bytes")
    body, signature = evidence.quote[: _BODY.size], evidence.quote[_BODY.size :]
    try:
        Ed25519PublicKey.from_public_bytes(evidence.collateral).verify(signature, body)
    except (InvalidSignature, ValueError) as error:
        raise _refused("a signature that does not hold") from error
    magic, digest, is_debug, status, report_data, issued, expires = _BODY.unpack(body)
    if magic != _MAGIC or status >= len(TCB_STATUSES):
        raise _refused("another form")
    return Claims(
        measurement=Measurement("simulated", (digest,)),
        is_debug=bool(is_debug),
        tcb_status=TCB_STATUSES[status],
        advisories=frozenset(),
        report_data=report_data,
        oldest=issued,
        newest=issued,
        expires=expires,
    )


def simulated_measurement() -> Measurement:
    """Returns a digest of the program's source as it is installed here, in the place of a
    measurement."""
    here = Path(__file__).parent
    crypto = here.parents[1] / "crypto"
    files = [*sorted(here.glob("*.py")), crypto / "hpke.py", crypto / "prg.py"]
    digest = sha256(b"keyhole-enclave-source")
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return Measurement("simulated", (digest.digest(),))


def simulation_policy() -> Policy:
    """Returns a policy that accepts the program as it is installed here, without hardware."""
    return Policy(frozenset({simulated_measurement()}), allow_simulation=True)


def _refused(got: str) -> AttestationError:
    return AttestationError(
        f"simulated evidence that does not hold: got {got}; expected "
        f"{_BODY.size + _SIGNATURE_BYTES} bytes that its own root signed; take the evidence as the "
        "program made it"
    )


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
_DEBUG = {"tdx": 0xFF, "sgx": 0x02}  # of byte 0: any of TDX's TUD group, or SGX's DEBUG
_REPORTS = {  # how the library names a report, its attributes and its registers
    "tdx": ("TD10", "td_attributes", ("mr_td", "rt_mr0", "rt_mr1", "rt_mr2", "rt_mr3")),
    "sgx": ("SgxEnclave", "attributes", ("mr_enclave", "mr_signer")),
}


def verify(evidence: Evidence, policy: Policy, nonce: bytes, now: int) -> Claims:
    """Verifies that evidence is an enclave's own, fresh, and enough for a policy.

    Args:
        evidence: as it came from the host, who is not trusted.
        nonce: 32 bytes that this client drew for this evidence.
        now: seconds since 1970.

    Returns:
        What the quote says. From here on a message sealed to `evidence.public` can be opened by
        the enclave that was measured, and by nobody else, if the hardware keeps its promise.
    """
    claims = verify_quote(evidence, policy, now)
    bound = report_data_of(evidence.public, evidence.config, nonce)
    if not hmac.compare_digest(claims.report_data, bound):
        raise AttestationError(
            "a quote that does not belong to this key, table and nonce: got other report data; "
            "expected the digest of all three; ask for evidence with a fresh nonce; if it happens "
            "again, do not talk to it"
        )
    return claims


def verify_quote(evidence: Evidence, policy: Policy, now: int) -> Claims:
    """Verifies all but the binding to key, table and nonce: not enough to send anything."""
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
    _check_form(evidence.quote, evidence.kind, is_padded=is_padded)
    fields = _collateral(evidence.collateral)
    try:
        report = library.verify(evidence.quote, library.QuoteCollateralV3(**fields), now)
    except ValueError as error:
        reason = str(error).splitlines()[0] if str(error) else "no reason given"
        raise AttestationError(
            f"the quote cannot be verified: got {reason}; expected signatures up to Intel's "
            "root, under collateral that holds now; fetch collateral again and check the clock; "
            "else do not talk to it"
        ) from error
    # Only what was verified is looked at: signed collateral, and the report as the library read it.
    infos = [json.loads(fields[name]) for name in ("tcb_info", "qe_identity")]
    issued = [_seconds(info["issueDate"]) for info in infos]
    measurement, attributes, report_data = _read_body(json.loads(report.to_json())["report"])
    return Claims(
        measurement=measurement,
        is_debug=bool(attributes[0] & _DEBUG[measurement.kind]),
        tcb_status=report.status,
        advisories=frozenset(report.advisory_ids),
        report_data=report_data,
        oldest=min(issued),
        newest=max(issued),
        expires=min(_seconds(info["nextUpdate"]) for info in infos),
    )


_HEAD_BYTES = 48
_FORMS = {"sgx": (3, 0x00, 384), "tdx": (4, 0x81, 584)}  # version, hardware, bytes of the report
_KEYS_BYTES = 64 + 64  # signature and attestation key
_BLOCK_TYPE = 6
_QUOTING_BYTES = 384 + 64  # report of the quoting enclave and its signature


def _check_form(quote: bytes, kind: EvidenceKind, *, is_padded: bool) -> None:
    """Refuses a quote of another version or hardware, with lengths that contradict each other, or
    with bytes behind its end.

    A quote is a head of 48 bytes, a report, the length of what follows, two values of 64 bytes
    (signature and attestation key), the report of the quoting enclave with its signature, data of
    that enclave, and certificates. Version 3 (SGX) has these in a row; version 4 (TDX) puts them
    from the report of the quoting enclave on into a block of type 6 with a length of its own
    (Intel's "SGX ECDSA Quote Library API" and "TDX DCAP Quoting Library API"). The library that
    verifies quotes ignores what stands behind them, and some of these lengths. We accept one
    length, so that evidence that was verified once cannot take another shape.
    """
    try:
        end = _end_of(quote, kind)
    except struct.error as error:
        raise _other_form(f"{len(quote)} bytes, cut short") from error
    behind = quote[end:]
    if len(quote) < end or behind.strip(b"\0") or (behind and not is_padded):
        raise _other_form(f"{len(quote)} bytes where its fields take {end}")


def _end_of(quote: bytes, kind: EvidenceKind) -> int:
    """Adds up the lengths of the fields."""
    version, _, hardware = struct.unpack_from("<HHI", quote)
    *wanted, report_bytes = _FORMS[kind]
    if [version, hardware] != wanted:
        raise _other_form(f"version {version} of hardware {hardware:#x}")
    start = _HEAD_BYTES + report_bytes + 4
    (signed_bytes,) = struct.unpack_from("<I", quote, start - 4)
    at = start + _KEYS_BYTES
    if kind == "tdx":
        block_type, block_bytes = struct.unpack_from("<HI", quote, at)
        at += 6
        if block_type != _BLOCK_TYPE or at + block_bytes != start + signed_bytes:
            raise _other_form("lengths that contradict each other")
    at += _QUOTING_BYTES
    (data_bytes,) = struct.unpack_from("<H", quote, at)
    at += 2 + data_bytes
    _, certificate_bytes = struct.unpack_from("<HI", quote, at)
    at += 6 + certificate_bytes
    if at != start + signed_bytes:
        raise _other_form("lengths that contradict each other")
    return int(at)


def _other_form(got: str) -> AttestationError:
    return AttestationError(
        f"a quote of another form: got {got}; expected a version 3 quote of SGX or a version 4 "
        "quote of TDX, and nothing behind it; take the quote as the enclave made it; pin "
        "quote_bytes if it is padded with zeros"
    )


def _read_body(body: dict[str, dict[str, Any]]) -> tuple[Measurement, bytes, bytes]:
    """The measurement, the attributes and the report data of a report."""
    kind: EvidenceKind = "tdx" if "TD10" in body else "sgx"
    form, attributes, names = _REPORTS[kind]
    report = body[form]
    measurement = Measurement(kind, tuple(bytes.fromhex(report[name]) for name in names))
    return measurement, bytes.fromhex(report[attributes]), bytes.fromhex(report["report_data"])


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
            f"the collateral cannot be read: got {len(data)} bytes; expected a JSON object of "
            f"{', '.join(_COLLATERAL)}; fetch collateral again"
        ) from error


def _seconds(date: str) -> int:
    return int(datetime.fromisoformat(date).timestamp())


def _library() -> ModuleType:
    try:
        import dcap_qvl  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(
            "quotes cannot be verified: got no dcap_qvl; expected the extra 'enclave'; pip "
            "install 'keyhole[enclave]'"
        ) from error
    found: ModuleType = dcap_qvl
    return found
