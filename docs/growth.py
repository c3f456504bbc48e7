"""Draws docs/figures/growth.svg and writes the table of docs/growth.md, from what is kept of
`benchmarks/growth.py`.

python docs/growth.py            write them
python docs/growth.py --check    exit 1 if the page is not current; draws nothing
"""

import json
import re
import sys
from pathlib import Path

from matplotlib.ticker import FuncFormatter, LogLocator

from keyhole.cli.plan import write_bytes, write_seconds
from keyhole.experiments.report.style import (
    add_legend,
    drawing,
    new_figure,
    save_svg,
    scale_sizes,
    series_styles,
)
from keyhole.experiments.report.writing import NOTHING, markdown_table

DOCS = Path(__file__).parent
PAGE, FIGURE = DOCS / "growth.md", DOCS / "figures" / "growth.svg"
KEPT = DOCS.parent / "benchmarks" / "results" / "growth.json"
AXES = {
    "population": "clients that there are",
    "cohort": "clients of a round",
    "keys_per_client": "keys of a client",
    "num_keys": "keys of the model",
    "slice_bytes": "bytes of a slice",
}
# A label, a unit, and how far two slopes are apart, as a factor.
ROWS = {"cpu": ("CPU, ms", 1e3, 1.9), "memory": ("memory, MB", 1e-6, 1.25)}
TABLE = re.compile(r"(<!-- growth -->\n)(.*?)(<!-- /growth -->)", re.S)


def read_kept():
    return json.loads(KEPT.read_text())


def lines_of(kept):
    return [cell for cell in kept["cells"] if "axis" in cell]


def at(line):
    return [place[line["axis"]] for place in line["places"]]


def draw(lines):
    """CPU above memory, a column for each axis; a number at the end of a line is its slope."""
    styles = series_styles(list(dict.fromkeys(line["of"] for line in lines)))
    with drawing():
        figure = new_figure(5.6, 12.0)
        panels = figure.subplots(len(ROWS), len(AXES), sharex="col", sharey="row")
        for (what, (label, *_)), row in zip(ROWS.items(), panels, strict=True):
            for axis, axes in zip(AXES, row, strict=True):
                axes.set(xscale="log", yscale="log", xmargin=0.1)
                shown = [line for line in lines if line["axis"] == axis and what in line["slopes"]]
                draw_lines(axes, shown, what, styles)
            row[0].set_ylabel(label)
            scale_sizes(row[0].yaxis, (1.0,))
        for title, axes in zip(AXES.values(), panels[-1], strict=True):
            axes.set_xlabel(title)
            axes.xaxis.set_major_locator(LogLocator(numticks=5))
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_short(value)))
        drawn = {one.get_label(): one for axes in panels.flat for one in axes.get_lines()}
        add_legend(figure, [drawn[name] for name in styles], list(styles))
    return figure


def draw_lines(axes, lines, what, styles):
    """Lines, and their slopes beside their ends, where none runs into another."""
    (_, unit, apart), lowest = ROWS[what], 0.0
    for line in sorted(lines, key=lambda line: line["spent"][-1][what]):
        values, style = [unit * one[what] for one in line["spent"]], styles[line["of"]]
        axes.plot(at(line), values, label=line["of"], **style.line())
        place = max(values[-1], lowest)
        lowest = apart * place
        end, slope = (at(line)[-1], place), write_slope(line["slopes"][what])
        axes.annotate(slope, end, (7, -3), textcoords="offset points", size=8, color=style.color)


def write_slope(slope):
    return f"{round(slope, 2) + 0.0:.2f}"  # no -0.00


def in_short(count):
    """10, 1k, 1M, 1G: of a power of ten."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def table_of(kept):
    """A row for each line, and where the numbers are from."""
    rows = [("", "over", "from", "to", "CPU", "slope", "memory", "slope")]
    for line in lines_of(kept):
        first, last = line["spent"][0], line["spent"][-1]
        ends = [f"{n:,}" for n in (at(line)[0], at(line)[-1])]
        cpu = " to ".join(write_seconds(one["cpu"]) for one in (first, last))
        held = " to ".join(write_bytes(one["memory"]) for one in (first, last))
        slopes = [write_slope(value) for value in line["slopes"].values()]
        memory = [held, slopes[1]] if len(slopes) > 1 else [NOTHING, NOTHING]
        rows.append((line["of"], AXES[line["axis"]], *ends, cpu, slopes[0], *memory))
    machine = kept["machine"]
    told = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['date'][:10]}, commit "
        f"{machine['commit']}: `python benchmarks/growth.py --json`"
    )
    return f"\n{markdown_table(rows, 2)}\n{told}\n\n"


def page_of(text, kept):
    return TABLE.sub(lambda found: found[1] + table_of(kept) + found[3], text)


def main():
    kept, text = read_kept(), PAGE.read_text()
    page = page_of(text, kept)
    if sys.argv[1:] == ["--check"]:
        sys.exit("not current: growth.md; run make figures" if page != text else 0)
    PAGE.write_text(page)
    save_svg(draw(lines_of(kept)), FIGURE)


if __name__ == "__main__":
    main()
