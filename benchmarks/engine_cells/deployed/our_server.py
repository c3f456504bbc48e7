"""A ServerApp of keyhole that writes how long rounds take, from publication to step."""

from __future__ import annotations

import json
import time
from pathlib import Path

from flwr.app import Context

from engine_cells.deployed.table import make_clients, make_plan, make_state
from keyhole.engines.flower.run_config import RoundsConfig
from keyhole.engines.flower.server_app import make_server_app
from keyhole.serving.served import Served
from keyhole.training.loop import start_run


def train(rounds: Served, config: RoundsConfig, context: Context) -> None:
    told = context.run_config
    plan = make_plan(told["least-nodes"])
    run = start_run(make_state(), make_clients(), plan, config.run, rounds)
    seconds, began = [], time.perf_counter()
    for record in run.rounds(told["rounds"]):
        seconds.append(time.perf_counter() - began)
        if len(record.staleness) != told["least-nodes"]:
            raise RuntimeError("an update did not come")
        began = time.perf_counter()
    run.close()
    written = Path(told["results"])
    written.with_suffix(".tmp").write_text(json.dumps(seconds))
    written.with_suffix(".tmp").rename(written)


app = make_server_app(train)
