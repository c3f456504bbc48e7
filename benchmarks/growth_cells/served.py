"""A slice service over a table of K keys that holds the touched rows only: slices on demand.

python served.py PORT K WIDTH
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from keyhole.delivery.sources import sources_of
from keyhole.primitives.keyspace import KeySpace
from keyhole.primitives.layout import Cut, Layout
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD
from keyhole.server.state import ServerState
from keyhole.service.app import App
from keyhole.service.metrics import Metrics
from keyhole.service.on_demand import OnDemandRounds
from keyhole.service.transport import Listen, run

MAX_BYTES = 64 << 20  # of slices that are kept


def main(port: str, num_keys: str, width: str) -> None:
    def make(metrics: Metrics) -> App:
        count = int(num_keys)
        like = {"w": np.broadcast_to(np.float32(0), (count, int(width)))}
        layout = Layout.of(like, Cut(KeySpace("row", count), {"w": 0}))
        state = ServerState.lazy(layout, SGD(0.1), {"w": Normal(1)})
        rounds = OnDemandRounds(max_bytes=MAX_BYTES, executor=ThreadPoolExecutor(1))
        rounds.publish(sources_of(state), layout, number=0)
        return App(rounds, metrics=metrics)

    run(make, Listen(port=int(port)))


if __name__ == "__main__":
    main(*sys.argv[1:])
