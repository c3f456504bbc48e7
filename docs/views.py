"""Says which kept runs stand in which figure and table of docs/results.md.

A view is a figure of the page with its table. Its lines come from one or more sweeps of runs/,
whose finished runs are in docs/results/.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from keyhole.experiments.report.kept import KeptSweep
from keyhole.experiments.report.results import Series, SweepResults


@dataclass(frozen=True)
class Part:
    """The lines that a view takes from a sweep.

    Args:
        sweep: its name.
        panel: of its lines; {panel}, {label} and {value} stand for the sweep's own and for what a
            label has behind its equals sign, {first} for the same of the panel.
        label: likewise.
        only: the values that are taken; all where it is empty.
        of: the panels of the sweep whose lines are taken, by their values; all where it is empty.
    """

    sweep: str
    panel: str = "{panel}"
    label: str = "{label}"
    only: tuple[str, ...] = ()
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class View:
    """A figure and its table.

    Args:
        name: of its block on the page; the paper's numbers are found by it (`report/paper.py`).
        figures: kinds, as a sweep has them.
        parts: whose lines it has, in order.
        words: values that are written otherwise, such as "none" for all keys.
        matrix: whether the table has panels as rows and labels as columns.
        cost: what a cell of a matrix says beside the metric: bytes or epsilon.
    """

    name: str
    title: str
    figures: tuple[str, ...]
    x_label: str
    parts: tuple[Part, ...]
    words: Mapping[str, str] = field(default_factory=dict)
    matrix: bool = False
    cost: str = "bytes"

    @property
    def sweeps(self) -> list[str]:
        return [part.sweep for part in self.parts]

    def compose(self, kept: Mapping[str, KeptSweep]) -> SweepResults | None:
        """Returns its lines, as one sweep; None while no run of any is kept."""
        found = [kept[part.sweep] for part in self.parts if part.sweep in kept]
        if not found:
            return None
        lines = tuple(
            line for part in self.parts if part.sweep in kept for line in self._of(part, kept)
        )
        return replace(
            found[0].results,
            name=self.name,
            title=self.title,
            figures=self.figures,
            x_label=self.x_label,
            lines=lines,
            trials=min(sweep.trials for sweep in found),
        )

    def _of(self, part: Part, kept: Mapping[str, KeptSweep]) -> Iterator[Series]:
        """The lines of a part under the names of the view."""
        for line in kept[part.sweep].results.lines:
            value, first = _value(line.label), _value(line.panel)
            x = line.x if "{first}" not in part.label else _number(first)
            if (part.only and value not in part.only) or (part.of and first not in part.of):
                continue
            told = {
                "panel": line.panel,
                "label": line.label,
                "value": self.words.get(value, value),
                "first": self.words.get(first, first),
            }
            panel, label = part.panel.format(**told), part.label.format(**told)
            yield Series(panel, label, x, line.arm, line.metric, line.trials)


def _value(text: str) -> str:
    """What stands behind the last equals sign."""
    return text.rpartition(" = ")[2]


def _number(text: str) -> float | None:
    """The number that a text is; None of another."""
    try:
        return float(text)
    except ValueError:
        return None


PER_CLIENT = "keys per client, m"
COHORT, CHOOSERS = "over the cohort", "over those who chose the key"
INKS = {"ink1": "ink is 1", "ink0": "the paper's pixels"}


def _by_ink(name: str, m: str = "m = {value}") -> tuple[Part, ...]:
    """The sweep NAME-ink1 and NAME-ink0, a panel for each."""
    return tuple(Part(f"{name}-{ink}", title, m) for ink, title in INKS.items())


def _against(
    one: tuple[str, ...], label: str, other: str, other_label: str, only: tuple[str, ...]
) -> tuple[Part, ...]:
    """A panel for each m, with a line of one sweep and a line of another."""
    firsts = (Part(sweep, "m = {value}", label, only) for sweep in one)
    return *firsts, Part(other, "m = {value}", other_label, only)


def _as_is(name: str) -> tuple[Part, ...]:
    return (Part(name),)


_CNN_ALL, _2NN_ALL = {"none": "64"}, {"none": "200"}
_MS = ("10", "50", "100")
STRATEGIES = {
    "independent": "random (federated dropout)",
    "rolling": "rolling (FedRolex)",
    "nested": "nested (HeteroFL, all alike)",
    "importance": "importance",
    "top": "structured: Top",
    "random": "structured: Random",
    "random-top": "structured: Random Top",
    "tf-idf": "structured: tf-idf",
}

PAPER = (
    View(
        "emnist-cnn",
        "CNN: test accuracy by random keys per client m",
        ("curves",),
        PER_CLIENT,
        (*_by_ink("cnn-small"), *_by_ink("cnn-large")),
        _CNN_ALL,
    ),
    View(
        "emnist-2nn",
        "2NN: test accuracy by random keys per client m",
        ("curves",),
        PER_CLIENT,
        _by_ink("2nn"),
        _2NN_ALL,
    ),
    View(
        "divisor",
        "2NN: updates divided by the cohort, or by those who chose the key",
        ("curves",),
        PER_CLIENT,
        _against(("2nn-ink1",), COHORT, "2nn-choosers-ink1", CHOOSERS, _MS),
    ),
    View(
        "divisor-ink0",
        "2NN, the paper's pixels: divided by the cohort, or by those who chose the key",
        ("curves",),
        PER_CLIENT,
        _against(("2nn-ink0",), COHORT, "2nn-choosers-ink0", CHOOSERS, _MS),
    ),
    View(
        "cnn-divisor",
        "CNN: updates divided by the cohort, or by those who chose the key",
        ("curves",),
        PER_CLIENT,
        _against(
            ("cnn-small-ink1", "cnn-large-ink1"),
            COHORT,
            "cnn-choosers-ink1",
            CHOOSERS,
            ("4", "8", "16"),
        ),
    ),
    View(
        "emnist-cnn-fixed",
        "CNN: keys drawn by each client, or once for all clients of a round",
        ("curves",),
        PER_CLIENT,
        _against(
            ("cnn-small-ink1", "cnn-large-ink1"),
            "independent",
            "cnn-fixed-ink1",
            "fixed",
            ("4", "8", "16", "32"),
        ),
    ),
    View(
        "emnist-2nn-fixed",
        "2NN: keys drawn by each client, or once for all clients of a round",
        ("curves",),
        PER_CLIENT,
        _against(("2nn-ink1",), "independent", "2nn-fixed-ink1", "fixed", _MS),
    ),
    View(
        "emnist-2nn-fixed-ink0",
        "2NN, the paper's pixels: keys drawn by each client, or once for all clients of a round",
        ("curves",),
        PER_CLIENT,
        _against(("2nn-ink0",), "independent", "2nn-fixed-ink0", "fixed", _MS),
    ),
    View(
        "tag-recall",
        "Tags: recall@5 by vocabulary n and keys per client m",
        ("curves", "final"),
        PER_CLIENT,
        _as_is("tag-recall"),
    ),
    View(
        "tag-keys",
        "Tags: recall@5 by choice of keys",
        ("curves",),
        "choice of keys",
        _as_is("tag-keys"),
    ),
    View(
        "word-alpha",
        "Next word: test accuracy against the size of a client's model",
        ("frontier",),
        "share of keys, alpha",
        _as_is("word-alpha"),
    ),
)
"""The paper's figures and tables."""

