"""keyhole: federated select. Clients receive, train and return only the slices they name.

The primitives of the paper are here and need NumPy alone. So are the names that a run is made of;
most need numba or JAX, which come with an extra, and are loaded when they are first asked for. The
rest is imported from its module: `docs/architecture.md` draws the tree.
"""

import importlib
import typing

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
from keyhole.primitives.report import Report
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

if typing.TYPE_CHECKING:
    from keyhole import data as data
    from keyhole import jax as jax
    from keyhole import keys as keys
    from keyhole import torch as torch
    from keyhole import trackers as trackers
    from keyhole.aggregation.base import Aggregation
    from keyhole.experiments.experiment import Experiment
    from keyhole.front.compare import Comparison, compare
    from keyhole.front.devices import Devices
    from keyhole.front.run import TrainedRun
    from keyhole.front.task import Task
    from keyhole.front.train import open_run, train
    from keyhole.keys.choice import Choice
    from keyhole.models.client_update import ClientUpdate
    from keyhole.models.model import Model
    from keyhole.rounds.clients import Clients, TrainContext
    from keyhole.rounds.loop import Evaluation, Run, resume_run, start_run
    from keyhole.rounds.machine import Buffering
    from keyhole.rounds.spec import RunParts
    from keyhole.sampling import Cohorts
    from keyhole.server.optimizers import SGD, Adagrad, Adam, Optimizer
    from keyhole.server.state import ServerState

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Aggregation",
    "Buckets",
    "Buffering",
    "Choice",
    "ClientUpdate",
    "ClientValue",
    "Clients",
    "Cohorts",
    "Comparison",
    "Cut",
    "Devices",
    "Evaluation",
    "Experiment",
    "HalfPrecision",
    "KeySpace",
    "KeyholeError",
    "Keys",
    "Layout",
    "Model",
    "Optimizer",
    "Product",
    "Quantized",
    "Report",
    "Run",
    "RunParts",
    "Sequences",
    "ServerState",
    "ServerValue",
    "Task",
    "TrainContext",
    "TrainedRun",
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
    "compare",
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
    "open_run",
    "resume_run",
    "select",
    "select_buckets",
    "shared_as_key",
    "start_run",
    "train",
    "with_shared_key",
]

_ON_DEMAND = {  # module -> names that it is loaded for
    "aggregation.base": "Aggregation",
    "experiments.experiment": "Experiment",
    "front.compare": "Comparison compare",
    "front.devices": "Devices",
    "front.run": "TrainedRun",
    "front.task": "Task",
    "front.train": "open_run train",
    "keys.choice": "Choice",
    "models.model": "Model",
    "models.client_update": "ClientUpdate",
    "rounds.clients": "Clients TrainContext",
    "rounds.loop": "Evaluation Run resume_run start_run",
    "rounds.machine": "Buffering",
    "rounds.spec": "RunParts",
    "sampling": "Cohorts",
    "server.optimizers": "SGD Adagrad Adam Optimizer",
    "server.state": "ServerState",
}

_MODULES = ("data", "jax", "keys", "torch", "trackers")  # found as attributes: kh.data.from_pandas


def __getattr__(name: str) -> typing.Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("keyhole")
    try:
        if name in _MODULES:
            return importlib.import_module(f"keyhole.{name}")
        for module, names in _ON_DEMAND.items():
            if name in names.split():
                return getattr(importlib.import_module(f"keyhole.{module}"), name)
    except ModuleNotFoundError as error:
        from keyhole.extras import lacking

        raise lacking(error, f"keyhole.{name}") or error from error
    raise AttributeError(f"module 'keyhole' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "__version__"})
