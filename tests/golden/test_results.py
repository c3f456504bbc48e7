"""Results are pinned: the bytes of the model and the numbers of the rounds, two rounds a case.

`results.json` has a line for each case: every task, every delivery, every way to add updates up,
some of them combined, asynchronous rounds, devices of a service, and engines. A case is plain
data here, and `pinned.py` alone calls the library.

Counts, sizes, bytes and outcomes are the same everywhere. Floating-point sums of JAX and NumPy
differ in their last bits on a CPU with other vector instructions, so models and metrics are pinned
for each CPU on which they were made ("exact"), and are those of one of these. On another CPU,
metrics are compared within `NEAR` with those of the first, and the digest of the model is not.

Renew the results with KEYHOLE_RENEW_GOLDEN=1, in one process: what is there of this CPU is
replaced. To add a CPU, do so at a commit whose results are known to be right elsewhere.
"""

import json
import os
import platform
from pathlib import Path

import pytest

from tests.golden.pinned import run_case

RESULTS = Path(__file__).with_name("results.json")
FLOATS = ("metrics", "epsilon")  # of a round
NEAR = 0.02  # of a metric: a prediction or two of a small test split

POSTS = {"users": 20, "words": 200, "tags": 10, "topics": 4}
WRITERS = {"writers": 8, "min_images": 50, "max_images": 60}
RATINGS = {"users": 10, "items": 60, "min_ratings": 10, "max_ratings": 20}
FEW = {"cohort": 5, "batch_size": 4, "max_examples": 48, "client_lr": 0.2}

TAGS = {
    "task": "so_tag",
    "data": POSTS,
    "sizes": {"words": 200, "tags": 10},
    "m": {"word": 20},
    "training": {"cohort": 5, "batch_size": 20, "client_lr": 1.0},
}
WORDS = {
    "task": "so_word",
    "data": POSTS,
    "sizes": {"words": 60, "embedding": 4, "width": 8, "heads": 2, "neurons": 8},
    "m": {"word": 20, "neuron": 4},
    "training": {"cohort": 3, "batch_size": 4, "max_examples": 8},
}
CNN = {
    "task": "emnist_cnn",
    "data": WRITERS,
    "sizes": {"filters": 4, "hidden": 8},
    "m": {"filter": 2},
    "training": {**FEW, "cohort": 3, "client_lr": 0.1},
}
DENSE = {
    "task": "emnist_2nn",
    "data": WRITERS,
    "sizes": {"neurons": 12, "hidden": 8},
    "m": {"neuron": 5},
    "training": FEW,
}
EXPERTS = {
    "task": "experts",
    "data": WRITERS,
    "sizes": {"experts": 4, "features": 6, "hidden": 5},
    "m": {"expert": 2},
    "training": FEW,
}
MOVIES = {
    "task": "movies",
    "data": RATINGS,
    "sizes": {"factors": 3},
    "m": {"movie": 12},
    "training": {"cohort": 5},
}
DELIVERIES = (
    "broadcast",
    "on-demand",
    "pregenerated",
    "relay",
    "pir",
    "pir-one-server",
    "enclave",
)
SERVED = {**TAGS, "delivery": "pregenerated"}
SUMS = ("plain", "dense", "secure-dense", "secure-sketch", "secure-sparse")
ALGORITHMS = ("FedAvg", "FedProx", "FedAdam", "FedYogi")
PRIVACY = {"clip": 0.5, "noise": 1.0, "delta": 1e-3}
LOSSES = {"over-selection": 1.6, "lost before": 0.2, "lost after": 0.2}

