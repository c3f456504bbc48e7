"""A ServerApp of keyhole that writes how long rounds take, from publication to step."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Context

import keyhole as kh
from engine_cells.deployed.devices import KEYS, POPULATION, ROW, WIDTH, make_clients
from keyhole.engines.flower.config import RoundsConfig
from keyhole.engines.flower.server_app import make_server_app
from keyhole.rounds.loop import start_run
from keyhole.rounds.spec import RunParts
from keyhole.sampling import Cohorts
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.served import Served


def train(rounds: Served, config: RoundsConfig, context: Context) -> None:
    told = context.run_config
    plan = RunParts(Cohorts(POPULATION, told["min-nodes"]), {"row": KEYS})
    run = start_run(_make_state(), make_clients(), plan, config.run, rounds)
    seconds, began = [], time.perf_counter()
    for record in run.rounds(told["rounds"]):
        seconds.append(time.perf_counter() - began)
        if len(record.staleness) != told["min-nodes"]:
            raise RuntimeError("an update did not come")
        began = time.perf_counter()
    run.close()
    written = Path(told["results"])
    written.with_suffix(".tmp").write_text(json.dumps(seconds))
    written.with_suffix(".tmp").rename(written)


def _make_state() -> ServerState:
    value = {"table": np.zeros((ROW.num_keys, WIDTH), np.float32)}
    return ServerState.dense(kh.Layout.of(value, kh.Cut(ROW, {"table": 0})), value, SGD(1.0))


app = make_server_app(train)
