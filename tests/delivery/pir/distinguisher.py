"""Telling two kinds of messages apart by their bits, or by the work that they make.

It finds bugs and proves nothing: that no linear rule tells messages apart does not mean that no
rule does. What hides keys is the argument in each scheme's docstring.
"""

import sys
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tests.helpers import ROOT

MAX_SD = 4.5
"""Of what a rule may get right beyond chance: passed by chance once in 300,000 times."""

FALSE_ALARM = 1e-5
"""How often one of all bits would look uneven by chance (Bonferroni: divided among the bits)."""


@dataclass(frozen=True)
class Verdict:
    """How far messages of two kinds can be told apart.

    Args:
        guessed: how much more than half of unseen messages a linear rule gets right, in standard
            deviations.
        uneven: the bits whose frequency differs between the kinds.
        biased: the bits that are not one half of the time.
        constant: the bits that never change.
    """

    guessed: float
    uneven: list[int]
    biased: list[int]
    constant: list[int]

    @property
    def tells_apart(self):
        return self.guessed > MAX_SD or bool(self.uneven)


def bits_of(bodies):
    """Bytes of equal length as bits, (n, 8 * length), the lowest of each byte first."""
    whole = np.frombuffer(b"".join(bodies), np.uint8).reshape(len(bodies), -1)
    return np.unpackbits(whole, axis=1, bitorder="little")


def compare(first, second):
    """Returns what tells two kinds of messages apart.

    Args:
        first, second: (n, d) bits, as many of either kind.
    """
    n, d = first.shape
    means = first.mean(axis=0), second.mean(axis=0)
    pooled = (means[0] + means[1]) / 2
    constant = (pooled == 0) | (pooled == 1)
    # Two frequencies of n draws each differ by a standard deviation of sqrt(2 p (1 - p) / n).
    spread = np.sqrt(np.where(constant, 1, 2 * pooled * (1 - pooled) / n))
    worst = NormalDist().inv_cdf(1 - FALSE_ALARM / (2 * d))
    uneven = np.abs(means[0] - means[1]) > worst * spread
    biased = (np.abs(pooled - 0.5) > worst * np.sqrt(0.25 / (2 * n))) & ~constant
    found = (np.flatnonzero(which).tolist() for which in (uneven, biased, constant))
    return Verdict(_guessed(first, second), *found)


def _guessed(first, second):
    """Fits linear rules to every other message and counts what they get right among the rest.

    The bits of a good message are independent, so the best rule weighs each by the difference of
    its means: all bits, for a leak that is spread out, or those that stand out, for one that is
    not. If both kinds are alike, a rule calls a share p of either one `first`: of n unseen messages
    of each kind it gets n p + n (1 - p) = n right, with variance 2 n p (1 - p) <= n / 2.
    """
    train, rest = (
        (_signs(first[::2]), _signs(second[::2])),
        (_signs(first[1::2]), _signs(second[1::2])),
    )
    means = train[0].mean(axis=0), train[1].mean(axis=0)
    everything = means[0] - means[1]
    stands_out = np.abs(everything) > 3 * np.sqrt(2 / len(train[0]))
    middle = (means[0] + means[1]) / 2
    return max(_right(*rest, weights, middle) for weights in (everything, everything * stands_out))


def _right(first, second, weights, middle):
    """What a rule gets right beyond half, in standard deviations."""
    n = len(first)
    is_first = (np.count_nonzero((some - middle) @ weights > 0) for some in (first, second))
    called, wrongly = is_first
    return (called - wrongly) / np.sqrt(n / 2)


def _signs(bits):
    return bits.astype(np.float32) * 2 - 1


def work_of(act, *folders):
    """Every line of these folders of the library that an act executes, in order, and the shape of
    every array that one function hands to the next."""
    private = tuple(str(ROOT / "src" / "keyhole" / folder) for folder in folders)
    lines = []

    def watch(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(private):
            return None
        held = frame.f_locals if event == "call" else {}
        shapes = [value.shape for value in held.values() if isinstance(value, np.ndarray)]
        lines.append((event, code.co_filename, frame.f_lineno, *shapes))
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        act()
    finally:
        sys.settrace(before)
    return lines
