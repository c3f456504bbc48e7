"""Opens the examples of clients: known files, imported once, or data made from a seed."""

from keyhole.data.cache import cache_root
from keyhole.data.federated import Dataset, FederatedData, Ragged, draw_pool, hold_out
from keyhole.data.open import list_datasets, make_synthetic, open_dataset, verify

__all__ = [
    "Dataset",
    "FederatedData",
    "Ragged",
    "cache_root",
    "draw_pool",
    "hold_out",
    "list_datasets",
    "make_synthetic",
    "open_dataset",
    "verify",
]
