"""Incidents: what the record of a round says of nodes and clients that failed.

A sentence has a count, and a reason without a key. What nodes say of themselves is theirs: it is
cut short, and of errors that keyhole did not write only the kind is told: they may quote data.
"""

from __future__ import annotations

from collections.abc import Mapping

from flwr.app import Error
from flwr.common.constant import ErrorCode

__all__ = ["FAILED", "failure_of", "sentences", "told_by_a_node"]

FAILED = 1000
"""Our code of a Flower error, whose reason begins with the name of an error of ours; Flower's own
codes are below."""

_MOST_TEXT = 200  # characters of a reason
_MOST = 8  # sentences of a round
_CODES = {code: name for name, code in vars(ErrorCode).items() if isinstance(code, int)}


def failure_of(error: Error) -> str:
    """What a node that replied with an error did: the kind of the error alone."""
    if error.code == FAILED:
        return f"failed: {told_by_a_node((error.reason or '').partition(':')[0])}"
    return f"failed: {_CODES.get(error.code, 'UNKNOWN').lower().replace('_', ' ')}"


def told_by_a_node(text: str) -> str:
    """A reason that a node gave, in one short line."""
    return "".join(c if c.isprintable() else " " for c in text[:_MOST_TEXT])


def sentences(found: Mapping[tuple[str, str], int]) -> list[str]:
    """One sentence for each `(who, what)`, with how many; the most frequent ones of many.

    >>> sentences({("node", "did not answer"): 2, ("client", "failed: too cold"): 1})
    ['2 nodes did not answer', '1 client failed: too cold']
    """
    by_count = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    told = [f"{n} {who}{'s' * (n > 1)} {what}" for (who, what), n in by_count[:_MOST]]
    rest = sum(n for _, n in by_count[_MOST:])
    return [*told, *([f"{rest} more of other kinds"] if rest else [])]
