"""The task that trainer and clinics share: will a patient come back, given the codes of a visit?

Nobody's patients are here: `kh.data.at_devices` says what the columns of a clinic's file mean.
"""

import jax
import numpy as np

import keyhole as kh

CODES, WIDTH, PER_VISIT = 3000, 16, 4
code = kh.KeySpace("code", CODES)


def init(seed):
    draw = np.random.default_rng(seed).standard_normal
    codes, score = draw((CODES, WIDTH)) / 4, draw(WIDTH) / 4
    return {"codes": codes.astype(np.float32), "score": score.astype(np.float32)}


def predict(params, batch):
    return params["codes"][batch["codes"]].sum(axis=1) @ params["score"]


def loss(params, batch, mask):
    outputs, back = predict(params, batch), batch["back"]
    errors = jax.nn.softplus(outputs) - back * outputs
    return (errors * mask).sum() / mask.sum()


def accuracy(outputs, visits):
    return float(np.mean((outputs > 0) == (visits["back"] > 0)))


model = kh.jax.Model(init, loss, predict, cuts=(kh.Cut(code, {"codes": 0}),))
data = kh.data.at_devices(inputs={"codes": "code"}, target="back")
TASK = kh.Task(
    model,
    data,
    metrics={"accuracy": accuracy},
    missing="unknown",
    unknown={"code": 0},
    name="clinic",
)


def write_visits(path, seed, visits=60):
    """Writes the file of one clinic: visits with codes that are common there."""
    rng, risk = np.random.default_rng(seed), np.random.default_rng(0).normal(size=CODES)
    usual = rng.choice(np.arange(1, CODES), 60, replace=False)
    codes = usual[rng.integers(60, size=(visits, PER_VISIT))]
    back = (risk[codes].sum(axis=1) > rng.normal(0, 0.5, visits)).astype(np.float32)
    np.savez(path, codes=codes, back=back)
