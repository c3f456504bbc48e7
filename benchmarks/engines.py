"""Rounds on Ray and on Flower: beside one process, Flower's simulation, and Flower's own latency.

The job is a round of EMNIST's 2NN on synthetic writers with 18 to 180 images, an epoch each:
clients choose m of 200 neurons, the server selects their slices, they train, updates are added up,
the record is written. All of that is in the time of a round; starting engines, making data and
compiling are not. Medians of nine rounds after two. CPU time is that of this process and all below
it: Ray's processes count. Idle clients send their slices back as they are.

* ray: the round in one process on one core, and on Ray with 2 workers, in turns. The rate for each
  worker is clients a second over 2; it is compared with that of the one process. What Ray adds to a
  client is the difference of the two rounds over their clients.
* simulation: the same round on Ray, and with Flower's simulation on the same version of Ray with as
  many workers. Only where clients train differs.
* deployment: SuperLink, 3 SuperNodes and the slice service as processes. Our rounds beside rounds
  in which nodes reply at once. Not with --quick: it takes minutes.

Wall times need a quiet machine of two cores. Needs Ray; without Flower its parts are left out.

    python benchmarks/engines.py --check
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Threads of BLAS that spin after a product would be charged to the next measurement.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from engine_cells.crowd import Crowd
from engine_cells.on_ray import measure_on_ray
from engine_cells.simulations import measure_simulations
from harness import left_out, parser, run_steps

RESULTS = Path(__file__).parent / "results" / "engines.json"
ROUNDS = 9
DEPLOYED_ROUNDS = 5  # of each turn
NODES = 3
ON_RAY = (Crowd(1000, 50, is_idle=True), Crowd(1000, 50))
SIMULATED = (Crowd(50, 100), Crowd(200, 100, is_idle=True))


def steps(is_quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured, one after the other."""
    rounds = 2 if is_quick else ROUNDS
    for crowd in (Crowd(100, 50),) if is_quick else ON_RAY:
        yield f"on Ray, {crowd}", lambda c=crowd: measure_on_ray(c, rounds)
    for crowd in (Crowd(20, 50),) if is_quick else SIMULATED:
        name = f"against Flower's simulation, {crowd}"
        yield name, lambda c=crowd: measure_simulations(c, rounds, is_full=not is_quick)
    if importlib.util.find_spec("flwr") is None:
        left_out("Flower, which is not installed", "pip install 'keyhole[flower]'")
    elif not is_quick:
        from engine_cells.deployments import measure_deployment

        yield "deployment of Flower", lambda: measure_deployment(NODES, DEPLOYED_ROUNDS)


def main() -> int:
    flags = parser((__doc__ or "").splitlines()[0], RESULTS).parse_args()
    return run_steps(flags, "engines", steps(flags.quick))


if __name__ == "__main__":
    sys.exit(main())