CASES = {
    "so_tag": TAGS,
    "so_word": WORDS,
    "emnist_cnn": CNN,
    "emnist_2nn": DENSE,
    "experts": EXPERTS,
    "movies": MOVIES,
    "demo, no select": {"task": "demo", "line": "no select"},
    "demo, top 30 words": {"task": "demo", "line": "top 30 words"},
    **{f"so_tag, {way}": {**TAGS, "delivery": way} for way in DELIVERIES},
    **{f"movies, {way}": {**MOVIES, "delivery": way} for way in DELIVERIES},
    "so_word, pir": {**WORDS, "delivery": "pir"},
    "so_word, relay": {**WORDS, "delivery": "relay"},
    **{f"so_tag, {way}": {**TAGS, "aggregation": way} for way in SUMS},
    **{f"emnist_2nn, {way}": {**DENSE, "aggregation": way} for way in SUMS},
    "experts, secure-sparse over choosers": {
        **EXPERTS,
        "aggregation": "secure-sparse",
        "mean over": "choosers",
    },
    "so_tag, over choosers": {**TAGS, "mean over": "choosers"},
    "so_tag, secure-dense, signed": {**TAGS, "aggregation": "secure-dense", "signed": True},
    "so_tag, secure-sketch, signed, losses": {
        **TAGS,
        **LOSSES,
        "aggregation": "secure-sketch",
        "signed": True,
    },
    "so_tag, secure-sparse, 16 bits": {
        **TAGS,
        "aggregation": "secure-sparse",
        "ring bits": 16,
        "value clip": 4.0,
    },
    **{
        f"so_tag, {way}, few lost": {
            **TAGS,
            "training": {**TAGS["training"], "cohort": 8},
            "aggregation": way,
            "signed": way != "secure-sparse",
            "lost after": 0.12,
        }
        for way in SUMS[2:]
    },
    "so_tag, secure-dense, losses": {**TAGS, **LOSSES, "aggregation": "secure-dense"},
    "so_tag, secure-sparse, losses, pir": {
        **TAGS,
        **LOSSES,
        "aggregation": "secure-sparse",
        "delivery": "pir",
    },
    "so_tag, losses": {**TAGS, **LOSSES},
    "so_tag, losses, too few": {**TAGS, "lost after": 0.5, "min updates": 4},
    "so_tag, poisson": {**TAGS, "sampling": "poisson"},
    "so_tag, cyclic": {**TAGS, "sampling": "cyclic"},
    "so_tag, another trial": {**TAGS, "trial": 1},
    "emnist_2nn, tuning": {**DENSE, "tuning": True},
    "so_tag, privacy": {**TAGS, "privacy": PRIVACY, "sampling": "poisson"},
    "so_tag, privacy, thresholded": {
        **TAGS,
        "m": {"word": 2},
        "training": {**TAGS["training"], "cohort": 12},
        "privacy": {**PRIVACY, "noise": 0.5, "kind": "thresholded", "threshold": 2.0},
        "sampling": "poisson",
    },
    "so_tag, privacy, correlated": {
        **TAGS,
        "privacy": {**PRIVACY, "kind": "correlated", "rounds": 2},
        "sampling": "cyclic",
    },
    "so_tag, privacy, secure-dense": {
        **TAGS,
        "privacy": PRIVACY,
        "aggregation": "secure-dense",
    },
    "so_tag, privacy, secure-sparse": {
        **TAGS,
        "privacy": PRIVACY,
        "aggregation": "secure-sparse",
    },
    "so_tag, device classes": {
        **TAGS,
        "devices": [["phone", 0.5, 100_000], ["watch", 0.5, 400]],
    },
    "so_tag, every word": {**TAGS, "m": {"word": None}},
    **{
        f"so_tag, {way}, {coding}": {**TAGS, "delivery": way, "coding": coding}
        for way in DELIVERIES[:3]
        for coding in ("uint8", "half")
    },
    **{
        f"so_tag, {name}": {**TAGS, "training": {**TAGS["training"], "algorithm": name}}
        for name in ALGORITHMS
    },
    "so_tag, random keys": {**TAGS, "keys": {"word": "random"}},
    "so_tag, random-top keys": {**TAGS, "keys": {"word": "random-top"}},
    "emnist_2nn, shared keys": {**DENSE, "shared keys": True},
    "so_word, negatives": {**WORDS, "negatives": 0.3},
    "so_tag, on disk": {**TAGS, "place": "disk"},
    "emnist_2nn, in threads": {**DENSE, "place": "threads"},
    "so_tag, asynchronous": {**TAGS, "asynchronous": {"concurrency": 6, "goal": 3}},
    "so_tag, asynchronous, losses": {
        **TAGS,
        "asynchronous": {"concurrency": 8, "goal": 2, "max staleness": 0},
        "lost before": 0.2,
        "lost after": 0.2,
    },
    "so_tag, served": {**SERVED, "place": "service"},
    "so_tag, served, uint8": {**SERVED, "place": "service", "coding": "uint8"},
    "so_tag, served, shared random keys": {
        **SERVED,
        "place": "service",
        "keys": {"word": "random"},
        "shared keys": True,
    },
    "so_word, served": {**WORDS, "delivery": "pregenerated", "place": "service"},
    "so_tag, served, whole rounds": {**SERVED, "place": "service, whole rounds"},
    "so_tag, served, pir": {**SERVED, "place": "service, two servers"},
    "so_tag, served, pir-one-server": {**SERVED, "place": "service, one server"},
    "so_tag, served, relay": {**SERVED, "place": "service, relay"},
    "so_tag, secure-sparse, grid": {**TAGS, "aggregation": "secure-sparse", "grid": 1024},
    "so_tag, served, secure-sparse, grid": {
        **TAGS,
        "place": "service, two aggregators",
        "aggregation": "secure-sparse",
        "grid": 1024,
    },
    "so_tag, served, privacy, secure-sparse": {
        **SERVED,
        "place": "service, two aggregators",
        "aggregation": "secure-sparse",
        "privacy": PRIVACY,
        "secret noise": True,
    },
    "so_tag, served, asynchronous": {
        **SERVED,
        "place": "service",
        "asynchronous": {"concurrency": 1, "goal": 3},
    },
    "so_tag, on Ray": {**TAGS, "place": "ray"},
    "emnist_2nn, on Ray": {**DENSE, "place": "ray"},
    "so_tag, on Ray, shards": {**TAGS, "place": "ray, shards"},
}
# Those for which JAX compiles long, which start processes, or of which each half has a fast case.
SLOW = {
    "demo, no select",
    "emnist_2nn, shared keys",
    "emnist_2nn, tuning",
    "experts, secure-sparse over choosers",
    "so_tag, served, privacy, secure-sparse",
    "so_tag, served, shared random keys",
    "so_tag, served, uint8",
    "so_tag, served, whole rounds",
    *(f"movies, {way}" for way in DELIVERIES if way != "pir"),
    *(f"emnist_2nn, {way}" for way in SUMS if way != "secure-sparse"),
    *(f"so_tag, {way}, few lost" for way in SUMS[2:]),
    *(f"so_tag, {way}, half" for way in DELIVERIES[:3]),
    *(f"so_tag, {name}" for name in ALGORITHMS if name != "FedAdam"),
    *(name for name in CASES if name.startswith("so_word, ")),
    *(name for name in CASES if "on Ray" in name),
}