_SMALLER = "broadcast of a smaller model"
SUITE = (
    View(
        "suite-2nn",
        "2NN",
        ("bytes",),
        "m",
        (
            Part("suite-2nn-broadcast", _SMALLER, "m = {value}"),
            Part("suite-2nn-cohort", "random, over the cohort (Eq. 5)", "m = {value}", _MS),
            Part("suite-2nn", "{first}", "m = {value}"),
            Part("suite-2nn-cohort", "broadcast", "m = {value}", ("none",)),
        ),
        STRATEGIES | {"none": "200"},
        matrix=True,
    ),
    View(
        "suite-tags",
        "Tags",
        ("bytes",),
        "m",
        (
            Part("suite-tags-broadcast", _SMALLER, "m = {value}", ("30", "100", "300", "1000")),
            Part("suite-tags", "{first}", "m = {value}"),
            Part("suite-tags-broadcast", "broadcast", "m = {value}", ("10000",)),
        ),
        STRATEGIES,
        matrix=True,
    ),
    View(
        "suite-word",
        "Next word",
        ("bytes",),
        "m",
        (
            Part("suite-word-broadcast", _SMALLER, "half"),
            Part("suite-word-structured", "structured words", "{value} words"),
            Part("suite-word-random", "random neurons", "{value} neurons", ("10", "256")),
            Part("suite-word-mixed", "mixed", "half"),
            Part("suite-word-mixed-tenth", "mixed", "a tenth"),
            Part("suite-word-random", "broadcast", "all", ("none",)),
        ),
        matrix=True,
    ),
)
"""The benchmark: equal bytes, one table for each task."""

_BUCKETS = ("frequency", "dealt", "together")
_BITS = {"on-demand": "32 bits", "parts:HALF": "16 bits", "parts:EIGHT": "8 bits"}
_KEYS = {"50": "select, m = 50", "none": "broadcast"}


