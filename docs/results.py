"""Keeps finished runs, and makes the figures and numbers of docs/results.md from what is kept.

python docs/results.py                            draw every figure, write tables and numbers
python docs/results.py --check                    exit 1 if a page is not current; draws nothing
python docs/results.py keep OUT --commit COMMIT   keep the finished runs of a folder, then draw
python docs/results.py same OUT                   exit 1 if a run of a folder has other numbers
python docs/results.py suite OUT                  the benchmark's tables with your sweeps

A table or figure stands between `<!-- view: NAME -->` and `<!-- /view -->`, a number between
`<!--=SWEEP/ARM-->` and `<!--/-->`: the mean over trials on the test data, in percent where it is a
share. ARM is the end of the name of the folder that keeps the runs. A difference is written
`<!--=SWEEP/ARM - SWEEP/ARM-->`, in points; what the first moves for each byte of the second,
`<!--=SWEEP/ARM : SWEEP/ARM-->`.
"""

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT / "runs")]  # docs/ is no package; sweeps name parts in runs/
from headline import draw_headline  # noqa: E402
from views import PAPER, QUESTIONS, SUITE, Part, View  # noqa: E402

from keyhole.experiments.grid import read_grid  # noqa: E402
from keyhole.experiments.report.figures import draw_sweep  # noqa: E402
from keyhole.experiments.report.kept import (  # noqa: E402
    KeptSweep,
    keep_sweeps,
    read_kept,
    write_kept,
)
from keyhole.experiments.report.results import Series  # noqa: E402
from keyhole.experiments.report.style import save_svg  # noqa: E402
from keyhole.experiments.report.tables import make_table  # noqa: E402
from keyhole.experiments.report.writing import (  # noqa: E402
    NOTHING,
    is_share,
    markdown_table,
    write_interval,
)

KEPT, FIGURES = DOCS / "results", DOCS / "figures"
PAGES = (DOCS / "results.md", ROOT / "README.md")
VIEWS = {view.name: view for view in (*PAPER, *SUITE, *QUESTIONS)}
ALL_TASKS = "results-bytes"
# Sweeps that keyhole has by name: small real data, and trials; others are files of runs/.
NAMED = {
    "tag-recall": ("stackexchange", 5),
    "tag-keys": ("stackexchange", 5),
    "word-alpha": ("stackexchange", 3),
    "so-tag-rates": ("stackexchange", 1),
    "emnist-2nn-rates": ("femnist", 1),
    "emnist-cnn-rates": ("femnist", 1),
}
VIEW = re.compile(r"(<!-- view: ([\w-]+) -->\n)(.*?)(<!-- /view -->)", re.S)
NUMBER = re.compile(r"(<!--=([^>]+)-->)([^<]*)(<!--/-->)")


def files_of_runs() -> dict[str, Path]:
    return {path.stem: path for path in sorted((ROOT / "runs").rglob("*.toml"))}


def commands() -> dict[str, str]:
    """Sweep -> the command that runs it, or goes on with it."""
    files = files_of_runs()
    own = {name: f"keyhole sweep {path.relative_to(ROOT)}" for name, path in files.items()}
    return own | {
        name: f"keyhole sweep {name} --data {data} --trials {trials}"
        for name, (data, trials) in NAMED.items()
    }


def planned_trials(name: str) -> int:
    """How many trials the command of a sweep runs; 0 of a sweep that this page does not know."""
    if name in NAMED:
        return NAMED[name][1]
    file = files_of_runs().get(name)
    return read_grid(file).trials if file else 0


def read_all() -> dict[str, KeptSweep]:
    found = (read_kept(path) for path in sorted(KEPT.glob("*.json")))
    return {sweep.sweep: sweep for sweep in found}


def figure_names(view: View) -> list[str]:
    return [f"results-{view.name}-{kind}.svg" for kind in view.figures]


def block_of(view: View, kept: dict[str, KeptSweep]) -> str:
    """What the page shows of a view: figures, table, and where the numbers are from."""
    sweep, text = view.compose(kept), ""
    if sweep is not None:
        pictures = [f"![{view.title}](figures/{name})\n" for name in figure_names(view)]
        table = matrix_of(sweep, view.cost) if view.matrix else plain_table(sweep)
        text = "\n".join(["", *pictures, table, ""])
    names = list(dict.fromkeys(view.sweeps))
    return text + "\n".join([*(origin_of(name, kept) for name in names), "", ""])


