"""Demand: the keys that a cohort asks for, counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from keyhole.delivery.records import Records
from keyhole.primitives.keyspace import Keys
from keyhole.primitives.layout import Layout
from keyhole.primitives.parts import Part
from keyhole.primitives.placement import ClientValue, observe
from keyhole.types import ClientId

__all__ = [
    "Demand",
    "bytes_of_keys",
    "count_asked",
    "count_distinct",
    "cut_parts",
    "demand_of",
    "key_bytes",
    "model_bytes",
]

_KEY_BYTES = 8  # an int64 on the wire

Demand: TypeAlias = Mapping[ClientId, Mapping[str, Keys]]
"""Each client's keys by the name of their key space."""


def key_bytes(keys: Iterable[Keys]) -> int:
    """The bytes that name keys on the wire; none where a client takes every key of a space."""
    return sum(bytes_of_keys(len(z), z.space.num_keys) for z in keys)


def bytes_of_keys(count: int, num_keys: int) -> int:
    """The same for so many keys of a key space of that size."""
    return _KEY_BYTES * count if count < num_keys else 0


def demand_of(layout: Layout, keys: ClientValue[Any]) -> Demand:
    """Each client's keys by the name of their key space."""
    return {client: layout.keys_by_space(z) for client, z in observe(keys).items()}


def model_bytes(layout: Layout, tables: Sequence[Records], counts: Mapping[str, int]) -> int:
    """The bytes of a sub-model with so many keys of each key space; `tables` are of each part."""
    return sum(
        records.record_bytes * prod(counts[factor.name] for factor in part.product.factors)
        for part, records in zip(layout.parts, tables, strict=True)
    )


def count_asked(layout: Layout, demand: Demand) -> int:
    """How many slices of the cut parts the cohort asked for."""
    return sum(
        prod(len(z[factor.name]) for factor in part.product.factors)
        for part in cut_parts(layout)
        for z in demand.values()
    )


def count_distinct(layout: Layout, demand: Demand) -> int:
    """How many different slices those are."""
    total = 0
    for part in cut_parts(layout):
        asked = [part.keys_of(z).array for z in demand.values()]
        total += len(np.unique(np.concatenate(asked))) if asked else 0
    return total


def cut_parts(layout: Layout) -> list[Part]:
    """The parts that some key space cuts; what is left is sent to everyone."""
    return [part for part in layout.parts if part.product.factors]
