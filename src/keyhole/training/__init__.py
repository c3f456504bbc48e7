"""Algorithms 1 and 2 of the paper, and the simulator that runs them.

What needs JAX has to be asked for: `keyhole.training.local_sgd` and `keyhole.training.cores`.
"""

from typing import TYPE_CHECKING

from keyhole.lazy import names_on_demand

if TYPE_CHECKING:
    from keyhole.training.algorithms import train, train_with_select
    from keyhole.training.buffering import Buffering
    from keyhole.training.client_update import ClientUpdate
    from keyhole.training.clients import Clients
    from keyhole.training.cohort import Cohorts
    from keyhole.training.loop import Evaluation, Run, resume_run, start_run, stop_on_signals
    from keyhole.training.named import algorithm_named
    from keyhole.training.plan import Plan
    from keyhole.training.randomness import generator
    from keyhole.training.record import RoundRecord, read_records
    from keyhole.training.tensorboard import write_tensorboard
    from keyhole.training.workers import Workers

__all__ = [
    "Buffering",
    "ClientUpdate",
    "Clients",
    "Cohorts",
    "Evaluation",
    "Plan",
    "RoundRecord",
    "Run",
    "Workers",
    "algorithm_named",
    "generator",
    "read_records",
    "resume_run",
    "start_run",
    "stop_on_signals",
    "train",
    "train_with_select",
    "write_tensorboard",
]

__getattr__ = names_on_demand(__name__, __file__)
