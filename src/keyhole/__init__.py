"""keyhole: federated select. Clients receive, train and return only the slices they name.

The names here are the primitives of the paper and need NumPy alone. What builds on them:
`keyhole.server` (the same at memory speed), `keyhole.models` (JAX), `keyhole.rounds` (Algorithms
1 and 2).
"""

from keyhole.errors import KeyholeError
from keyhole.primitives.coding import HalfPrecision, Quantized, decode
from keyhole.primitives.deselect import (
    aggregate,
    aggregate_mean,
    aggregate_median,
    aggregate_sum,
    aggregate_trimmed_mean,
    aggregate_weighted_mean,
    deselect,
    deselect_mean,
    deselect_mean_per_key,
    deselect_sum,
)
from keyhole.primitives.keyspace import Buckets, Keys, KeySpace, Product, Sequences
from keyhole.primitives.layout import Cut, Layout
from keyhole.primitives.placement import (
    ClientValue,
    ServerValue,
    at_clients,
    at_server,
    map_clients,
)
from keyhole.primitives.select import (
    broadcast,
    broadcast_as_select,
    fuse_broadcast,
    fuse_selects,
    generalized_select,
    many_as_one,
    select,
    select_buckets,
    shared_as_key,
    with_shared_key,
)

__all__ = [
    "Buckets",
    "ClientValue",
    "Cut",
    "HalfPrecision",
    "KeySpace",
    "KeyholeError",
    "Keys",
    "Layout",
    "Product",
    "Quantized",
    "Sequences",
    "ServerValue",
    "aggregate",
    "aggregate_mean",
    "aggregate_median",
    "aggregate_sum",
    "aggregate_trimmed_mean",
    "aggregate_weighted_mean",
    "at_clients",
    "at_server",
    "broadcast",
    "broadcast_as_select",
    "decode",
    "deselect",
    "deselect_mean",
    "deselect_mean_per_key",
    "deselect_sum",
    "fuse_broadcast",
    "fuse_selects",
    "generalized_select",
    "many_as_one",
    "map_clients",
    "select",
    "select_buckets",
    "shared_as_key",
    "with_shared_key",
]
