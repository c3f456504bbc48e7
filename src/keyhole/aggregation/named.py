"""Ways to add updates up, by their names."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from keyhole.aggregation.base import Aggregation, Rounding
from keyhole.aggregation.masked.method import DenseForm, SecureSum, SketchForm
from keyhole.aggregation.plain import dense_at_client, plain
from keyhole.aggregation.two_servers.method import TwoServers
from keyhole.errors import InputError

AggregationName: TypeAlias = Literal[
    "plain", "dense", "secure-dense", "secure-sketch", "secure-sparse"
]
"""How updates are added up: in the clear, sparse or dense; by one server that sees sums alone,
dense or as a sketch; by two servers that see nothing."""

AGGREGATIONS: tuple[AggregationName, ...] = get_args(AggregationName)

SIGNED: tuple[AggregationName, ...] = ("secure-dense", "secure-sketch")
"""Those in which clients can sign which of them are left."""


def aggregation_named(
    name: str, rounding: Rounding | None = None, *, signed: bool = False
) -> Aggregation:
    """Returns a way to add updates up.

    Args:
        name: of `AGGREGATIONS`.
        rounding: of secure sums.
        signed: of secure sums with one server: clients sign which of them are left.

    Raises:
        InputError: there is no such way, or nothing in it to sign.
    """
    rounding = rounding or Rounding()
    ways: dict[str, Aggregation] = {
        "plain": plain,
        "dense": dense_at_client,
        "secure-dense": SecureSum(DenseForm(), rounding, signed),
        "secure-sketch": SecureSum(SketchForm(), rounding, signed),
        "secure-sparse": TwoServers(rounding),
    }
    if name not in ways:
        raise InputError(
            "no such way to add updates up",
            got=name,
            allowed=", ".join(AGGREGATIONS),
            fix="choose one of them",
        )
    if signed and name not in SIGNED:
        raise InputError(
            "a sum in which clients sign nothing",
            got=f"signed with {name}",
            allowed=", ".join(SIGNED),
            fix="leave it out: only masked sums with one server have lists to sign",
        )
    return ways[name]
