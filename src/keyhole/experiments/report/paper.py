"""Holds what the paper says of each of its experiments, to stand beside our numbers.

Numbers are those of its Tables 2 and 3, means and standard deviations over 5 trials at its scale.
Its figures print no numbers; what its text says of them is told here in our words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class PaperNumber:
    """One row of a table of the paper: test accuracy in percent, its deviation over 5 trials, and
    client over server size with two decimals."""

    mean: float
    deviation: float
    relative_size: float
    source: str

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.deviation:.2f}"


@dataclass(frozen=True)
class Finding:
    """What the paper says of one experiment.

    Args:
        numbers: m -> row of a table, where there is one.
        only: word that a line's name must hold to be the setting of the table.
    """

    source: str
    text: str
    numbers: Mapping[int, PaperNumber] = field(default_factory=dict)
    only: str = ""


_CNN = {  # m -> a row
    4: PaperNumber(75.02, 0.92, 0.08, "Table 2"),
    8: PaperNumber(81.92, 0.10, 0.14, "Table 2"),
    16: PaperNumber(84.15, 0.12, 0.26, "Table 2"),
    32: PaperNumber(85.66, 0.15, 0.51, "Table 2"),
    64: PaperNumber(86.71, 0.06, 1.00, "Table 2"),
}
_2NN = {
    10: PaperNumber(14.17, 0.78, 0.11, "Table 3"),
    50: PaperNumber(50.61, 0.93, 0.30, "Table 3"),
    100: PaperNumber(63.97, 0.32, 0.53, "Table 3"),
    200: PaperNumber(74.93, 0.13, 1.00, "Table 3"),
}

FINDINGS: Mapping[str, Finding] = MappingProxyType(
    {
        "tag-recall": Finding(
            "Figures 2 and 3",
            "100 keys cost recall, but going from 1,000 keys to 10,000 gains little or nothing: "
            "clients can hold a tenth of the model without loss. With m held fixed, a larger "
            "vocabulary n generally raises recall and costs the clients nothing.",
        ),
        "tag-keys": Finding(
            "Figure 4",
            "All three ways end at similar recall, and Top is ahead of Random and Random Top "
            "in every phase of training. The trials of Random differ most, and go on differing; "
            "Random Top is hardly better than Random.",
        ),
        "emnist-cnn": Finding(
            "Figure 5 (left) and Table 2",
            "Accuracy grows with m, and many values of m come close to the whole model.",
            _CNN,
        ),
        "emnist-2nn": Finding(
            "Figure 5 (right) and Table 3",
            "Accuracy falls steeply as m shrinks, far more than with the CNN.",
            _2NN,
        ),
        "emnist-cnn-fixed": Finding(
            "Figure 6 (left)",
            "One set of keys for all clients of a round costs the CNN no accuracy to speak of.",
            _CNN,
            only="independent",
        ),
        "emnist-2nn-fixed": Finding(
            "Figure 6 (right)",
            "One set of keys for all clients of a round lowers the accuracy of the 2NN further.",
            _2NN,
            only="independent",
        ),
        "word-alpha": Finding(
            "Figure 7",
            "Random keys alone lose accuracy quickly and save little size. Structured keys keep "
            "accuracy better, down to a size below which they cannot go. Mixed keys match "
            "structured ones for large alpha and, for small alpha, extend the frontier to sizes "
            "that the others do not reach.",
        ),
        "divisor": Finding(
            "Equation 5",
            "The paper divides every key's sum by the number of clients in the cohort and compares "
            "no other divisor.",
            _2NN,
            only="over the cohort",
        ),
        "rates": Finding(
            "Section 5.1",
            "Client and server rate are tuned over 0.001 to 10 in powers of ten, without select, "
            "by mean validation metric over 5 trials. The text does not print the chosen rates.",
        ),
    }
)
"""Name of a sweep -> what the paper says of it."""


def find_finding(sweep: str) -> Finding | None:
    """Returns what the paper says of a sweep; the rates of every task are one experiment.

    >>> find_finding("so-tag-rates").source
    'Section 5.1'
    """
    return FINDINGS.get("rates" if sweep.endswith("-rates") else sweep)


def find_number(sweep: str, panel: str, label: str) -> PaperNumber | None:
    """Returns the paper's number for a line of a sweep, or None if it prints none; the label or the
    panel names m, as in "m = 4".

    >>> print(find_number("emnist-cnn", "CNN", "m = 4"))
    75.02 ± 0.92
    >>> find_number("emnist-cnn-fixed", "m = 4", "fixed") is None
    True
    """
    finding, name = find_finding(sweep), f"{panel}, {label}"
    named = re.search(r"\bm\s*=\s*([\d,]*\d)", name)
    if finding is None or named is None or finding.only not in name.lower():
        return None
    return finding.numbers.get(int(named[1].replace(",", "")))


def place_in_paper(sweep: str) -> tuple[int, str]:
    """Returns what sorts sweeps as the paper tells them; those it does not have come last.

    >>> sorted(["mine", "word-alpha", "tag-recall"], key=place_in_paper)
    ['tag-recall', 'word-alpha', 'mine']
    """
    findings = list(FINDINGS.values())
    finding = find_finding(sweep)
    return (len(findings) if finding is None else findings.index(finding), sweep)