def plain_table(sweep):
    table = make_table(sweep)
    return markdown_table([table.header, *table.cells], table.names)


def matrix_of(sweep, cost):
    """Panels as rows; each cell has the test metric, and what it costs."""
    unit = 100.0 if is_share(sweep.metric) else 1.0
    columns = list(dict.fromkeys(line.label for line in sweep.lines))
    rows = [("", *columns)]
    for panel, lines in sweep.panels.items():
        by_label = {line.label: line for line in lines}
        rows.append((panel, *(cell_of(by_label.get(column), unit, cost) for column in columns)))
    return markdown_table(rows, 1)


def cell_of(line, unit, cost):
    if line is None or line.test is None or line.costs is None:
        return NOTHING
    epsilon = line.costs.epsilon
    spent = "no bound" if epsilon in (None, math.inf) else f"epsilon {epsilon:,.3g}"
    told = {"bytes": f"{line.costs.kilobytes:,.0f} KB", "epsilon": spent}[cost]
    return f"{write_interval(line.test, unit)} ({told})"


def origin_of(name: str, kept: dict[str, KeptSweep]) -> str:
    """A line on a sweep: data, seed, days, commits, finished runs, command."""
    command, sweep = commands()[name], kept.get(name)
    if sweep is None:
        return f"- `{name}` has not been run yet: `{command}`"
    days, commits = sorted({r.date for r in sweep.runs}), sorted({r.commit for r in sweep.runs})
    planned = sweep.trials * len({line.arm for line in sweep.lines})
    missing = "" if len(sweep.runs) >= planned else ", the others have not been run yet"
    data = f"{sweep.dataset['name']} (`{sweep.dataset['sha256'][:12]}`)"
    when = " to ".join(dict.fromkeys([days[0], days[-1]]))
    minutes = f"{sum(run.seconds for run in sweep.runs) / 60:,.0f}"
    taken = f"{minutes} minute{'' if minutes == '1' else 's'}"
    return (
        f"- `{name}`: {data}, seed {sweep.spec['seed']}, {len(sweep.runs)} of {planned} runs"
        f"{missing}; "
        f"{when}, commit {', '.join(commits)}, {taken} in all: `{sweep.command}`"
    )


def number_of(asked: str, kept: dict[str, KeptSweep]) -> str:
    """The number of a mark, of the difference of two, or of how many bytes one moves for each byte
    of the other."""
    if " : " in asked:
        one, other = (line_of(each, kept).costs.kilobytes for each in asked.split(" : "))
        return f"{one / other:.2g}"
    first, *others = (line_of(each, kept) for each in asked.split(" - "))
    unit = 100.0 if is_share(first.metric) else 1.0
    mean = first.test.mean - sum(other.test.mean for other in others)
    return f"{unit * mean:.{1 if unit > 1 else 3}f}"


def line_of(asked: str, kept: dict[str, KeptSweep]) -> Series:
    name, _, arm = asked.strip().partition("/")
    if name not in kept:
        sys.exit(f"no such kept sweep: got {name}; expected one of docs/results/; keep it first")
    lines = kept[name].results.lines
    found = {line.arm: line for line in lines if line.arm.endswith(arm) and line.test}
    if len(found) != 1:
        arms = ", ".join(line.arm for line in lines if line.test)
        sys.exit(f"{asked} names {len(found)} arms: got {arm!r}; expected the end of one of {arms}")
    return next(iter(found.values()))


def page_of(text: str, kept: dict[str, KeptSweep]) -> str:
    """A page with its tables and numbers as they are kept."""
    text = VIEW.sub(lambda m: m[1] + block_of(VIEWS[m[2]], kept) + m[4], text)
    return NUMBER.sub(lambda m: m[1] + number_of(m[2], kept) + m[4], text)


def figures_of(kept: dict[str, KeptSweep]):
    """(name of a file, figure): one for each kind of each view, and that of all tasks."""
    for view in VIEWS.values():
        sweep = view.compose(kept)
        if sweep is not None:
            yield from zip(figure_names(view), draw_sweep(sweep).values(), strict=True)
    tasks = {view.name: sweep for view in SUITE if (sweep := view.compose(kept))}
    if len(tasks) == len(SUITE):
        yield f"{ALL_TASKS}.svg", draw_headline(tasks)


def draw(kept: dict[str, KeptSweep], to: Path) -> None:
    for name, figure in figures_of(kept):
        save_svg(figure, to / name)


