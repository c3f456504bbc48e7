"""Chooses how an inner loop runs: compiled by numba, or as the NumPy that says what it does.

A loop is defined where it is used, in NumPy. A function of the same name in a module of loops gives
the same bytes and is compiled; it runs in processes that have loaded numba, as all do that hold a
table: trainers, services, simulations. A device does not. Loading numba takes a process 0.2 s or
more and some 80 MB, and NumPy has done a device's work by then; without numba there is no choice.
Nor is there for the loops that want AES instructions, on a processor without them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, update_wrapper
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@cache
def has_compiler() -> bool:
    """Returns whether numba is installed."""
    return find_spec("numba") is not None


@cache
def processor() -> frozenset[str]:
    """Returns the features of the processor that numba compiles for, as LLVM names them; none
    without numba."""
    if not has_compiler():
        return frozenset()
    context = import_module("numba.core.registry").cpu_target.target_context
    named = context.codegen().magic_tuple()[2]  # by which numba tells apart what it has cached
    return frozenset(each[1:] for each in named.split(",") if each.startswith("+"))


def has_aes() -> bool:
    """Returns whether compiled loops can use AES instructions: those of x86 processors."""
    return {"aes", "sse2"} <= processor()


def load_compiler() -> None:
    """Loads numba, where it is installed, so that loops run compiled from now on: for those who
    hold a table."""
    if has_compiler():
        import_module("numba")


class Loop(Generic[P, R]):
    """A loop in two forms; calling it runs one of them.

    Args:
        plain: what defines it, in NumPy.
        module: where its compiled form stands, under the same name.
        from_bytes: of arrays in one call from which on it loads numba by itself, where that is
            installed; then numba in the process is no reason to compile. None never loads it.
        can: whether it can be compiled here.
    """

    def __init__(
        self,
        plain: Callable[P, R],
        module: str,
        from_bytes: int | None,
        can: Callable[[], bool] = has_compiler,
    ) -> None:
        update_wrapper(self, plain)
        self.plain = plain
        self.module = module
        self.from_bytes = from_bytes
        self.can = can
        self._chosen: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs the loop."""
        if self._chosen is None and self._is_due(args):
            self.load()
        return (self._chosen or self.plain)(*args, **kwargs)

    @property
    def is_compiled(self) -> bool:
        """Whether it has run compiled in this process, and will from now on."""
        return self._chosen is not None

    def load(self) -> None:
        """Runs compiled from now on, where numba is installed: for those who know that the work is
        worth it."""
        if self.can():
            self._chosen = self.compiled

    @property
    def compiled(self) -> Callable[P, R]:
        """The compiled form, which needs numba."""
        found: Callable[P, R] = getattr(import_module(self.module), self.plain.__name__)
        return found

    def _is_due(self, args: tuple[Any, ...]) -> bool:
        if self.from_bytes is None:
            return sys.modules.get("numba") is not None  # and not blocked
        return sum(getattr(each, "nbytes", 0) for each in args) >= self.from_bytes


def loop(
    module: str, from_bytes: int | None = None, can: Callable[[], bool] = has_compiler
) -> Callable[[Callable[P, R]], Loop[P, R]]:
    """Returns a decorator that makes a loop of what defines it; see `Loop`."""

    def make(plain: Callable[P, R]) -> Loop[P, R]:
        return Loop(plain, module, from_bytes, can)

    return make
