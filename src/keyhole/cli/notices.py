"""Notices: what a command that waits tells whoever looks at it, without saying it for ever."""

from __future__ import annotations

import click

__all__ = ["Notices"]


class Notices:
    """Lines on standard error, each kind once until something has changed."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, text: str, kind: str | None = None) -> None:
        """Prints a line, unless one of its kind is there already.

        Args:
            text: the line.
            kind: what it is about, where the text is never twice the same.
        """
        kind = text if kind is None else kind
        if kind not in self._told:
            self._told.add(kind)
            click.echo(text, err=True)

    def forget(self) -> None:
        """Things go on: what happens from now on is news again."""
        self._told.clear()
