"""Loops: the NumPy that defines each, and its compiled form, give the same bytes."""

import os
import subprocess
import sys
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from keyhole.compiled import Loop, loop

RNG = np.random.default_rng(7)
KEYS = RNG.integers(0, 50, 200)
ORDER = RNG.permutation(200)[:120]
PLACES = RNG.integers(0, 60, (40, 3))
AES_KEYS = RNG.integers(0, 256, (3, 16), np.uint8)


def words(*shape, dtype=np.uint64):
    return RNG.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def table(*shape):
    return floats(*shape).astype(np.float32)


def bools(*shape):
    return RNG.integers(0, 2, shape).astype(np.bool_)


def point_tree(trees=5, nodes=6):
    seeds, bits = words(trees, 2), bools(trees, 2)
    seeds[:, 0] &= ~np.uint64(1)
    return (words(trees, nodes, 2, 2), np.empty((trees, nodes, 2), bool)), (
        bools(trees, nodes),
        seeds,
        bits,
    )


def leaves(width, room):
    parts = words(4, 3, 32, dtype=np.uint8), bools(4, 3), words(4, width, dtype=np.uint8)
    return *parts, np.empty((4, room), np.uint8)


def tree_words(trees, depth):
    """Corrections of trees: seeds without control bits, and bits."""
    seeds = words(trees, depth, 2)
    seeds[..., 0] &= ~np.uint64(1)
    return seeds, bools(trees, depth, 2)


def descending(trees, depth, needed, party):
    nodes = np.empty((trees, needed, 2), np.uint64), np.empty((trees, needed), np.bool_)
    return AES_KEYS[0], words(trees, 2), party, *tree_words(trees, depth), *nodes


def following(trees, depth):
    control = np.array([[False], [True]]) ^ np.zeros(trees, np.bool_)
    out = np.empty((trees, depth, 2), np.uint64), np.empty((trees, depth, 2), np.bool_)
    leaves = RNG.integers(0, 1 << depth, trees)
    return AES_KEYS[0], leaves, words(2, trees, 2), control, *out


