"""Private select against memcpy, against the clear, and beside published figures.

Slices of 2 KB, K = 10^4 to 10^6 keys, clients that ask for m = 100 or 1000 of them. All times are
CPU times of one thread, medians; contestants take turns.

* scan: all slices and paths of a table, XORed as one query or 32 or 128 in one pass say. The ratio
  is the CPU time of memcpy of the same bytes over that of one query.
* client: whole requests at two servers, from keys to checked slices. Bytes are lengths of messages
  and of the top of the tree; in the clear they are the plain query, the slices and their proof; the
  ratio to slices alone is shown beside. A server's time is that for one client: its share is
  expanded, every bucket and the stash are scanned, the reply is sealed. Queries of 16 clients that
  come within 4 ms are answered in one pass, and one that comes alone waits 5 ms at most.
* ring: whole requests at one server, from keys to checked slices: bytes of query, reply, hint and
  top; the table encoded once a round; a client alone, and eight in one pass. With K = 10^6 the
  encoded table has 24 GB and lies in files of the folder for temporary files.
* sides: what a client's time tells of how many keys it wanted, by CPU times for 5 and for 1,000.
* small: the shape of a published figure. Published figures come from other machines.

K = 10^6 takes 2 GB for the table and 2 GB that it is copied to.

    python benchmarks/private_select.py --check
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from harness import finish, machine_facts, parser, progress
from keyhole.arrays import keep_freed_memory
from private_cells.clients import measure_clients
from private_cells.lattice import measure_lattice
from private_cells.scans import measure_scans
from private_cells.sides import measure_sides
from private_cells.small import measure_small
from private_cells.tables import make_table

SIZES = (10**4, 10**5, 10**6)
KEYS_PER_CLIENT = (100, 1000)
RESULTS = Path(__file__).parent / "results" / "private_select.json"


def measure_size(num_keys: int) -> list[object]:
    """Everything that is measured over one table, which is gone afterwards."""
    progress(f"K={num_keys}: making slices")
    table = make_table(num_keys)
    cells: list[object] = []
    few = KEYS_PER_CLIENT if num_keys < SIZES[-1] else KEYS_PER_CLIENT[-1:]
    # First of all, since the peak of memory is the process's and the others copy the table.
    works = [partial(measure_lattice, table, m) for m in few]
    works += [partial(measure_scans, table)]
    works += [partial(measure_clients, table, m) for m in KEYS_PER_CLIENT]
    for work in works:
        cells.append(work())
        print(cells[-1], flush=True)
    return cells


def main() -> int:
    flags = parser((__doc__ or "").splitlines()[0], RESULTS).parse_args()
    keep_freed_memory()  # as services do
    print(machine_facts())
    cells: list[object] = [measure_small(), *measure_sides()]
    print(*cells, sep="\n", flush=True)
    for num_keys in SIZES[:1] if flags.quick else SIZES:
        cells += measure_size(num_keys)
    goals = [goal for cell in cells for goal in cell.goals()]  # type: ignore[attr-defined]
    for goal in goals:
        print(f"{'met   ' if goal.is_met() else 'MISSED'}  {goal}")
    return finish(flags, "private_select", cells, goals)


if __name__ == "__main__":
    sys.exit(main())
