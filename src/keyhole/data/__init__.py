"""Opens the examples of clients: your own, known files, imported once, or made from a seed."""

from keyhole.data.at_devices import at_devices
from keyhole.data.cache import cache_root
from keyhole.data.federated import Dataset, FederatedData, Ragged, draw_pool, hold_out
from keyhole.data.open import list_datasets, make_synthetic, open_dataset, verify
from keyhole.data.own import from_arrays, from_dict
from keyhole.data.partition import partition, plot_partition
from keyhole.data.tables import from_files, from_huggingface, from_pandas

__all__ = [
    "Dataset",
    "FederatedData",
    "Ragged",
    "at_devices",
    "cache_root",
    "draw_pool",
    "from_arrays",
    "from_dict",
    "from_files",
    "from_huggingface",
    "from_pandas",
    "hold_out",
    "list_datasets",
    "make_synthetic",
    "open_dataset",
    "partition",
    "plot_partition",
    "verify",
]
