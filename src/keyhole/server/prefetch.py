"""Fetching rows into the cache before they are due.

Touched rows lie far apart, and catching one up takes longer than the processor looks ahead, so a
kernel that waits for each row spends most of its time waiting. The compiler has no word for this.
"""

# Kernels are typed by numba when they are first called.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

__all__ = ["AHEAD", "LINE", "emit_fetch", "fetch_row"]

AHEAD = 8  # rows; 4 to 16 measured alike
LINE = 64  # bytes in a cache line


def emit_fetch(builder: Any, address: Any, *, for_writing: bool) -> None:
    """Emits a request for the line at an address, into all caches; never faults."""
    pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    at = builder.inttoptr(address, pointer)
    builder.call(fetch, [at, number(int(for_writing)), number(3), number(1)])


def _type_fetch(_: Any, address: Any) -> Any:
    """Asks for the line at an address."""

    def emit(_: Any, builder: Any, __: Any, args: Any) -> Any:
        emit_fetch(builder, args[0], for_writing=True)
        return ir.Constant(ir.IntType(8).as_pointer(), None)

    return types.void(types.int64), emit


_fetch: Any = intrinsic(_type_fetch)


@njit(cache=True, nogil=True, inline="always")
def fetch_row(rows, slot):
    """Fetches row `slot` of an array, for writing; a slot outside it is harmless."""
    size = rows.strides[0]
    first = rows.ctypes.data + slot * size
    for at in range(0, size, LINE):
        _fetch(first + at)
    _fetch(first + size - 1)  # a row rarely begins where a line does
