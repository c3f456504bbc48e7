"""How rounds are copied."""

from __future__ import annotations

from dataclasses import dataclass

from keyhole.errors import InputError

__all__ = ["MirrorSettings"]


@dataclass(frozen=True)
class MirrorSettings:
    """How rounds are copied.

    Args:
        keep: how many rounds remain at the target, the current one included.
        workers: files that are copied at the same time.
        is_anew: also copies what seems to be there.
        may_go_back: lets a store's newer round be replaced by an older one.

    Raises:
        InputError: a number is below 1.
    """

    keep: int = 2
    workers: int = 4
    is_anew: bool = False
    may_go_back: bool = False

    def __post_init__(self) -> None:
        if self.keep < 1 or self.workers < 1:
            raise InputError(
                "too few rounds to keep, or workers",
                got=f"keep={self.keep}, workers={self.workers}",
                allowed="1 or more",
                fix="raise the number",
            )