def keep(out: Path, commit: str) -> None:
    KEPT.mkdir(exist_ok=True)
    for sweep in keep_sweeps(out, commit, commands()):
        trials = max(sweep.trials, planned_trials(sweep.sweep))
        path = write_kept(msgspec.structs.replace(sweep, trials=trials), KEPT)
        print(f"kept {len(sweep.runs)} runs in {path.relative_to(ROOT)}")


def check_same(out: Path) -> None:
    """Compares runs of a folder with those kept, to the digit."""
    kept, differing, count = read_all(), [], 0
    for sweep in keep_sweeps(out, "", commands()):
        if (known := kept.get(sweep.sweep)) is None:
            continue
        specs = {line.arm: sweep.spec_of(line) for line in sweep.lines if line.size}
        for run in sweep.runs:
            asked = specs[run.arm], run.trial, sweep.dataset
            other = next((o for o in known.runs if (o.arm, o.trial) == (run.arm, run.trial)), None)
            if other is not None:
                count += 1
                same = (run.metrics, run.curve) == (other.metrics, other.curve)
                if not (same and known.holds(run.arm, *asked)):
                    differing.append(f"{sweep.sweep}: {run.arm}, trial {run.trial}")
    print(f"{count} runs compared, {len(differing)} differ", *differing, sep="\n")
    sys.exit(bool(differing))


def print_suite(own: dict[str, KeptSweep]) -> None:
    """Prints the table of each task of the benchmark, with a row for each panel of other sweeps
    that have the task's data. Rows of another number of rounds say so."""
    kept = read_all()
    if taken := sorted(own.keys() & commands().keys()):
        sys.exit(f"a kept sweep has this name: got {taken[0]}; expected another; rename its file")
    unplaced = set(own)
    for view in SUITE:
        of_task = [kept[name] for name in view.sweeps if name in kept]
        digests = {sweep.dataset["sha256"] for sweep in of_task}
        rounds = {sweep.spec["rounds"] for sweep in of_task}
        fitting = {n: s for n, s in own.items() if s.dataset.get("sha256") in digests}
        unplaced -= fitting.keys()
        parts = tuple(
            Part(name, name + _rounds_told(sweep, rounds) + ": {panel}", "m = {value}")
            for name, sweep in fitting.items()
        )
        sweep = replace(view, parts=(*view.parts, *parts)).compose(kept | own)
        if sweep is not None:
            print(f"{view.title}\n\n{matrix_of(sweep, view.cost)}")
    if unplaced:
        known = sorted({str(kept[n].dataset["name"]) for v in SUITE for n in v.sweeps if n in kept})
        name = min(unplaced)
        got = own[name].dataset.get("name") or "data made for the run"
        sys.exit(
            f"the data of {name} are of no task of the benchmark: got {got}; expected the same "
            f"bytes as its sweeps, of {' or '.join(known)}; set data in its file"
        )


def _rounds_told(sweep: KeptSweep, usual: set[int]) -> str:
    """What a row says of its length where it is not that of the task's other rows."""
    rounds = sweep.spec["rounds"]
    return "" if {rounds} == usual else f" ({rounds} rounds)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = ["draw", "keep", "same", "suite"]
    parser.add_argument("what", nargs="?", choices=actions, default="draw")
    parser.add_argument("out", nargs="?", type=Path, help="folder of `keyhole sweep`")
    parser.add_argument("--commit", help="of the tree that ran the sweeps")
    parser.add_argument("--check", action="store_true", help="write nothing")
    asked = parser.parse_args()
    if (asked.what != "draw") != (asked.out is not None) or (asked.what == "keep") != bool(
        asked.commit
    ):
        parser.error("keep takes OUT and --commit, same and suite take OUT")
    if asked.what == "same":
        check_same(asked.out)
    if asked.what == "suite":
        print_suite({sweep.sweep: sweep for sweep in keep_sweeps(asked.out, "", commands())})
        return
    if asked.what == "keep":
        keep(asked.out, asked.commit)
    kept = read_all()
    pages = {path: page_of(path.read_text(), kept) for path in PAGES}
    if asked.check:
        stale = [path.name for path, text in pages.items() if path.read_text() != text]
        sys.exit(f"not current: {', '.join(stale)}; run make figures" if stale else 0)
    for path, text in pages.items():
        path.write_text(text)
    draw(kept, FIGURES)


if __name__ == "__main__":
    main()
