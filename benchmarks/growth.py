"""How CPU time and memory grow with clients, keys of a client, keys of the model and slice widths.

* a round in this process, all of it but training: over the population (N = 10 to 10^5 of whom 10
  take part) and the cohort (N = 10 to 10^5 clients, all of whom take part), m = 10 to 10^4 keys a
  client, K = 10^4 to 10^9 keys of the model, of which the touched ones are held, and slices of 4
  bytes to 64 KB.
* a fetch and an update at `keyhole serve`, and adding an update at the trainer: over m and widths.
* a fetch from a service that computes slices on demand, over K = 10^4 to 10^9.

Costs are to follow what is selected: flat over the population and K, linear at most over the
cohort, m and widths. Slopes are exponents: 1 is linear. Memory is what the first rounds add to a
process of their own, and all that a service holds beside its files.

--write has the planner compute with what was found: it writes `src/keyhole/measured.json`, after
`keyhole plan --calibrate` three times.

    python benchmarks/growth.py --check
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

# Threads of BLAS that spin after a product would be charged to the next measurement.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from growth_cells.places import Line, Place
from growth_cells.rounds import measure_rounds
from growth_cells.service import measure_adding, measure_on_demand, measure_published
from growth_cells.speeds import measure_handshake, planner_goals, write_speeds
from harness import finish, machine_facts, parser, progress
from keyhole.arrays import keep_freed_memory

RESULTS = Path(__file__).parent / "results" / "growth.json"
ROUND = Place(population=50, cohort=50, keys_per_client=100, num_keys=10**6, slice_bytes=256)
FEW = replace(ROUND, population=10, cohort=10)
SERVED = replace(ROUND, num_keys=10**5)
SMALL = replace(ROUND, num_keys=2_000)  # so that a table of the widest slices is 128 MB


def along(axis: str, values: Sequence[int], base: Place) -> tuple[str, list[Place]]:
    """An axis, and places that differ in it."""
    return axis, [replace(base, **{axis: value}) for value in values]


def measure_all(is_quick: bool) -> Iterator[Line]:
    """One axis after the other."""
    most = 10**3 if is_quick else 10**5
    counts = tuple(n for n in (10, 100, 1_000, 10_000, 100_000) if n <= most)
    keys = (10, 100, 1_000) if is_quick else (10, 100, 1_000, 10_000)
    sizes = (10**4, 10**9) if is_quick else (10**4, 10**6, 10**8, 10**9)
    widths = (4, 1_024, 65_536) if is_quick else (4, 64, 1_024, 16_384, 65_536)
    crowd = replace(ROUND, population=most, keys_per_client=10, slice_bytes=64)
    axes = (
        along("population", counts, replace(FEW, keys_per_client=1_000)),
        along("cohort", counts, crowd),
        along("keys_per_client", keys, ROUND),
        along("num_keys", sizes, replace(ROUND, keys_per_client=1_000)),
        along("slice_bytes", widths, FEW),
    )
    progress("rounds, over each axis")
    yield from measure_rounds(axes)
    progress("requests over keys of a client")
    yield from measure_published(*along("keys_per_client", keys, SERVED))
    progress("requests over widths")
    yield from measure_published(*along("slice_bytes", widths, SMALL))
    progress("updates of a round")
    crowds = (64, 512, 4_096)
    yield measure_adding(*along("cohort", crowds[: 2 if is_quick else 3], ROUND))
    progress("slices on demand over keys of the model")
    yield measure_on_demand(*along("num_keys", sizes, ROUND))


def main() -> int:
    keep_freed_memory()  # as the command line does
    flags = parser((__doc__ or "").splitlines()[0], RESULTS)
    flags.add_argument("--write", action="store_true", help="write the planner's speeds")
    asked = flags.parse_args()
    print(machine_facts())
    lines = []
    for line in measure_all(asked.quick):
        print(line, flush=True)
        lines.append(line)
    progress("handshakes")
    handshake = measure_handshake()
    print(handshake)
    if asked.write:
        write_speeds(lines, handshake)
    goals = [goal for line in lines for goal in line.goals()]
    goals += [*planner_goals(lines), *handshake.goals()]
    for goal in goals:
        print(f"{'met   ' if goal.is_met() else 'MISSED'}  {goal}")
    return finish(asked, "growth", [*lines, handshake], goals)


if __name__ == "__main__":
    sys.exit(main())
