"""Draws docs/figures/growth.svg and writes the table of docs/growth.md, from what is kept of
`benchmarks/growth.py`.

python docs/growth.py            write them
python docs/growth.py --check    exit 1 if the page is not current; draws nothing
"""

import json
import re
import sys
from pathlib import Path

from keyhole.cli.plan import write_bytes, write_seconds
from keyhole.experiments.report.style import (
    add_legend,
    drawing,
    new_figure,
    save_svg,
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
ROWS = {"cpu": ("CPU, ms", 1e3), "memory": ("memory, MB", 1e-6)}
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
        figure = new_figure(5.6, 13.0)
        panels = figure.subplots(len(ROWS), len(AXES), sharex="col", sharey="row")
        for (what, (label, _)), row in zip(ROWS.items(), panels, strict=True):
            row[0].set_ylabel(label)
            for axis, axes in zip(AXES, row, strict=True):
                axes.set(xscale="log", yscale="log", xmargin=0.28)
                for line in lines:
                    if line["axis"] == axis and what in line["slopes"]:
                        draw_line(axes, line, what, styles[line["of"]])
        for title, axes in zip(AXES.values(), panels[-1], strict=True):
            axes.set_xlabel(title)
        lines_drawn = {one.get_label(): one for axes in panels.flat for one in axes.get_lines()}
        add_legend(figure, [lines_drawn[name] for name in styles], list(styles))
    return figure


def draw_line(axes, line, what, style):
    values = [ROWS[what][1] * one[what] for one in line["spent"]]
    axes.plot(at(line), values, label=line["of"], **style.line())
    axes.annotate(
        f"{line['slopes'][what]:.2f}",
        (at(line)[-1], values[-1]),
        (6, -3),
        textcoords="offset points",
        size=8,
        color=style.color,
    )


def table_of(kept):
    """A row for each line, and where the numbers are from."""
    rows = [("", "over", "from", "to", "CPU", "slope", "memory", "slope")]
    for line in lines_of(kept):
        first, last = line["spent"][0], line["spent"][-1]
        ends = [f"{n:,}" for n in (at(line)[0], at(line)[-1])]
        cpu = " to ".join(write_seconds(one["cpu"]) for one in (first, last))
        held = " to ".join(write_bytes(one["memory"]) for one in (first, last))
        slopes = [f"{value:.2f}" for value in line["slopes"].values()]
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
