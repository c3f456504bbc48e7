"""What a device computes, in NumPy and compiled, and what it costs to start.

CPU times of one thread, that of NumPy's matrix multiplication included; both forms of every loop
take turns in one run and give the same bytes.

* a private query to two servers for m = 1000 of K keys, and opening both replies: 2 KB a slice
* shares of an update of 1000 rows of 50 numbers, for two aggregators
* rounding a million numbers to a ring of 32 bits
* a private query to one server for 10 of K keys
* checking the proof of 1000 rows in the clear
* start: `keyhole --help`, and the first fetch of a device that has just started, each in a process
  of its own, in an environment that has numba

    python benchmarks/thin_device.py --check
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is loaded; more threads wait by spinning

import numpy as np

from harness import Goal, measure, parser, run_steps
from keyhole import SGD, Cut, KeySpace, Layout, ServerState
from keyhole.aggregation.two_servers.client import split_rows
from keyhole.aggregation.two_servers.params import SumParams, part_params
from keyhole.compiled import Loop
from keyhole.crypto.merkle import Tree, hash_leaves, prove, root_of
from keyhole.crypto.prg import Prg
from keyhole.crypto.ring import FixedPoint
from keyhole.delivery.pir.lattice import RingHint, encrypt
from keyhole.delivery.pir.shape import shape_of
from keyhole.delivery.pir.two_server import TwoServerClient, params_of, servers_of
from keyhole.service.access import Access, Keyring, new_key
from keyhole.service.app import App
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory
from keyhole.service.transport import serving
from private_cells.tables import make_table

RESULTS = Path(__file__).parent / "results" / "thin_device.json"
SAMPLES = 5
HELP_GOAL, FETCH_GOAL = 0.3, 0.5  # seconds of CPU
MAX_RATIO = 6
RNG = np.random.default_rng(1)


@dataclass(frozen=True)
class Cell:
    """One piece of work, in ms of CPU."""

    name: str
    plain: float
    compiled: float

    @property
    def ratio(self) -> float:
        return self.plain / self.compiled

    def goals(self) -> list[Goal]:
        return [Goal(f"{MAX_RATIO} x compiled over NumPy: {self.name}", MAX_RATIO / self.ratio, 1)]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.plain:.1f} ms in NumPy, {self.compiled:.1f} compiled, "
            f"ratio {self.ratio:.1f}"
        )


@dataclass(frozen=True)
class Start:
    """Seconds of CPU of whole processes, medians."""

    help: float
    fetch: float

    def goals(self) -> list[Goal]:
        return [
            Goal(f"{HELP_GOAL} s over keyhole --help", HELP_GOAL / self.help, 1),
            Goal(f"{FETCH_GOAL} s over a first fetch", FETCH_GOAL / self.fetch, 1),
        ]

    def __str__(self) -> str:
        return f"start: keyhole --help {self.help:.2f} s, a first fetch {self.fetch:.2f} s of CPU"


def loops() -> list[Loop]:
    """All loops of the modules that are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("keyhole.")]
    found = [each for module in modules for each in vars(module).values()]
    return list({id(each): each for each in found if isinstance(each, Loop)}.values())


def compare(name: str, work: Callable[[], object]) -> Cell:
    """Times work in both forms."""

    def in_form(form: str) -> Callable[[], object]:
        def run() -> object:
            for each in loops():
                each._chosen = getattr(each, form)
            return work()

        return run

    taken = measure({form: in_form(form) for form in ("plain", "compiled")})
    return Cell(name, *(1000 * taken[form].cpu for form in ("plain", "compiled")))


def ask_two_servers(num_keys: int) -> list[Cell]:
    """The query, and the paths of the rows that both replies give."""
    table = make_table(num_keys)
    database = table.database.padded_to(1000)
    client, pair = TwoServerClient(params_of(database)), servers_of(database)
    keys = RNG.choice(num_keys, 1000, replace=False)
    query = client.query(keys)
    sent = zip(pair, query.messages(), strict=True)
    found = query.decode([server.answer([message])[0] for server, message in sent])
    return [
        compare(f"query to two servers, K={num_keys}", lambda: client.query(keys)),
        compare(f"paths of 1000 rows, K={num_keys}", lambda: found.checked(table.top, keys)),
    ]


