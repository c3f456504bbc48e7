"""Workers: the files of a round are copied in several threads, which end together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from keyhole.serving.mirror.meter import Meter

__all__ = ["work_through"]

_Item = TypeVar("_Item")


def work_through(
    work: Callable[[_Item], None], items: Iterable[_Item], workers: int, meter: Meter
) -> None:
    """Does the work for all items in several threads; the first error ends all of them."""
    failed: list[BaseException] = []

    def attempt(item: _Item) -> None:
        try:
            meter.check()
            work(item)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failed.append(error)
            meter.stop()

    with ThreadPoolExecutor(workers, "keyhole-mirror") as pool:
        try:
            list(pool.map(attempt, items))
        except BaseException:  # an interrupt of this thread
            meter.stop()
            raise
    if failed:
        raise failed[0]
