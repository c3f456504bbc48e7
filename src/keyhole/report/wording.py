"""Wording: names and numbers as a reader sees them, the same in figures and tables."""

from __future__ import annotations

import math

from keyhole.report.spread import Spread

__all__ = ["NOTHING", "is_share", "metric_name", "write_number", "write_share", "write_spread"]

NOTHING = "-"
"""Stands where there is no number."""

_SHARES = ("accuracy", "recall", "precision")


def is_share(metric: str) -> bool:
    """Whether a metric lies in 0..1 and is written in percent.

    >>> is_share("recall_at_5"), is_share("loss")
    (True, False)
    """
    return any(word in metric for word in _SHARES)


def metric_name(metric: str) -> str:
    """Returns a metric's name in words.

    >>> metric_name("recall_at_5"), metric_name("accuracy_without_oov")
    ('recall@5', 'accuracy without oov')
    """
    return metric.replace("_at_", "@").replace("_", " ")


def write_number(value: float) -> str:
    """Returns a setting as one would write it.

    >>> write_number(10000.0), write_number(0.001), write_number(2.5)
    ('10,000', '0.001', '2.5')
    """
    if value.is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}"


def write_share(value: float) -> str:
    """Returns a relative size, with the paper's two decimals unless they would hide the size.

    >>> write_share(0.5098), write_share(0.0010), write_share(1.0)
    ('0.51', '0.0010', '1.00')
    """
    if 0 < value < 0.05:
        return f"{value:.4f}" if value >= 0.0005 else f"{value:.1e}"
    return f"{value:.2f}"


def write_spread(spread: Spread | None, metric: str) -> str:
    """Returns mean ± deviation, in percent with the paper's two decimals where it is a share.

    >>> write_spread(Spread(0.7502, 0.0092, 5), "accuracy")
    '75.02 ± 0.92'
    >>> write_spread(Spread(1.25, None, 1), "loss")
    '1.250'
    """
    if spread is None:
        return NOTHING
    if not math.isfinite(spread.mean):
        return "not finite"
    scale, digits = (100, 2) if is_share(metric) else (1, 3)
    mean = f"{spread.mean * scale:.{digits}f}"
    if spread.deviation is None:
        return mean
    return f"{mean} ± {spread.deviation * scale:.{digits}f}"