def share_update(num_keys: int) -> Cell:
    """What each aggregator gets of 1000 rows of 50 numbers."""
    part = part_params(num_keys, 50, 1000, 32, False)
    assert part.is_sparse
    terms = SumParams(bytes(16), (part,), 50, 2)
    rows = [
        (
            RNG.choice(num_keys, 1000, replace=False),
            RNG.integers(0, 2**32, (1000, 50), np.uint32),
        )
    ]
    return compare(
        f"shares of 1000 rows, K={num_keys}", lambda: split_rows(terms, rows, Prg(bytes(16)))
    )


def round_numbers() -> Cell:
    ring, numbers = FixedPoint(1.0, 50), RNG.normal(size=10**6).astype(np.float32)
    return compare("rounding 10^6 numbers", lambda: ring.encode(numbers, Prg(bytes(16))))


def ask_one_server(num_keys: int) -> Cell:
    """The question grows with the keys of the table."""
    shape = shape_of(num_keys, 2160, 1000)
    keys = RNG.choice(num_keys, 1000, replace=False)
    return compare(
        f"query to one server, K={num_keys}",
        lambda: encrypt(keys, shape, bytes(16), Prg(bytes(16))),
    )


def open_of_one_server(num_keys: int) -> Cell:
    """The hint, made ready, and a reply; any bytes will do."""
    shape = shape_of(num_keys, 2160, 1000)
    _, opening = encrypt(np.arange(1000), shape, bytes(16), Prg(bytes(16)))
    hint, reply = (
        memoryview(Prg(bytes(16)).bytes(-(-numbers * bits // 8)))
        for numbers, bits in (
            (shape.hint_numbers, shape.hint_bits),
            (shape.reply_numbers, shape.reply_bits),
        )
    )
    return compare(
        f"hint and reply of one server, K={num_keys}",
        lambda: RingHint(hint, shape).open(reply, opening),
    )


def check_proof(num_keys: int) -> Cell:
    """Rows of 2 KB in the clear: their hashes, and those on the way to the root."""
    tree = Tree.of(RNG.integers(0, 256, (num_keys, 32), np.uint8))
    keys = np.sort(RNG.choice(num_keys, 1000, replace=False))
    rows, proof = RNG.integers(0, 256, (1000, 2048), np.uint8), prove(tree, keys)
    return compare(
        f"proof of 1000 rows, K={num_keys}",
        lambda: root_of(tree.shape, keys, hash_leaves(rows), proof),
    )


FETCH = """
import sys, time
import numpy as np
from pathlib import Path
from keyhole.device.device import Device
with Device(sys.argv[1], token=sys.argv[2]) as device:
    now = device.current()
    device.fetch(now.round, {"word": np.arange(0, 20000, 20)})
print(time.process_time())
"""
HELP = """
import time
from contextlib import suppress
from keyhole.cli.main import main
with suppress(SystemExit):
    main(["--help"])
print(time.process_time())
"""


def seconds_of(program: str, *args: str) -> float:
    """CPU seconds of a process, as its last line says; the middle one of several."""
    command = [sys.executable, "-c", program, *args]
    said = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
        for _ in range(SAMPLES)
    ]
    return sorted(map(float, said))[SAMPLES // 2]


def measure_start() -> Start:
    """Fetches 1000 of 20,000 rows of 400 bytes."""
    word = KeySpace("word", 20_000)
    model = {"w": np.ones((20_000, 100), np.float32)}
    state = ServerState.dense(Layout.of(model, Cut(word, {"w": 0})), model, SGD(1.0))
    keyring = Keyring((bytes.fromhex(new_key()),))
    token = keyring.issue("device", "phone", now=time.time(), seconds=3600)
    with tempfile.TemporaryDirectory() as name, Publisher(Path(name)) as publisher:
        publisher.publish_state(state, number=0)
        rounds = RoundsDirectory(Path(name))
        with serving(App(rounds, access=Access(keyring))) as url:
            fetch = seconds_of(FETCH, url, token)
        rounds.close()
    return Start(seconds_of(HELP), fetch)


def main() -> int:
    flags = parser((__doc__ or "").splitlines()[0], RESULTS).parse_args()
    num_keys = 10**4 if flags.quick else 10**5
    asked, checked = ask_two_servers(num_keys)
    steps = [
        ("start", measure_start),
        ("two servers", lambda: asked),
        ("paths", lambda: checked),
        ("shares", lambda: share_update(num_keys)),
        ("rounding", round_numbers),
        ("one server", lambda: ask_one_server(num_keys)),
        ("its reply", lambda: open_of_one_server(num_keys)),
        ("proof", lambda: check_proof(num_keys)),
    ]
    return run_steps(flags, "thin_device", steps)


if __name__ == "__main__":
    sys.exit(main())
