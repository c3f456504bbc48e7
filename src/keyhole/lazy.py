"""Packages whose names are imported when they are first asked for.

A device needs little of a package and starts often: it should not wait for the rest.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

__all__ = ["names_on_demand"]


def names_on_demand(package: str, path: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package.

    Its names are those that its file imports under `if TYPE_CHECKING:`, so that what type checkers
    see and what programs get are the same lines.

    Args:
        package: its `__name__`.
        path: its `__file__`.
    """
    modules = _imports(path)

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # found at once the next time
        return value

    return find


def _imports(path: str) -> dict[str, str]:
    """Name -> module, of the imports in the blocks of a file."""
    blocks = [node for node in ast.parse(Path(path).read_text()).body if isinstance(node, ast.If)]
    return {
        alias.name: str(node.module)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
