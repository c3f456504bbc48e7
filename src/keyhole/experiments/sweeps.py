"""Lists the arms of each figure and table of the paper, at two scales, and those of the demo.

`paper` has the paper's settings and needs its data. `small` asks the same questions of a few
thousand clients in minutes: fewer rounds, and for the transformer smaller layers in
about the same proportions. Rates are those that the `-rates` sweeps found without select.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

from keyhole.data.federated import Dataset
from keyhole.data.open import make_synthetic
from keyhole.errors import InputError
from keyhole.experiments import task_named
from keyhole.experiments.specs import defaults_of, name_of, spec_of
from keyhole.keys.budget import share_of_keys
from keyhole.primitives.keyspace import KeySpace
from keyhole.rounds.spec import RunSpec

Scale: TypeAlias = Literal["small", "paper"]


@dataclass(frozen=True)
class SweepLine:
    """One line of a figure: the panel it is drawn in, what it is called, where it stands on x.

    Args:
        folder: that keeps its runs; empty for the name that tells the run from others of its task.
    """

    panel: str
    label: str
    x: float | None
    spec: RunSpec
    folder: str = ""

    @property
    def arm(self) -> str:
        """The name of the folder that keeps its runs."""
        return self.folder or name_of(self.spec)


@dataclass(frozen=True)
class Sweep:
    """The runs behind a figure or table.

    Args:
        figures: kinds of figure that show it.
        x_label: of what differs between lines.
        trials: how often each is run.
    """

    name: str
    title: str
    task: str
    figures: tuple[str, ...]
    x_label: str
    lines: tuple[SweepLine, ...]
    trials: int

    def describe(self, scale: str, data: str) -> dict[str, Any]:
        """Returns the sweep as it is written beside its runs, for the report."""
        return {
            "sweep": self.name,
            "title": self.title,
            "scale": scale,
            "data": data,
            "metric": task_named(self.task).metric,
            "figures": list(self.figures),
            "x_label": self.x_label,
            "trials": self.trials,
            "lines": [
                {"panel": line.panel, "label": line.label, "x": line.x, "arm": line.arm}
                for line in self.lines
            ],
        }


TRIALS = 5
"""Of every sweep, unless told; the paper's number."""

SMALL: dict[str, dict[str, Any]] = {
    "so_tag": {"rounds": 200, "evaluate_every": 10, "client.min_examples": 5},
    "emnist_cnn": {"rounds": 120, "cohort.size": 20, "evaluate_every": 10},
    "emnist_2nn": {"rounds": 400, "evaluate_every": 20},
    "so_word": {
        "rounds": 150,
        "cohort.size": 10,
        "evaluate_every": 25,
        "client.min_examples": 5,
        "server.lr": 0.003,
        "server.eps": 1e-6,
    },
}
"""Fields of the record that differ at small scale."""

SMALL_SIZES: dict[str, dict[str, int]] = {
    "emnist_cnn": {"ink": 1},  # see `writers_task`: there are a tenth of the paper's rounds
    "emnist_2nn": {"ink": 1},
    "so_word": {"words": 2000, "embedding": 48, "width": 96, "heads": 4, "neurons": 1024},
}

VOCABULARIES: dict[Scale, tuple[int, ...]] = {
    "small": (2_000, 10_000, 50_000),
    "paper": (10_000, 100_000),
}
WORDS_PER_CLIENT: dict[Scale, tuple[int, ...]] = {
    "small": (30, 100, 300, 1_000, 10_000),
    "paper": (100, 1_000, 10_000),
}
CHOSEN: dict[Scale, tuple[tuple[int, int], ...]] = {
    "small": ((10_000, 100), (10_000, 300), (50_000, 300)),
    "paper": ((10_000, 1_000), (100_000, 1_000)),
}
"""n and m under which ways to choose are compared; users of the small data have fewer words."""
STRATEGIES = {"top": "Top", "random": "Random", "random-top": "Random Top"}
FILTERS, NEURONS = (4, 8, 16, 32, 64), (10, 50, 100, 200)
ALPHAS = (0.01, 0.1, 0.25, 0.5)
RATES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_PER_CLIENT = "keys per client, m"


