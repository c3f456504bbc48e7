"""Directories of runs as `keyhole sweep` writes them, made up and small."""

import json

import numpy as np

from keyhole.experiments.specs import spec_of
from keyhole.rounds.record import RoundRecord, encode_records


def write_sweep(out, name, lines, /, **more):
    """lines: (panel, label, x, arm)."""
    out.mkdir(parents=True, exist_ok=True)
    keys = ("panel", "label", "x", "arm")
    sweep = {
        "sweep": name,
        "title": f"The sweep {name}",
        "scale": "small",
        "data": "synthetic",
        "metric": "accuracy",
        "figures": ["curves", "final"],
        "x_label": "keys per client m",
        "lines": [dict(zip(keys, line, strict=True)) for line in lines],
        **more,
    }
    (out / f"{name}.json").write_text(json.dumps(sweep))


def write_trial(
    out,
    arm,
    trial,
    curve=(0.2, 0.4),
    test=0.5,
    *,
    metric="accuracy",
    every=10,
    rounds=20,
    size=(1000, 100),
    seconds=90.0,
    changes=None,
    **more,
):
    """curve: validation after every `every` rounds; changes: fields of the record, by dotted names;
    more: of the record of every round.

    A trial whose test is None is unfinished.
    """
    directory = out / arm / f"trial-{trial}"
    directory.mkdir(parents=True)
    spec = spec_of(
        "emnist_cnn", {"keys.filter.count": 4, "rounds": rounds, "seed": 7, "trial": trial}
    ).changed(changes or {})
    run = {
        "spec": spec.describe(),
        "arm": arm,
        "dataset": {"name": "synthetic", "kind": "writers", "sha256": "ab" * 32},
        "curve": "validation",
        "size": {"server": size[0], "client": size[1]},
        "metric": metric,
        "versions": {"keyhole": "0.1.0", "python": "3.11"},
    }
    (directory / "run.json").write_text(json.dumps(run))
    records = [
        RoundRecord(
            round=every * (i + 1) - 1, step=every * (i + 1), clients=[], metrics={metric: v}, **more
        )
        for i, v in enumerate(curve)
    ]
    (directory / "records.jsonl").write_bytes(encode_records(records))
    if test is not None:
        result = {"rounds": rounds, "seconds": seconds, "metrics": {metric: test}}
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def rising(last, trial, points=20, noise=0.01):
    """A curve that rises to `last`, a little different in each trial."""
    rng = np.random.default_rng([trial, points])
    t = np.arange(1, points + 1)
    curve = last * (1 - np.exp(-4 * t / points)) + noise * rng.standard_normal(points) * last
    return [float(value) for value in curve]
