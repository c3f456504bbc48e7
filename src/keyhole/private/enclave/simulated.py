"""A simulated attester: the shape of attestation, without any hardware behind it.

It signs the same facts that a quote holds with a key that it made up at its start and that nobody
vouches for. Whoever can start a process can do that: it protects nothing, and exists so that the
protocol can be run and tested where there is no enclave. A policy refuses it by default.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from keyhole.errors import AttestationError
from keyhole.private.enclave.claims import TCB_STATUSES, Claims, Measurement, TcbStatus
from keyhole.private.enclave.evidence import Evidence, EvidenceKind
from keyhole.private.enclave.policy import Policy
from keyhole.private.prg import Prg

__all__ = ["SimulatedAttester", "read_simulated", "simulated_measurement", "simulation_policy"]

_MAGIC = b"KHSIMQ01"
_BODY = struct.Struct("<8s32sBB6x64sQQ")
_SIGNATURE_BYTES = 64
_DAY = 86_400  # seconds that simulated collateral holds


@dataclass(frozen=True, repr=False)
class SimulatedAttester:
    """Signs whatever it is asked to, with a throw-away Ed25519 key.

    Args:
        measurement: what it says that runs.
        is_debug: whether it says that debugging is on.
        tcb_status: how it says that the platform is rated.
    """

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
        body = _BODY.pack(
            _MAGIC,
            self.measurement.registers[0],
            self.is_debug,
            TCB_STATUSES.index(self.tcb_status),
            report_data,
            now,
            now + _DAY,
        )
        return body + self._root.sign(body), self._root.public_key().public_bytes_raw()


def read_simulated(evidence: Evidence) -> Claims:
    """What simulated evidence says, if its own root signed it: damage shows, forgery does not.

    Raises:
        AttestationError: it has another length or form, or the signature does not hold.
    """
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
    """A digest of the program's source as it is installed here, in the place of a measurement."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "hpke.py", here.parent / "prg.py"]
    digest = sha256(b"keyhole-enclave-source")
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return Measurement("simulated", (digest.digest(),))


def simulation_policy() -> Policy:
    """A policy that accepts the program as it is installed here, without hardware."""
    return Policy(frozenset({simulated_measurement()}), allow_simulation=True)


def _refused(got: str) -> AttestationError:
    return AttestationError(
        "simulated evidence that does not hold",
        got=got,
        allowed=f"{_BODY.size + _SIGNATURE_BYTES} bytes that its own root signed",
        fix="take the evidence as the program made it",
    )
