"""Tasks that sweeps name as "architectures:NAME", with runs/ on Python's path.

Both learn the characters of FEMNIST. HEADS: one attention block, cut into its heads. RANKS: a 2NN
that can read digits is frozen, and ranks of its low-rank adapters learn all characters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from keyhole import Cut, KeySpace, Model
from keyhole.data.open import open_dataset
from keyhole.experiments.emnist import CLASSES, EMNIST_2NN, writers_task
from keyhole.identity import Ref
from keyhole.models.dense import cross_entropy, masked_mean, two_layer
from keyhole.models.model import dense_layer, glorot
from keyhole.rounds.spec import ClientSpec, KeySpec, RunSpec

SIDE, PATCH, WIDTH, FEATURES, KEPT = 28, 7, 64, 32, 16
PATCHES = (SIDE // PATCH) ** 2
DIGITS, STEPS = 10, 2_000


def loss(predict, params, batch, mask):
    return masked_mean(cross_entropy(predict(params, batch), batch["label"]), mask)


def task(name, about, model_of, space, sizes, client_lr):
    """A task on the characters of writers; one key space, chosen at random."""
    defaults = EMNIST_2NN.defaults
    spec = RunSpec(
        task=Ref(name),
        sizes=sizes,
        rounds=defaults.rounds,
        cohort=defaults.cohort,
        client=ClientSpec(algorithm="FedAvg", lr=client_lr, batch_size=20),
        keys={space: KeySpec(choice=Ref("independent"), count=None)},
        server=defaults.server,
    )

    def make(dataset, sizes, is_tuning=False):
        return writers_task(dataset, model_of(sizes), is_tuning, sizes["ink"])

    return replace(EMNIST_2NN, name=name, about=about, defaults=spec, make=make)


def attention(sizes):
    """Patches - attention - dense - classes. Key k of "head" selects the projections into head k
    and those out of it."""
    heads = sizes["heads"]

    def init(seed):
        rng = np.random.Generator(np.random.Philox(seed))
        into = partial(glorot, rng, heads, WIDTH, FEATURES, fan_in=WIDTH, fan_out=FEATURES)
        return {
            "patch": dense_layer(rng, PATCH * PATCH, WIDTH),
            "place": glorot(rng, PATCHES, WIDTH, fan_in=PATCHES, fan_out=WIDTH),
            "heads": {name: into() for name in ("query", "key", "value")}
            | {"out": glorot(rng, heads, FEATURES, WIDTH, fan_in=heads * FEATURES, fan_out=WIDTH)},
            "dense": dense_layer(rng, WIDTH, KEPT),
            "classes": dense_layer(rng, PATCHES * KEPT, CLASSES),
        }

    def predict(params, batch):
        n, across = len(batch["pixels"]), SIDE // PATCH
        x = batch["pixels"].reshape(n, across, PATCH, across, PATCH).transpose(0, 1, 3, 2, 4)
        x = x.reshape(n, PATCHES, PATCH * PATCH) @ params["patch"]["kernel"]
        x = x + params["patch"]["bias"] + params["place"]
        query, key, value = (
            jnp.einsum("npw,hwf->hnpf", x, params["heads"][name])
            for name in ("query", "key", "value")
        )
        weights = jax.nn.softmax(jnp.einsum("hnpf,hnqf->hnpq", query, key) / np.sqrt(FEATURES))
        mixed = jnp.einsum("hnpq,hnqf->hnpf", weights, value)
        x = x + jnp.einsum("hnpf,hfw->npw", mixed, params["heads"]["out"])
        x = jax.nn.relu(x @ params["dense"]["kernel"] + params["dense"]["bias"])
        x = x.reshape(n, PATCHES * KEPT)
        return x @ params["classes"]["kernel"] + params["classes"]["bias"]

    cut = Cut(KeySpace("head", heads), {f"heads/{n}": 0 for n in ("query", "key", "value", "out")})
    return Model(init, partial(loss, predict), predict, (cut,))


def adapters(sizes):
    """Key k of "rank" selects rank k of the adapters of both hidden layers; the last layer, new
    for the new classes, is broadcast. The frozen layers are on every device and never travel."""
    ranks, base = sizes["ranks"], reads_digits(sizes["ink"])
    shapes = {name: base[name]["kernel"].shape for name in ("dense1", "dense2")}

    def init(seed):
        rng = np.random.Generator(np.random.Philox(seed))
        return {
            name: {
                "down": glorot(rng, ranks, fan_in, fan_in=fan_in, fan_out=ranks),
                "up": np.zeros((ranks, fan_out), np.float32),
            }
            for name, (fan_in, fan_out) in shapes.items()
        } | {"dense3": dense_layer(rng, shapes["dense2"][1], CLASSES)}

    def predict(params, batch):
        x = batch["pixels"].reshape(len(batch["pixels"]), -1)
        for name in shapes:
            learnt = (x @ params[name]["down"].T) @ params[name]["up"]
            x = jax.nn.relu(x @ base[name]["kernel"] + base[name]["bias"] + learnt)
        return x @ params["dense3"]["kernel"] + params["dense3"]["bias"]

    axes = {f"{name}/{leaf}": 0 for name in shapes for leaf in ("down", "up")}
    return Model(init, partial(loss, predict), predict, (Cut(KeySpace("rank", ranks), axes),))


@cache
def reads_digits(ink):
    """The 2NN after training on the digits of all writers, in one place and from one seed."""
    columns = open_dataset("femnist").splits["train"].columns
    is_digit = np.asarray(columns["label"]) < DIGITS
    pixels = np.asarray(columns["pixels"])[is_digit]
    pixels = (255 - pixels if ink else pixels).astype(np.float32) / np.float32(255)
    label = np.asarray(columns["label"])[is_digit].astype(np.int32)
    model, rng = two_layer(classes=CLASSES), np.random.default_rng(0)
    everyone = np.ones(100, bool)

    @jax.jit
    def step(params, batch):
        slope = jax.grad(model.loss)(params, batch, everyone)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, slope)

    params = model.init(0)
    for _ in range(STEPS):
        drawn = rng.integers(len(label), size=len(everyone))
        params = step(params, {"pixels": pixels[drawn], "label": label[drawn]})
    return jax.tree.map(np.asarray, params)


HEADS = task(
    "heads",
    "Recognise handwritten characters with attention; a key is a head.",
    attention,
    "head",
    {"heads": 8, "ink": 1},
    client_lr=0.3,
)
RANKS = task(
    "ranks",
    "Adapt a reader of digits to all characters; a key is a rank of its adapters.",
    adapters,
    "rank",
    {"ranks": 16, "ink": 1},
    client_lr=0.1,
)
