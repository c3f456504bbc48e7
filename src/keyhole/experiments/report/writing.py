"""Writes numbers and tables as text: Markdown, HTML, LaTeX and CSV, the same in every report."""

from __future__ import annotations

import csv
import html
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from keyhole.experiments.statistics import Spread

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


def shorten_names(names: Sequence[str]) -> list[str]:
    """Returns names without the words that all of them have; a name of such words alone stays.

    >>> shorten_names(["top9-films", "top9-films-mine.SUM", "top9-films-mine.PIR"])
    ['top9-films', 'mine.SUM', 'mine.PIR']
    """
    split = [name.split("-") for name in names]
    common = set(split[0]).intersection(*split[1:])
    left = ["-".join(word for word in words if word not in common) for words in split]
    short = [rest or name for rest, name in zip(left, names, strict=True)]
    return short if len(set(short)) == len(names) else list(names)


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


def write_interval(spread: Spread | None, scale: float = 1.0, *, signed: bool = False) -> str:
    """Returns mean ± half the 95 % interval, with the digits that the interval leaves.

    Args:
        scale: what numbers are multiplied by; 100 writes shares in percent.
        signed: whether a mean above zero has a sign.

    >>> write_interval(Spread(0.73126, 0.004, 5))
    '0.7313 ± 0.0050'
    >>> write_interval(Spread(0.73126, 0.004, 5), 100, signed=True)
    '+73.13 ± 0.50'
    >>> write_interval(Spread(12.3456, None, 1)), write_interval(Spread(0.5, None, 1), 100)
    ('12.35', '50.00')
    """
    if spread is None:
        return NOTHING
    if not math.isfinite(spread.mean):
        return "not finite"
    half, sign = spread.half_width, "+" if signed else ""
    mean = spread.mean * scale
    if not half:
        return f"{mean:{sign}#.4g}" + ("" if half is None else " ± 0")
    half *= scale
    digits = max(0, 1 - math.floor(math.log10(half)))
    return f"{mean:{sign}.{digits}f} ± {half:.{digits}f}"


def write_deviation(spread: Spread | None, scale: float = 1.0) -> str:
    """Returns the sample standard deviation, with three digits.

    >>> write_deviation(Spread(0.7502, 0.0092, 5), 100), write_deviation(Spread(1.0, None, 1))
    ('0.920', '-')
    """
    if spread is None or spread.deviation is None or not math.isfinite(spread.deviation):
        return NOTHING
    return f"{spread.deviation * scale:#.3g}" if spread.deviation else "0"


def write_kilobytes(count: float) -> str:
    """Writes bytes as KB, small ones with three digits.

    >>> write_kilobytes(1_234_567), write_kilobytes(48)
    ('1,234.6', '0.048')
    """
    kilobytes = count / 1000
    return f"{kilobytes:,.1f}" if kilobytes >= 10 else f"{kilobytes:.3g}"


def write_p_value(p: float | None) -> str:
    """Returns a p-value with the digits that are worth reading.

    >>> write_p_value(0.03519), write_p_value(2e-7), write_p_value(None)
    ('0.035', '<0.001', '-')
    """
    if p is None:
        return NOTHING
    return "<0.001" if p < 0.001 else f"{p:.2g}"


def markdown_table(rows: Sequence[Sequence[str]], names: int) -> str:
    """Returns rows, of which the first is the header, as Markdown; the first columns hold names,
    the others numbers, which are aligned to the right."""
    marks = ["---"] * names + ["---:"] * (len(rows[0]) - names)
    header, *others = (list(map(escape_markdown, row)) for row in rows)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, marks, *others))


def html_table(rows: Sequence[Sequence[str]], names: int, classes: Sequence[str]) -> str:
    """Returns rows, of which the first is the header, as HTML; `classes` are attributes of the
    others."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in rows[0])
    body = "\n".join(
        f"<tr{kind}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for kind, cells in zip(classes, rows[1:], strict=True)
    )
    return (
        f'<div class="table"><table class="names-{names}">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n"
    )


_LATEX = {
    **{mark: f"\\{mark}" for mark in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
}


def latex_table(rows: Iterable[Sequence[str]], names: int) -> str:
    """Returns rows, of which the first is the header, for LaTeX with the package booktabs; the
    first columns hold names, the others numbers, which are aligned to the right.

    >>> print(latex_table([("run", "auc"), ("a_1", "0.5 ± 0.1")], 1), end="")
    \\begin{tabular}{lr}
    \\toprule
    run & auc \\\\
    \\midrule
    a\\_1 & 0.5 $\\pm$ 0.1 \\\\
    \\bottomrule
    \\end{tabular}
    """
    header, *others = (list(map(_escape_latex, row)) for row in rows)
    body = "".join(f"{' & '.join(row)} \\\\\n" for row in others)
    return (
        f"\\begin{{tabular}}{{{'l' * names}{'r' * (len(header) - names)}}}\n\\toprule\n"
        f"{' & '.join(header)} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def _escape_latex(cell: str) -> str:
    """Text as LaTeX shows it; the minus of a number is one."""
    text = "".join(_LATEX.get(mark, mark) for mark in cell)
    return re.sub(r"^-(?=\d)", "$-$", text)


def csv_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Returns rows as CSV under a header; a cell is empty where there is nothing.

    >>> print(csv_table(["run", "mean"], [{"run": "a", "mean": None}]), end="")
    run,mean
    a,
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def escape_markdown(text: str) -> str:
    """Returns text as Markdown shows it: nothing in it is markup or ends a cell."""
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", html.escape(text, quote=False))
