"""Slices over HTTP beside nginx, Redis, a bare event loop and memcpy: work per CPU-second.

Slices of 2 KB, K = 10^4 to 10^6 keys, clients that ask for m = 100 or 1000 of them at once. All
servers run on loopback and share one core; the load comes from the other. What counts is the CPU
time of a server with all its processes, user and system, for each client it answers; contestants
take turns, and medians of five are compared.

* keyhole: the service over published files; every client sends its keys and gets one answer, with
  the proof that it belongs to the round.
* no proofs: the same service, for queries that want none. Proofs are held to a price at K = 10^5
  and m = 1000, in bytes and in CPU time.
* bare loop: uvloop, a protocol of thirty lines and `numpy.take`. No routes, limits or checks.
* nginx files: files that hold as many slices as a client asks for: the bytes, without a choice.
* nginx ranges: the packed table, one range for each key in one request.
* nginx per slice: a file and a GET for each slice, without waiting in between. With more than 10^4
  keys the first 10^4 have files: nginx cannot keep more open here.
* Redis MGET: a value for each slice.

Publishing is compared with memcpy of the same bytes, by wall time: two threads share the work, and
what the disk takes is no CPU time. By CPU time it is compared with publishing without trees, with
the 64-bit sums that were there before them and without. Slices on demand are compared with
computing them for every request, and a herd of 5000 devices with nginx. nginx and Redis come from
Debian packages (`apt install nginx redis-server`); what is missing is left out. Needs Linux, two
cores, and for K = 10^6 10 GB of memory and of disk. --quick takes K = 10^5 alone.

    python benchmarks/slices.py --check
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.pool import Pool
from pathlib import Path

# Threads of BLAS that spin after a product would be charged to the next measurement.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from harness import finish, left_out, machine_facts, parser
from slice_peers import gather, generation, herd, nginx, redis, stampede
from slice_peers.contest import SECONDS, load_process
from slice_peers.published import make_state, publish

SIZES = (10**4, 10**5, 10**6)
HERD_SIZE = 10**5
GENERATED = (10**5, 10**6)
RESULTS = Path(__file__).parent / "results" / "slices.json"


def measure_size(pool: Pool, num_keys: int, with_herd: bool, seconds: float) -> list[object]:
    """Everything that is measured over one table, which is gone afterwards."""
    cells: list[object] = []
    with tempfile.TemporaryDirectory(prefix="slices-") as made:
        root = Path(made)
        published = publish(make_state(num_keys), root / "rounds")
        with gather.servers(published, root) as running:
            for cell in gather.measure(pool, published, root, running, seconds):
                show_gather(cell)
                cells.append(cell)
            if with_herd:
                cells += [gather.measure_small(published, running)]
                cells += [herd.measure(pool, published, running)]
                print(*cells[-2:], sep="\n")
    return cells


def measure_generations(sizes: Sequence[int]) -> list[generation.Cell]:
    cells = []
    for num_keys in sizes:
        with tempfile.TemporaryDirectory(prefix="slices-") as made:
            cell = generation.measure_generation(num_keys, Path(made))
        show_generation(cell)
        cells.append(cell)
    return cells


def show_gather(cell: gather.Cell) -> None:
    for name, score in cell.scores.items():
        megabytes = score.per_cpu_second * cell.keys_per_client * gather.RECORD / 1e6
        print(
            f"{cell.num_keys:8.0e} {cell.keys_per_client:5} {name:16}"
            f" {score.per_cpu_second:10.0f} {megabytes:8.0f} {score.per_second:10.0f}"
            f" {cell.ratio(name):8.2f}"
        )
    over = cell.over_ideal("keyhole")
    print(f"{cell.num_keys:8.0e} {cell.keys_per_client:5} bytes with proofs over slices {over:.3f}")


def show_generation(cell: generation.Cell) -> None:
    gigabytes = cell.num_keys * gather.RECORD / 1e9
    print(
        f"publishing K={cell.num_keys:.0e}, GB/s: {gigabytes / cell.steady:.2f}"
        f" ({gigabytes / cell.steady_cpu:.2f} for a CPU-second), first round"
        f" {gigabytes / cell.first:.2f}, durable {gigabytes / cell.durable:.2f},"
        f" memcpy {gigabytes / cell.copy:.2f}; without trees {gigabytes / cell.treeless:.2f}"
        f" ({gigabytes / cell.treeless_cpu:.2f} for a CPU-second, with 64-bit sums"
        f" {gigabytes / cell.summed_cpu:.2f}), durable"
        f" {gigabytes / cell.treeless_durable:.2f}"
    )


def main() -> int:
    flags = parser(__doc__.splitlines()[0], RESULTS).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # leaves no servers and no files
    print(machine_facts())
    for peer, name in ((nginx, "nginx"), (redis, "Redis")):
        if not peer.find():
            left_out(f"{name}, which is not installed", peer.INSTALL)
    sizes = (gather.PROVED[0],) if flags.quick else SIZES
    cells: list[object] = []
    cells += measure_generations(GENERATED[:1] if flags.quick else GENERATED)
    with load_process() as pool, tempfile.TemporaryDirectory(prefix="slices-") as made:
        cell = stampede.measure(pool, Path(made), 1 if flags.quick else 5)
        print(cell)
        cells.append(cell)
        print("       K     m contestant       clients/cpu-s MB/cpu-s  clients/s  keyhole/it")
        for num_keys in sizes:
            with_herd = num_keys == min(HERD_SIZE, sizes[-1])
            cells += measure_size(pool, num_keys, with_herd, 0.25 if flags.quick else SECONDS)
    goals = [goal for cell in cells for goal in cell.goals()]  # type: ignore[attr-defined]
    for goal in goals:
        print(f"{'met   ' if goal.is_met() else 'MISSED'}  {goal}")
    return finish(flags, "slices", cells, goals)


if __name__ == "__main__":
    sys.exit(main())
