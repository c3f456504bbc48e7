"""A process that runs rounds on Flower's simulation and prints what one of them takes.

python -m engine_cells.flower_process CLIENTS KEYS_PER_CLIENT IS_IDLE ROUNDS
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict

os.environ.update(
    FLWR_TELEMETRY_ENABLED="0",
    FLWR_DISABLE_UPDATE_CHECK="1",
    RAY_USAGE_STATS_ENABLED="0",
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # loopback alone
)

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from engine_cells.crowd import Crowd
from engine_cells.flower_app import OnGrid, app
from engine_cells.spent import spent_by
from keyhole.arrays import keep_freed_memory

WORKERS = 2
QUIET = {"log_to_driver": False, "logging_level": logging.CRITICAL}


def main() -> None:
    clients, keys_per_client, is_idle, rounds = map(int, sys.argv[1:])
    crowd = Crowd(clients, keys_per_client, bool(is_idle))
    keep_freed_memory()
    run, server = crowd.round(), ServerApp()

    @server.main()
    def measure(grid: Grid, _: Context) -> None:
        execute = OnGrid(grid, crowd)
        spent = spent_by({"flower": lambda: run(execute)}, rounds)["flower"]
        print(json.dumps(asdict(spent)), flush=True)

    init = {"num_cpus": WORKERS, "_node_ip_address": "127.0.0.1", **QUIET}
    resources = {"num_cpus": 1, "num_gpus": 0.0}
    config = {"init_args": init, "client_resources": resources}
    run_simulation(server, app, crowd.clients, backend_config=config)


if __name__ == "__main__":
    main()
