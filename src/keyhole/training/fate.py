"""Fates: how a client's part in a round ends."""

from __future__ import annotations

from typing import Literal, TypeAlias

__all__ = ["Fate"]

Fate: TypeAlias = Literal["sent", "lost_before", "lost_after", "late", "refused"]
"""Only what was sent is added up. A client is lost before its slices arrive, or after; it answers
late; or its update is refused."""