def _spec(
    task: str,
    scale: Scale,
    counts: Mapping[str, int | None],
    changes: Mapping[str, Any] | None = None,
) -> RunSpec:
    """The task at a scale, with this many keys per client, and what else differs."""
    keys = {f"keys.{space}.count": m for space, m in counts.items()}
    small: dict[str, Any] = {}
    if scale == "small":
        sizes = SMALL_SIZES.get(task, {})
        small = SMALL[task] | {f"sizes.{name}": size for name, size in sizes.items()}
    return spec_of(task, {**small, **keys, **(changes or {})})


def _tag_recall(scale: Scale) -> Sweep:
    """Recall by size of the vocabulary and keys per client."""
    title = "Tag prediction: recall@5 by vocabulary n and keys per client m"
    lines = []
    for n, m in product(VOCABULARIES[scale], WORDS_PER_CLIENT[scale]):
        if m <= n:
            spec = _spec("so_tag", scale, {"word": m}, {"sizes.words": n})
            lines.append(SweepLine(f"n = {n:,}", f"m = {m:,}", m, spec))
    figures = "curves", "final"
    return Sweep("tag-recall", title, "so_tag", figures, _PER_CLIENT, tuple(lines), TRIALS)


def _tag_keys(scale: Scale) -> Sweep:
    """Recall by how a client chooses its words."""
    title, lines = "Tag prediction: recall@5 by choice of keys", []
    for n, m in CHOSEN[scale]:
        for place, (choice, label) in enumerate(STRATEGIES.items()):
            changes = {"sizes.words": n, "keys.word.choice": choice}
            spec = _spec("so_tag", scale, {"word": m}, changes)
            lines.append(SweepLine(f"n = {n:,}, m = {m:,}", label, place, spec))
    return Sweep("tag-keys", title, "so_tag", ("curves",), "choice of keys", tuple(lines), TRIALS)


def _emnist(task: str, space: str, counts: tuple[int, ...], title: str) -> Callable[[Scale], Sweep]:
    """Accuracy by number of random keys."""

    def sweep(scale: Scale) -> Sweep:
        lines = [SweepLine("", f"m = {m}", m, _spec(task, scale, {space: m})) for m in counts]
        name, words = task.replace("_", "-"), f"{title}: test accuracy by random keys per client m"
        return Sweep(name, words, task, ("curves",), _PER_CLIENT, tuple(lines), TRIALS)

    return sweep


def _fixed(task: str, space: str, counts: tuple[int, ...], title: str) -> Callable[[Scale], Sweep]:
    """Accuracy with keys that each client draws, and with keys drawn once a round."""

    def sweep(scale: Scale) -> Sweep:
        lines = []
        for m, label in product(counts[:-1], ("independent", "fixed")):
            shared = {f"keys.{space}.shared": label == "fixed"}
            lines.append(SweepLine(f"m = {m}", label, m, _spec(task, scale, {space: m}, shared)))
        words = f"{title}: keys drawn by each client, or once for all clients of a round"
        name = f"{task.replace('_', '-')}-fixed"
        return Sweep(name, words, task, ("curves",), _PER_CLIENT, tuple(lines), TRIALS)

    return sweep


def _word_alpha(scale: Scale) -> Sweep:
    """Accuracy against client size: words by frequency, neurons at random, both."""
    sizes = {**defaults_of("so_word").sizes, **(SMALL_SIZES["so_word"] if scale == "small" else {})}
    spaces = [KeySpace("word", sizes["words"]), KeySpace("neuron", sizes["neurons"])]
    whole = {"word": None, "neuron": None}
    lines = []
    schemes = {"structured": ("word",), "random": ("neuron",), "mixed": ("word", "neuron")}
    for scheme, cut in schemes.items():
        for alpha in ALPHAS:
            counts = share_of_keys(spaces, alpha)
            counts["word"] += 4  # the special words come on top
            chosen: Mapping[str, int | None] = {**whole, **{name: counts[name] for name in cut}}
            spec = _spec("so_word", scale, chosen)
            lines.append(SweepLine(scheme, f"alpha = {alpha:g}", alpha, spec))
        lines.append(SweepLine(scheme, "alpha = 1", 1.0, _spec("so_word", scale, whole)))
    title = "Next-word prediction: test accuracy against the size of a client's model"
    x_label = "share of keys, alpha"
    return Sweep("word-alpha", title, "so_word", ("frontier",), x_label, tuple(lines), TRIALS)


