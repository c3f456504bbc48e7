"""What the server holds and does at memory speed: rows by key, sub-models, state that survives."""

from typing import TYPE_CHECKING

from keyhole.lazy import names_on_demand

if TYPE_CHECKING:
    from keyhole.server.initial import Normal, Uniform, Zeros
    from keyhole.server.optimizers import SGD, Adagrad, Adam, Momentum, Yogi
    from keyhole.server.rows import gather_rows, scatter_add_rows, sum_rows
    from keyhole.server.state import ServerState
    from keyhole.server.store import create_store, recover
    from keyhole.server.submodels import (
        deselect_submodels_mean,
        deselect_submodels_mean_per_key,
        deselect_submodels_sum,
        select_submodels,
    )
    from keyhole.server.updates import RowUpdate

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Momentum",
    "Normal",
    "RowUpdate",
    "ServerState",
    "Uniform",
    "Yogi",
    "Zeros",
    "create_store",
    "deselect_submodels_mean",
    "deselect_submodels_mean_per_key",
    "deselect_submodels_sum",
    "gather_rows",
    "recover",
    "scatter_add_rows",
    "select_submodels",
    "sum_rows",
]

__getattr__ = names_on_demand(__name__, __file__)
