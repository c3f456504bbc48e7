"""Says on standard error how far a command is, also where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.logs import is_for_machines, say, tell

if TYPE_CHECKING:
    from keyhole.service.inbox import Waiting

_PATIENCE = 5.0  # seconds without an update after which a terminal says who is missing
_NAMED = 20  # devices that one line names


def import_shown(source: str | Path) -> Path:
    """Returns the directory of a dataset, imported where it is not, with a bar for each step."""
    from keyhole.data.cache import cache_root, find_source
    from keyhole.data.open import find_current, import_dataset, locate

    if (found := find_current(source, cache_root())) is not None:
        return found
    try:
        from keyhole.cli.bars import progress_bars
    except ModuleNotFoundError:  # rich, which comes with an extra
        return import_dataset(source)
    path = locate(source)
    known = find_source(path)
    with progress_bars() as bars:
        hashing = bars.add_task(f"hash {known.name}", total=None, note="", unit="bytes")
        what = f"import {known.name}"
        reading = bars.add_task(what, total=None, start=False, note="", unit=known.unit)

        def show_hashing(done: int, total: int) -> None:
            bars.update(hashing, completed=done, total=total)
            if done == total:  # the first client may take long, and its time counts
                bars.start_task(reading)

        directory = import_dataset(
            path,
            hashing=show_hashing,
            progress=lambda done, total: bars.update(reading, completed=done, total=total),
        )
        if not bars.tasks[-1].completed:  # bytes that are known already are not read
            bars.update(reading, visible=False)
    return directory


@dataclass(frozen=True)
class Around:
    """What holds around a command, as the object of its context.

    Args:
        logs: open until it has been said how the command ended.
        known: further options that it would take, elsewhere or in another way.
    """

    logs: ExitStack = field(default_factory=ExitStack)
    known: Sequence[str] = ()


class Notices:
    """Lines on standard error for people, each kind once until something has changed; where the
    log is for machines, what it should say in their place."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, kind: str | None = None, *, logged: str = "") -> None:
        """Prints a line, unless one of its kind is there already: the text, unless told. A log for
        machines has `logged` instead, and nothing where it is empty."""
        kind = text if kind is None else kind
        if kind in self._told:
            return
        self._told.add(kind)
        if not is_for_machines():
            say(text)
        elif logged:
            tell("device", "notice", logged, "warning")

    def forget(self) -> None:
        """Things go on: what happens from now on is news again."""
        self._told.clear()


class WaitingNotice:
    """Says on a terminal which devices a round waits for, by name, once it stands still. A log
    names none: `keyhole.service.telling`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last, self._since, self._is_told = (-1, True, -1), 0.0, False

    def __call__(self, waiting: Waiting) -> None:
        """Takes note of what a round waits for."""
        from keyhole.service.status import gathers

        if waiting.measures and not waiting.is_drawn:
            return  # the log tells of it, at once
        if (now := (waiting.round, waiting.is_drawn, waiting.here)) != self._last:
            self._last, self._since, self._is_told = now, self._clock(), False
        is_still = self._clock() - self._since >= _PATIENCE
        if not self._is_told and is_still and not waiting.is_drawn:
            self._is_told = True
            say(gathers(waiting.round, waiting.here, waiting.goal))
        if not self._is_told and is_still and waiting.missing:
            self._is_told = True
            more = len(waiting.missing) - _NAMED
            say(
                f"round {waiting.round}: {waiting.here} of {waiting.goal} updates are here; "
                f"waiting for {', '.join(waiting.missing[:_NAMED])}"
                + (f" and {more} more" if more > 0 else ""),
            )
