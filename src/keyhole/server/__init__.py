"""What the server holds and does at memory speed: rows by key, and sub-models made of them."""

from keyhole.server.rows import gather_rows, scatter_add_rows, sum_rows
from keyhole.server.submodels import (
    deselect_submodels_mean,
    deselect_submodels_mean_per_key,
    deselect_submodels_sum,
    select_submodels,
)

__all__ = [
    "deselect_submodels_mean",
    "deselect_submodels_mean_per_key",
    "deselect_submodels_sum",
    "gather_rows",
    "scatter_add_rows",
    "select_submodels",
    "sum_rows",
]