def streams(ring, row, clients=3, buckets=4, size=5):
    """Shares of clients at all positions of all buckets, for a table of 9 keys."""
    filled = -(-row * np.dtype(ring).itemsize // 16) * 16 // np.dtype(ring).itemsize
    return (
        words(9, row, dtype=ring),
        AES_KEYS[:clients],
        words(clients, buckets * size, 2),
        bools(clients, buckets * size),
        words(clients, buckets, filled, dtype=ring),
        RNG.integers(-1, 9, buckets * size).astype(np.int32),
    )


def walk(num_keys):
    """Keys, and the sides and seeds of three permutations."""
    from keyhole.crypto.cuckoo import Permutations

    many = Permutations(num_keys, 3, 11)
    return RNG.integers(0, num_keys, 300), (num_keys, *many.sides, many.seeds())


def permuting(num_keys):
    keys, shape = walk(num_keys)
    return keys, *shape, np.empty((len(keys), 3), np.int64)


def going_back(num_keys):
    ranks, shape = walk(num_keys)
    return ranks, RNG.integers(0, 3, len(ranks)), *shape, np.empty(len(ranks), np.int64)


def matching(keys, buckets):
    return RNG.integers(0, buckets, (keys, 3)), buckets, np.full(keys, -1)


def rounding(values, ring):
    random = words(len(values), dtype=np.uint32)
    return (
        values,
        random,
        1.5,
        2.0**20 if ring == np.uint32 else 2.0**9,
        np.empty(len(values), ring),
    )


WILD = np.array([0, -0.0, 1e-30, 1.5, -1.5, 9, -9, np.inf, -np.inf, np.nan, 0.25], np.float64)


def proof(num_leaves, count):
    from keyhole.crypto.merkle import TreeShape

    shape = TreeShape(num_leaves)
    keys = np.sort(RNG.integers(0, num_leaves, count))
    out = np.zeros(shape.max_proof(count) + 1, np.int64)
    return keys, np.array(shape.sizes), np.empty(count + 1, np.int64), out


def heads():
    """Cells of a sketch: some hold a key alone, some several, some nonsense."""
    found = words(60, 4, dtype=np.uint32)
    found[:, 0] = RNG.integers(0, 9, 60)
    found[:30, 1:3] = found[:30, :1] * RNG.integers(0, 300, (30, 2), np.uint32)
    return found, PLACES[:, 0].copy(), 2, 8, 65_000, 6


def errors():
    from keyhole.crypto.gaussian import thresholds

    lowest, steps = thresholds(3.2)
    drawn = words(1000).view(np.int64)
    return (
        np.concatenate([drawn, steps, steps - 1]),
        steps,
        lowest,
        np.empty(1000 + 2 * len(steps), np.int32),
    )


def transform(degree, way):
    """Any polynomials or values, some the largest there are, and the tables of a transform."""
    from keyhole.crypto.ntt import transform_of

    ring = transform_of(degree, 134_176_769)
    columns = RNG.integers(0, ring.modulus, (2, degree, 3), np.uint32)
    columns[0, :, 0] = ring.modulus - 1
    tables = ring._powers if way == "forward" else (*ring._back, *ring._last)
    return columns, *tables, np.uint32(ring.modulus)


def packing(count, bits):
    numbers = words(count) >> np.uint64(64 - bits)
    return numbers, bits, np.empty(-(-count * bits // 8), np.uint8)


def unpacking(count, bits):
    data = words(-(-count * bits // 8), dtype=np.uint8)
    return data, bits, np.empty(count, np.uint64)


SIZES = [(1, 1), (9, 7), (1000, 23), (64, 54), (5, 56)]


# What each loop is called with, several times where its branches differ.
CASES = {
    "crypto.prg.mix_blocks": lambda: [(words(9, 2), words(11, 6)), (words(1, 2), words(1, 2))],
    "crypto.prg.stretch": lambda: [
        (AES_KEYS[0], words(n, 2), np.empty((n, 2 * blocks), np.uint64))
        for n, blocks in ((1, 1), (9, 2), (9, 3), (4, 16), (3, 37), (2, 9000))
    ],
    "crypto.dpf.descend": lambda: [
        descending(*shape)
        for shape in ((1, 0, 1, 0), (1, 0, 1, 1), (3, 1, 1, 1), (5, 4, 16, 0), (5, 4, 9, 1))
    ],
    "crypto.dpf.follow": lambda: [following(1, 0), following(1, 1), following(40, 9)],
    "aggregation.two_servers.server.add_streams": lambda: [
        streams(ring, row) for ring in (np.uint16, np.uint32) for row in (1, 4, 16, 51, 500)
    ],
    "crypto.dpf.grow": lambda: [sum(point_tree(), ()), sum(point_tree(1, 1), ())],
    "crypto.dpf.write_leaves": lambda: [leaves(31, 80), leaves(5, 15), leaves(32, 65)],
    "crypto.cuckoo.permute": lambda: [permuting(n) for n in (1, 10, 997, 2**31 - 1)],
    "crypto.cuckoo.go_back": lambda: [going_back(n) for n in (1, 10, 997, 2**31 - 1)],
    "crypto.cuckoo.match": lambda: [matching(*n) for n in ((100, 131), (140, 131), (3, 3), (0, 4))],
    "crypto.ring.round_numbers": lambda: [
        rounding(values, ring)
        for values in (floats(500), floats(500).astype(np.float64), WILD, WILD.astype(np.float32))
        for ring in (np.uint16, np.uint32)
    ],
    "crypto.merkle.hash_lanes": lambda: [
        (words(131, n, dtype=np.uint8), words(8, dtype=np.uint32), np.empty((131, 8), np.uint32))
        for n in (0, 1, 3, 4, 64, 65, 1024, 1025, 2048, 3072, 5001, 7168)
    ],
    "crypto.merkle.find_siblings": lambda: [proof(*n) for n in ((1, 1), (77, 5), (100, 90))],
    "crypto.ntt.to_values": lambda: [transform(n, "forward") for n in (2, 256, 2048)],
    "crypto.ntt.to_polynomials": lambda: [transform(n, "back") for n in (2, 256, 2048)],
    "crypto.gaussian.count_steps": lambda: [errors()],
    "crypto.bits.pack_into": lambda: [packing(*size) for size in SIZES],
    "crypto.bits.unpack_into": lambda: [unpacking(*size) for size in SIZES],
    "server.rows.copy_rows": lambda: [
        (table, KEYS, order, np.zeros((200, table.shape[1]), np.uint8), streams)
        for table in (words(50, 48, dtype=np.uint8), words(50, 7, dtype=np.uint8))
        for order, streams in ((None, False), (None, True), (ORDER, False))
    ],
    "server.rows.add_rows": lambda: [
        (table, KEYS, order, (floats(200, 7) * 100).astype(table.dtype))
        for table in (floats(50, 7), words(50, 7, dtype=np.int64))
        for order in (None, ORDER)
    ],
    "server.rows.take_columns": lambda: [
        (table(50, 9 + before * behind), KEYS, 7, table(before, len(KEYS), behind))
        for before, behind in ((1, 1), (37, 1), (16, 1), (1, 33), (4, 5), (0, 3))
    ],
    "server.rows.add_columns": lambda: [
        (table(50, 9 + before * behind), KEYS, 7, table(before, len(KEYS), behind))
        for before, behind in ((1, 1), (37, 1), (16, 1), (1, 33), (4, 5), (0, 3))
    ],
    "server.inputs.all_below": lambda: [
        (values.astype(np.float32), limit)
        for values in (floats(99), -floats(99), WILD, floats(0))
        for limit in (np.float32(0.5), np.float32(2.0), np.float32(1e30))
    ],
    "server.rows.partition": lambda: [(KEYS, 4, 3, np.empty(200, np.int64))],
    "server.rows.number_keys": lambda: [
        (KEYS, np.empty((4, 200), np.int64), np.empty(200, np.int64)),
        (KEYS + 2**61, np.empty((4, 200), np.int64), np.empty(200, np.int64)),
    ],
    "server.rows.join_keys": lambda: [
        (left, right, np.empty(len(left) + len(right), np.int64))
        for left, right in pairwise((np.arange(0, 90, 3), np.arange(0, 50, 2), KEYS[:0], KEYS[:0]))
    ],
    "server.rows.all_within": lambda: [(KEYS, n) for n in (48, 49, 50)] + [(KEYS[:0], -1)],
    "server.row_sums.count_disorder": lambda: [(KEYS,), (np.arange(9),), (KEYS[:0],)],
    "server.row_sums.is_finite": lambda: [
        (values.astype(np.float32).view(np.int32),) for values in (floats(9), WILD)
    ],
    "aggregation.masked.sketch.add_rows": lambda: [
        (words(60, 5, dtype=kind), PLACES, words(40, 5, dtype=kind))
        for kind in (np.uint16, np.uint32)
    ],
    "aggregation.masked.sketch.take_rows": lambda: [
        (words(60, 5, dtype=kind), PLACES, words(40, 5, dtype=kind))
        for kind in (np.uint16, np.uint32)
    ],
    "aggregation.masked.sketch.read_keys": lambda: [heads()],
}  # fmt: skip

# Arguments in which a compiled form works, and which hold no answer but what `run` returns of it.
SCRATCH = {"find_siblings": [2, 3], "number_keys": [1]}


def find(name):
    module, _, loop_name = name.rpartition(".")
    return getattr(import_module(f"keyhole.{module}"), loop_name)


def run(form, args):
    """What a form returns, and what is in its arguments then."""
    held = [each.copy() if isinstance(each, np.ndarray) else each for each in args]
    answer = form(*held)
    return (held[3][:answer] if form.__name__ == "find_siblings" else answer), held


@pytest.mark.parametrize("name", CASES)
def test_both_forms_of_a_loop_give_the_same_bytes(name):
    found = find(name)
    if not found.can():
        pytest.skip("this processor has no AES instructions")
    for args in CASES[name]():
        (plain, left), (compiled, right) = run(found.plain, args), run(found.compiled, args)
        if name.endswith("number_keys"):
            plain, compiled = plain.tolist(), compiled.tolist()
        np.testing.assert_array_equal(plain, compiled)
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            if isinstance(one, np.ndarray) and place not in SCRATCH.get(found.__name__, ()):
                assert one.tobytes() == other.tobytes(), (name, place)


@pytest.mark.slow
@pytest.mark.parametrize("features", ["+sse2,+aes", "+sse2,+aes,+avx2,+vaes"])
def test_aes_gives_the_same_bytes_with_narrower_instructions(features, tmp_path):
    """As of processors that have older ones; those that this one lacks end in an error."""
    chosen = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features}
    wanted = [name for name in CASES if find(name).module == "keyhole.crypto.aes_loops"]
    test = f"{__file__}::{test_both_forms_of_a_loop_give_the_same_bytes.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(f"{test}[{name}]" for name in wanted)],
        env={**os.environ, **chosen, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(wanted)} passed" in done.stdout


def test_every_loop_has_a_case():
    for name in CASES:
        find(name)
    modules = [m for n, m in sys.modules.items() if n.startswith("keyhole.")]
    loops = {
        f"{each.plain.__module__}.{each.__name__}".removeprefix("keyhole.")
        for module in modules
        for each in list(vars(module).values())
        if isinstance(each, Loop)
    }
    assert loops == CASES.keys()


def count(numbers):
    return "plain"


def test_a_loop_with_a_threshold_compiles_from_there_on_and_stays_compiled(monkeypatch):
    made = loop("keyhole.crypto.loops", from_bytes=800)(count)
    monkeypatch.setattr(Loop, "compiled", property(lambda self: lambda numbers: "compiled"))
    said = [made(np.zeros(n)) for n in (99, 100, 1)]
    assert said == ["plain", "compiled", "compiled"]


def test_a_loop_without_one_follows_what_the_process_has_loaded(monkeypatch):
    made = loop("keyhole.crypto.loops")(count)
    monkeypatch.setattr(Loop, "compiled", property(lambda self: lambda numbers: "compiled"))
    monkeypatch.setitem(sys.modules, "numba", None)
    assert made(np.zeros(9)) == "plain"
    monkeypatch.undo()
    monkeypatch.setattr(Loop, "compiled", property(lambda self: lambda numbers: "compiled"))
    import_module("numba")
    assert made(np.zeros(9)) == "compiled"


def fresh(code):
    """What a new process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_device_loads_no_numba_and_who_holds_a_model_does():
    say = "\nimport sys; print('numba' in sys.modules)"
    ways = "all_deliveries(); all_aggregations()"
    device = (
        "import keyhole.device.private, keyhole.device.relayed, keyhole.device.sums\n"
        "import keyhole.device.take_part, keyhole.device.admission, keyhole.cli.device\n"
        "from keyhole.delivery import all_deliveries\n"
        f"from keyhole.aggregation import all_aggregations\n{ways}"
    )
    assert fresh(device + say) == ["False"]
    state = (
        "import numpy as np, keyhole as kh\nmodel = {'w': np.zeros((3, 2), np.float32)}\n"
        "layout = kh.Layout.of(model, kh.Cut(kh.KeySpace('word', 3), {'w': 0}))\n"
        "kh.ServerState.dense(layout, model, kh.SGD(1.0))"
    )
    assert fresh(state + say) == ["True"]
    assert fresh("from keyhole.service.transport import warm_up; warm_up()" + say) == ["True"]
