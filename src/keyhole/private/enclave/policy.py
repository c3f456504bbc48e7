"""Policy: which enclaves a client is willing to tell its keys."""

from __future__ import annotations

from dataclasses import dataclass, field

from keyhole.errors import AttestationError, InputError
from keyhole.private.enclave.claims import TCB_STATUSES, Claims, Measurement
from keyhole.private.enclave.evidence import Evidence, EvidenceKind

__all__ = ["Policy"]


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
                "a policy that makes no sense",
                got=f"{len(self.measurements)} measurements, {sorted(self.tcb_statuses)}",
                allowed=f"a measurement or more, and of {sorted(accepted)}",
                fix="name the programs and the platforms that you trust",
            )

    def check_before(self, evidence: Evidence) -> None:
        """Refuses evidence by what can be seen without verifying it.

        Raises:
            AttestationError: it is simulated and must not be, or its quote has another length than
                the one that is pinned.
        """
        self._check_kind(evidence.kind)
        if self.quote_bytes is not None and len(evidence.quote) != self.quote_bytes:
            raise AttestationError(
                "a quote of another length",
                got=f"{len(evidence.quote)} bytes",
                allowed=f"{self.quote_bytes} bytes",
                fix="take the quote as the enclave made it",
            )

    def check(self, claims: Claims, now: int) -> None:
        """Refuses claims that are not enough.

        Args:
            claims: of a quote whose signatures hold.
            now: seconds since 1970.

        Raises:
            AttestationError: one of them is not; the message names it.
        """
        self._check_kind(claims.kind)
        if claims.measurement not in self.measurements:
            raise AttestationError(
                "an unknown measurement",
                got=claims.measurement,
                allowed=f"one of {len(self.measurements)} that the policy lists",
                fix="do not talk to it; if it is a new version, build it and list its measurement",
            )
        if claims.is_debug:
            raise AttestationError(
                "an enclave in debug mode",
                got="debug on",
                allowed="debug off",
                fix="start the enclave without debugging: its memory can be read",
            )
        self._check_platform(claims)
        self._check_time(claims, now)

    def _check_kind(self, kind: EvidenceKind) -> None:
        if kind == "simulated" and not self.allow_simulation:
            raise AttestationError(
                "simulated evidence",
                got="an enclave that no hardware stands behind",
                allowed="tdx or sgx",
                fix="use hardware, or allow_simulation=True where nothing needs protection",
            )

    def _check_platform(self, claims: Claims) -> None:
        if claims.tcb_status not in self.tcb_statuses:
            raise AttestationError(
                "a platform that is not up to date",
                got=", ".join([claims.tcb_status, *sorted(claims.advisories)]),
                allowed=", ".join(sorted(self.tcb_statuses)),
                fix="update the platform, or waive the status and its advisories in the policy",
            )
        if unknown := claims.advisories - self.advisories:
            raise AttestationError(
                "a platform with a security advisory",
                got=", ".join(sorted(unknown)),
                allowed=", ".join(sorted(self.advisories)) or "none",
                fix="update the platform, or waive the advisory in the policy",
            )

    def _check_time(self, claims: Claims, now: int) -> None:
        until = now if self.collateral_until is None else min(now, self.collateral_until)
        if not self.collateral_from <= claims.oldest <= claims.newest <= until:
            raise AttestationError(
                "collateral that is too old, or not yet valid",
                got=f"issued at {claims.oldest} and {claims.newest}",
                allowed=f"{self.collateral_from}..{until}",
                fix="fetch collateral anew, and check the clock",
            )
        if now > claims.expires:
            raise AttestationError(
                "collateral that has expired",
                got=f"valid until {claims.expires}",
                allowed=f"{now} or later",
                fix="fetch collateral anew, and check the clock",
            )
