"""The rounds of a store: which of them is current, and which are older than that."""

from __future__ import annotations

from collections.abc import Iterable

from keyhole.errors import DamageError, InputError
from keyhole.serving.files.round_files import CURRENT, CurrentRound, decode_current, number_of
from keyhole.serving.mirror.object_store import RoundStore

__all__ = ["oldest_first", "stored_current"]

_MOST_CURRENT = 1 << 16  # bytes


def stored_current(store: RoundStore) -> CurrentRound:
    """Returns the current round of a store.

    Raises:
        NotFoundError: it has none.
        DamageError: its `current.json` is not what was pushed.
    """
    data = store.get(CURRENT, _MOST_CURRENT)
    try:
        return decode_current(data)
    except InputError as error:
        raise DamageError(
            f"{CURRENT} of {store.place} is damaged",
            got=error.got,
            allowed=error.allowed,
            fix="push a round again",
        ) from error


def oldest_first(names: Iterable[str], before: int) -> list[str]:
    """Those names that are of rounds before a number, the oldest first.

    >>> oldest_first(["10-44136fa355b3678a", "9-44136fa355b3678a", ".part-0", "11-0"], before=11)
    ['9-44136fa355b3678a', '10-44136fa355b3678a']
    """
    found = [(number, name) for name in names if (number := number_of(name)) is not None]
    return [name for number, name in sorted(found) if number < before]
