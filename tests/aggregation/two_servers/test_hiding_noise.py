"""What docs/trust.md says of the noise of one aggregator is what the normal distribution gives."""

from math import erfc, sqrt
from pathlib import Path

import numpy as np
import pytest

from keyhole.aggregation.shares import HIDING_NOISE

TRUST = Path(__file__).parents[3] / "docs/trust.md"


def wrong(distance, noise):
    """How often the best guess between two sums is wrong, of which one is this much larger."""
    return erfc(distance / noise / 2 / sqrt(2)) / 2


@pytest.mark.parametrize(
    "told",
    [
        f"about {100 * wrong(1, HIDING_NOISE):.0f} % of cases",
        f"with 0.1 in 1 of {1e-6 / wrong(1, 0.1):.1f} million",
        f"two opposite updates it is 1 of {1 / wrong(2, HIDING_NOISE):.0f} ",
    ],
)
def test_how_often_a_guess_is_wrong_is_told(told):
    assert told in TRUST.read_text()


def test_the_best_guess_is_wrong_as_often_as_that():
    rng = np.random.default_rng(0)
    was_sent = rng.integers(2, size=400_000)
    seen = was_sent + HIDING_NOISE * rng.normal(size=len(was_sent))
    assert np.mean((seen > 0.5) != was_sent) == pytest.approx(wrong(1, HIDING_NOISE), abs=0.003)
