"""Cuts: which axis of which parameter belongs to which key space, declared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.errors import CutError
from keyhole.primitives.keyspace import KeySpace

__all__ = ["Cut", "check_names", "claim_axes"]


@dataclass(frozen=True)
class Cut:
    """Key k of `space` owns index k of the given axis of each named parameter.

    Args:
        space: the key space; its size must be the length of every axis it cuts.
        axes: parameter path -> axis.

    A neuron with its incoming weights, bias and outgoing weights:

    >>> Cut(KeySpace("neuron", 200), {"in/kernel": 1, "in/bias": 0, "out/kernel": 0}).space.name
    'neuron'
    """

    space: KeySpace
    axes: Mapping[str, int]


def check_names(spaces: Sequence[KeySpace]) -> None:
    """Raises CutError where two cuts share a name."""
    names = [space.name for space in spaces]
    if len(set(names)) < len(names):
        raise CutError(
            "two cuts use one key space",
            got=", ".join(names),
            allowed="one cut per key space",
            fix="put all axes that a key owns into one cut",
        )


def claim_axes(leaves: Mapping[str, Any], cuts: Sequence[Cut]) -> dict[str, dict[int, KeySpace]]:
    """Which key space owns which axis of which parameter; refuses what cannot be."""
    claims: dict[str, dict[int, KeySpace]] = {}
    for cut in cuts:
        for path, given in cut.axes.items():
            axis = _axis(leaves, path, given, cut.space)
            owned = claims.setdefault(path, {})
            if axis in owned:
                raise CutError(
                    f"axis {axis} of {path!r} is claimed twice",
                    got=f"key spaces {owned[axis].name!r} and {cut.space.name!r}",
                    allowed="one key space per axis",
                    fix="cut another axis, or join the key spaces into a Product",
                )
            owned[axis] = cut.space
    return claims


def _axis(leaves: Mapping[str, Any], path: str, axis: int, space: KeySpace) -> int:
    """The axis of a parameter, counted from the front, once it is known to fit the key space."""
    if path not in leaves:
        raise CutError(
            f"key space {space.name!r} cuts a parameter that does not exist",
            got=repr(path),
            allowed=", ".join(map(repr, leaves)),
            fix="name a path of the model",
        )
    shape = tuple(leaves[path].shape)
    if not -len(shape) <= axis < len(shape):
        raise CutError(
            f"key space {space.name!r} cuts an axis that {path!r} does not have",
            got=axis,
            allowed=f"0..{len(shape) - 1}" if shape else "none: it is a scalar",
            fix="count axes from 0",
        )
    if shape[axis] != space.num_keys:
        raise CutError(
            f"axis {axis} of {path!r} is not as long as key space {space.name!r}",
            got=shape[axis],
            allowed=space.num_keys,
            fix="store it so that a key is one index of one axis, or resize the key space",
        )
    return axis % len(shape)
