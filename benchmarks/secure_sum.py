"""Secure sums against memcpy, against the clear, and against Flower's SecAgg+ functions.

N = 50 clients with m = 1000 uniform keys each, rows of d = 500 elements of 32 bits, 5 clients lost.
All times are CPU times. Every sum is compared with the plain one, for every key.

* masks: a stream drawn and added to a vector of 128 MB. The ratio is the CPU time of memcpy of the
  same bytes over that of one mask.
* sparse: sums at two servers. Bytes are lengths of messages; in the clear they are keys of 4 bytes
  and the rows. A server's time is all that it does for the sum, over the clients in it.
* sketch: sums at one server: invertible Bloom lookup tables under masks.
* dense: a vector of 10^6 entries, masked by a client and unmasked by the server, beside the same
  steps with Flower's functions. Its masks come from seeds of 32 bits, ours from 128.

K = 10^6 takes 2 GB for each of both servers; sketches take 110 MB for each client, one at a time.

    python benchmarks/secure_sum.py --check
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from harness import left_out, parser, run_steps
from sum_cells import flower
from sum_cells.cohort import Cohort
from sum_cells.dense import measure_dense
from sum_cells.mask_speed import measure_masks
from sum_cells.sketches import measure_sketches
from sum_cells.sparse import measure_sparse

RESULTS = Path(__file__).parent / "results" / "secure_sum.json"
COHORT = Cohort(clients=50, lost=5, num_keys=10**5, keys_per_client=1000, width=500)
LARGE = Cohort(clients=50, lost=5, num_keys=10**6, keys_per_client=1000, width=500)
SMALL = Cohort(clients=8, lost=1, num_keys=10**4, keys_per_client=100, width=50)


def steps(is_quick: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured, one after the other."""
    for bits in (32, 16):
        yield f"masks of {bits} bits", lambda b=bits: measure_masks(b, 16 if is_quick else 128)
    cohort = SMALL if is_quick else COHORT
    clients, lost, entries = (10, 1, 10**5) if is_quick else (50, 5, 10**6)
    yield "dense sums", lambda: measure_dense(clients, lost, entries)
    yield f"sparse sums, {cohort}", lambda: measure_sparse(cohort)
    yield f"sketches, {cohort}", lambda: measure_sketches(cohort)
    if not is_quick:
        yield f"sparse sums, {LARGE}", lambda: measure_sparse(LARGE)


def main() -> int:
    flags = parser((__doc__ or "").splitlines()[0], RESULTS).parse_args()
    if not flower.is_installed():
        left_out("Flower, which is not installed", "pip install 'keyhole[flower]'")
    return run_steps(flags, "secure_sum", steps(flags.quick))


if __name__ == "__main__":
    sys.exit(main())
