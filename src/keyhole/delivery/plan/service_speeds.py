"""Service speeds: what a request costs the slice service beside the work of a delivery.

Measured with `benchmarks/internet_scale.py` on a 2-core machine of ours (AMD EPYC, 16 November
2026), over loopback, CPU time of `keyhole serve`; rounded. Fetches of `benchmarks/slices.py` cost
the same within a fifth. A network card and a proxy in front cost something too, which is not here.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ServiceSpeeds"]


@dataclass(frozen=True)
class ServiceSpeeds:
    """Of one core: seconds, or bytes a second.

    Args:
        request_seconds: for reading the head of a request and answering it, whatever it is about.
        sending: of bodies, from memory into sockets. Enciphering is in it nowhere: see `aes` of
            `Machine`, which is faster.
        receiving: of updates: read, compared with their check, searched for NaN, written.
        store_seconds: for putting an update on the disk, whatever its length.
        handshake_seconds: for a new connection with TLS 1.3.
        adding: of updates, read by the trainer, checked and added up under their keys.
    """

    request_seconds: float = 180e-6
    sending: float = 3.5e9
    receiving: float = 0.35e9
    store_seconds: float = 1.1e-3
    handshake_seconds: float = 1.3e-3
    adding: float = 0.5e9