def _architecture_parts() -> Iterator[Part]:
    """A panel for each kind of key, its last line the whole model."""
    for sweep, panel in {
        "neurons": "2NN: neurons",
        "filters": "CNN: filters",
        "heads": "attention: heads",
        "experts": "mixture: experts",
        "ranks": "adapters: ranks",
    }.items():
        yield Part(sweep, panel, "m = {value}")
    yield Part("suite-tags", "logistic regression: own words", "m = {value}", of=("top",))
    yield Part("suite-tags-broadcast", "logistic regression: own words", "all", ("10000",))
    yield Part("suite-word-structured", "transformer: own words", "m = {value}")
    yield Part("suite-word-random", "transformer: own words", "all", ("none",))
    yield Part("suite-word-random", "transformer: neurons", "m = {value}")


def _bucket_parts() -> Iterator[Part]:
    """A panel for each way to put words into buckets, beginning with single words."""
    names = {"frequency": "by frequency", "dealt": "dealt out", "together": "of the same users"}
    for order, panel in names.items():
        yield Part("buckets", panel, "1 word", ("top",))
        for size in (10, 50):
            yield Part("buckets", panel, f"{size} words", (f"parts:{order.upper()}_{size}",))


QUESTIONS = (
    View(
        "architectures",
        "What is left of a model whose clients hold a part of it",
        ("share",),
        PER_CLIENT,
        tuple(_architecture_parts()),
        {"none": "all"},
    ),
    View(
        "buckets",
        "Tags: buckets of words, 300 words a client",
        ("reached",),
        "words in a bucket",
        tuple(_bucket_parts()),
        matrix=True,
    ),
    View(
        "softmax",
        "Next word: words drawn for the softmax, half of 504 words a client",
        ("bytes",),
        "words",
        (
            Part("softmax-none", "own words alone", "504 words"),
            Part("softmax-corrected", "half drawn, corrected", "504 words"),
            Part("softmax-uncorrected", "half drawn, not corrected", "504 words"),
        ),
        matrix=True,
    ),
    View(
        "dropouts",
        "2NN: clients lost before they send an update",
        ("reached",),
        "share of clients that are lost",
        (Part("dropouts", "{value}", "{first}"),),
        _KEYS,
        matrix=True,
    ),
    View(
        "staleness",
        "2NN: asynchronous rounds of 20 updates",
        ("reached",),
        "clients at work",
        (Part("staleness", "{first}", "{value}"),),
        _KEYS,
        matrix=True,
    ),
    View(
        "privacy",
        "2NN: accuracy against epsilon",
        ("epsilon",),
        "noise multiplier",
        (
            Part("privacy-all-rows", "{value}, noise on all rows", "z = {first}"),
            Part("privacy-correlated", "{value}, correlated noise", "z = {first}"),
            Part("privacy-thresholded", "select, m = 50, thresholded rows", "z = {value}"),
        ),
        _KEYS,
        matrix=True,
        cost="epsilon",
    ),
    View(
        "classes",
        "2NN: half of the clients hold 100 neurons, half hold 25",
        ("bytes",),
        "m",
        (
            Part("suite-2nn", "random, all alike", "m = {value}", ("50", "100"), ("independent",)),
            Part("suite-2nn", "nested, all alike", "m = {value}", ("50", "100"), ("nested",)),
            Part("classes", "random", "100 and 25", ("parts:CLASSES_RANDOM",)),
            Part("classes", "rolling (FedRolex)", "100 and 25", ("parts:CLASSES_ROLLING",)),
            Part("classes", "nested (HeteroFL)", "100 and 25", ("parts:CLASSES_NESTED",)),
        ),
        matrix=True,
    ),
    View(
        "quantised",
        "2NN: slices in fewer bits",
        ("bytes",),
        "bits",
        (Part("quantised", "{first}", "{value}"),),
        _KEYS | _BITS | {"parts:FOUR": "4 bits"},
        matrix=True,
    ),
    View(
        "strategies-2nn",
        "2NN: ways to choose neurons",
        ("bytes",),
        "m",
        (
            Part("suite-2nn", "{first}", "m = {value}"),
            Part("strategies-2nn", "{first}", "m = {value}"),
        ),
        STRATEGIES,
        matrix=True,
    ),
    View(
        "strategies-tags",
        "Tags: ways to choose words",
        ("bytes",),
        "m",
        (
            Part("suite-tags", "{first}", "m = {value}", ("30", "100", "300")),
            Part("strategies-tags", "{first}", "m = {value}"),
        ),
        STRATEGIES,
        matrix=True,
    ),
)
"""What the paper leaves open."""
