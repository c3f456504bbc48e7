"""Tells the Python of a piece of work from what it computes: each runs where it is cheap.

Work is a generator: it yields a function of no arguments for each long computation, is sent what
that returns, and returns its own result. Who runs it may compute in another thread. Compiled code
computes in threads side by side; Python does not: threads that prepare small clients hand it to
each other at every array operation, and a hand-over between cores costs as much as several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias, TypeVar

_T = TypeVar("_T")

Steps: TypeAlias = Generator[Callable[[], Any], Any, _T]
"""Work in steps: yields what is to be computed, is sent what came of it."""


def complete(steps: Steps[_T]) -> _T:
    """Returns the result of work whose computations run here, one after the other.

    >>> def work():
    ...     half = yield lambda: 21
    ...     return 2 * half
    >>> complete(work())
    42
    """
    try:
        compute = next(steps)
        while True:
            try:
                found = compute()
            except BaseException as error:  # noqa: BLE001 - the work decides
                compute = steps.throw(error)
            else:
                compute = steps.send(found)
    except StopIteration as done:
        result: _T = done.value
        return result
