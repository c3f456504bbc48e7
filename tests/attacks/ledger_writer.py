"""Notes sums in a ledger until it is killed; run as a script: LEDGER FIRST [CUT].

Prints each name once the entry is acknowledged, before the next one is begun. With CUT, it kills
itself once so many bytes of the first entry are in the file.
"""

import os
import signal
import sys
from pathlib import Path

from keyhole.aggregation.privacy.ledger import Charge, Ledger


def main(path, first, cut=None):
    ledger = Ledger(Path(path))
    if cut is not None:
        die_after(int(cut))
    for number in range(int(first), 1_000_000):
        devices = tuple(f"device-{n}" for n in range(number % 50))
        ledger.charge(Charge(f"sum-{number}", "population", 1.0 + number % 7, devices))
        print(number, flush=True)


def die_after(cut):
    real = os.writev

    def torn(descriptor, buffers):
        real(descriptor, [bytes(buffers[0])[:cut]])
        os.kill(os.getpid(), signal.SIGKILL)

    os.writev = torn


if __name__ == "__main__":
    main(*sys.argv[1:])