def renews():
    return bool(os.environ.get("KEYHOLE_RENEW_GOLDEN"))


def read_results():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_results(results):
    """One line for each case, in the order of names."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(results[name], sort_keys=True)}"
        for name in sorted(results)
    ]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def this_cpu():
    """The maker of the CPU and its widest vector instructions, for which XLA compiles sums."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    known = (("AuthenticAMD", "GenuineIntel"), ("avx512f", "avx2"))
    found = [next((each for each in names if each in words), "") for names in known]
    return " ".join(found).strip() or platform.machine()


def split(found):
    """What is the same on every CPU, and what is not: the model, metrics, and epsilon."""
    exact = {name: found[name] for name in ("model", "test") if name in found}
    exact["rounds"] = [{n: each[n] for n in FLOATS if n in each} for each in found["rounds"]]
    rounds = [{n: each[n] for n in each if n not in FLOATS} for each in found["rounds"]]
    return {"rounds": rounds}, exact


def first_difference(found, pinned, place="", near=0.0):
    """Where two results differ first, and how; None where they are the same. Floats may differ by
    `near`."""
    if isinstance(found, dict) and isinstance(pinned, dict) and found.keys() == pinned.keys():
        pairs = [(name, found[name], pinned[name]) for name in sorted(found)]
    elif isinstance(found, list) and isinstance(pinned, list) and len(found) == len(pinned):
        pairs = [(at, *both) for at, both in enumerate(zip(found, pinned, strict=True))]
    else:
        is_near = isinstance(found, float) and isinstance(pinned, float)
        same = found == pinned or (is_near and abs(found - pinned) <= near)
        return None if same else f"{place}: got {found!r}, pinned is {pinned!r}"
    differences = (first_difference(a, b, f"{place}/{name}", near) for name, a, b in pairs)
    return next((each for each in differences if each), None)


def difference_of_floats(found, exact):
    """As `first_difference`, for what depends on the CPU. CPUs of one maker may compute a case as
    another column has it: which instructions XLA takes follows from their generation, too."""
    if found in exact.values():
        return None
    if this_cpu() in exact:
        return first_difference(found, exact[this_cpu()])
    of_another = {**next(iter(exact.values())), **{n: found[n] for n in ("model",) if n in found}}
    return first_difference(found, of_another, near=NEAR)


def marked(name):
    return pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_results_are_those_that_are_pinned(name, tmp_path):
    everywhere, exact = split(json.loads(json.dumps(run_case(CASES[name], tmp_path))))
    results = read_results()
    pinned = results.get(name, {"exact": {}})
    if renews():
        pinned = {**everywhere, "exact": {**pinned["exact"], this_cpu(): exact}}
        write_results({**results, name: pinned})
    known = {n: pinned[n] for n in pinned if n != "exact"}
    different = first_difference(everywhere, known) or difference_of_floats(exact, pinned["exact"])
    assert different is None, f"case {name!r} differs first at {different}"


@pytest.mark.parametrize("change", [0.0, 0.5 * NEAR, 2 * NEAR])
def test_another_cpu_may_round_otherwise_and_no_more(change):
    pinned = {"model": "aa", "test": {"recall": 0.5}, "rounds": []}
    found = {"model": "bb", "test": {"recall": 0.5 + change}, "rounds": []}
    assert (difference_of_floats(found, {"another": pinned}) is None) == (change < NEAR)
    assert difference_of_floats(found, {this_cpu(): pinned}) is not None


def test_every_result_belongs_to_a_case():
    results = read_results()
    if renews():
        results = {name: results[name] for name in results if name in CASES}
        write_results(results)
    assert sorted(results) == sorted(CASES)
