"""Sum speeds: how fast one core does what secure sums are made of.

From `benchmarks/results/secure_sum.json` (AMD EPYC, 16 November 2026) and, for short rows and for
secrets, from the same code with other numbers; rounded. Tests hold them to that file.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SumSpeeds"]


@dataclass(frozen=True)
class SumSpeeds:
    """Of one core: seconds, or bytes a second.

    Args:
        masking: of vectors, to which a mask is added that is made from its seed.
        summing: of masked vectors, checked and added up by a server.
        agree_seconds: for a client's secrets with one neighbour: agreed, shared, sealed, opened.
        rebuild_seconds: for the secret of one client, from shares, at a server.
        decoding: of rows, that are read out of a sketch.
        position_seconds: for one position of a bucket, at one of two servers.
        rows: of pseudo-random rows that such a server makes and adds, beside that.
        share_seconds: for a client's shares for two servers, whatever its keys.
        key_seconds: for one key of them.
        sharing: of its rows, beside that.
    """

    masking: float = 5.3e9
    summing: float = 3e9
    agree_seconds: float = 0.17e-3
    rebuild_seconds: float = 1.3e-3
    decoding: float = 0.45e9
    position_seconds: float = 70e-9
    rows: float = 4e9
    share_seconds: float = 3e-3
    key_seconds: float = 4.5e-6
    sharing: float = 0.33e9
