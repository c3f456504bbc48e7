"""Claims: what a verified quote says, in words that do not depend on the hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from keyhole.errors import InputError
from keyhole.private.enclave.evidence import EvidenceKind

__all__ = ["NO_HARDWARE_PROTECTION", "TCB_STATUSES", "Claims", "Measurement", "TcbStatus"]

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
        kind: of the hardware.
        registers: tdx: MRTD and RTMR 0 to 3, 48 bytes each; sgx: MRENCLAVE and MRSIGNER, 32 bytes
            each; simulated: a digest of the program's source, 32 bytes.

    Raises:
        InputError: registers are missing, or of another length.
    """

    kind: EvidenceKind
    registers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        lengths = tuple(len(register) for register in self.registers)
        if lengths != _REGISTERS.get(self.kind):
            raise InputError(
                "a measurement that is not whole",
                got=f"kind {self.kind!r}, registers of {lengths} bytes",
                allowed="tdx: MRTD and four RTMRs; sgx: MRENCLAVE and MRSIGNER; simulated: one",
                fix="take all registers from a quote of the program that you built",
            )

    def __str__(self) -> str:
        return f"{self.kind} {self.registers[0].hex()[:16]}..."


@dataclass(frozen=True)
class Claims:
    """What a quote says whose signatures hold. Whether that is enough is for a policy to say.

    Args:
        measurement: what runs.
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
        """What whoever relies on it must print and record; nothing if hardware vouches for it."""
        return NO_HARDWARE_PROTECTION if self.kind == "simulated" else ""