def _divisor(scale: Scale) -> Sweep:
    """Accuracy when sums are divided by the cohort (Eq. 5), and by those who chose the key."""
    title = "2NN: updates divided by the cohort, or by those who chose the key"
    labels = {"cohort": "over the cohort", "choosers": "over those who chose the key"}
    lines = []
    for m, (over, label) in product(NEURONS[:-1], labels.items()):
        spec = _spec("emnist_2nn", scale, {"neuron": m}, {"mean_over": over})
        lines.append(SweepLine(f"m = {m}", label, m, spec))
    return Sweep("divisor", title, "emnist_2nn", ("curves",), _PER_CLIENT, tuple(lines), TRIALS)


def _rates(task: str) -> Callable[[Scale], Sweep]:
    """Validation metric over client and server rates, without select."""

    def sweep(scale: Scale) -> Sweep:
        usual = defaults_of(task)
        whole: dict[str, int | None] = dict.fromkeys(usual.keys)
        if task == "so_tag":  # the client's own words are as good as all (Eq. 2), and far fewer
            whole = {"word": usual.sizes["words"]}
        lines = []
        for client, server in product(RATES, RATES):
            changes = {"client.lr": client, "server.lr": server, "tuning": True}
            label = f"client {client:g}, server {server:g}"
            lines.append(SweepLine("", label, client, _spec(task, scale, whole, changes)))
        name = f"{task.replace('_', '-')}-rates"
        title = f"{task}: validation by client and server rate, without select"
        return Sweep(name, title, task, ("grid",), "client rate", tuple(lines), TRIALS)

    return sweep


SWEEPS: dict[str, Callable[[Scale], Sweep]] = {
    "tag-recall": _tag_recall,
    "tag-keys": _tag_keys,
    "emnist-cnn": _emnist("emnist_cnn", "filter", FILTERS, "CNN"),
    "emnist-2nn": _emnist("emnist_2nn", "neuron", NEURONS, "2NN"),
    "emnist-cnn-fixed": _fixed("emnist_cnn", "filter", FILTERS, "CNN"),
    "emnist-2nn-fixed": _fixed("emnist_2nn", "neuron", NEURONS, "2NN"),
    "word-alpha": _word_alpha,
    "divisor": _divisor,
    **{f"{task.replace('_', '-')}-rates": _rates(task) for task in SMALL},
}
"""Name -> sweep at a scale."""


def sweep_named(name: str, scale: Scale) -> Sweep:
    """Returns the sweep of that name.

    >>> len(sweep_named("emnist-cnn", "paper").lines)
    5
    """
    if name not in SWEEPS:
        raise InputError(f"no such sweep: got {name}; expected {', '.join(SWEEPS)}; choose one")
    return SWEEPS[name](scale)


DEMO_SIZES = {"words": 4000, "tags": 100}
DEMO_COHORT = 30


def demo_arms(rounds: int, seed: int) -> dict[str, RunSpec]:
    """Returns the lines of the demo, tag prediction on synthetic posts, by what a client's keys
    are; no select comes first."""

    def arm(words: int | None) -> RunSpec:
        return spec_of(
            "so_tag",
            sizes=DEMO_SIZES,
            keys={"word": {"count": words}},
            client={"lr": 2.0},
            server={"lr": 0.3},
            cohort={"size": DEMO_COHORT},
            rounds=rounds,
            evaluate_every=min(2, rounds),  # a demo of one round has a point to draw
            seed=seed,
        )

    return {
        "no select": arm(None),
        "all own words": arm(DEMO_SIZES["words"]),
        "top 100 words": arm(100),
        "top 30 words": arm(30),
    }


def demo_data(seed: int) -> Dataset:
    """Returns the posts that the demo trains on, made from a seed."""
    return make_synthetic("posts", seed, users=600, topics=20, **DEMO_SIZES)
