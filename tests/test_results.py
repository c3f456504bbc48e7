"""Numbers in README.md, docs/results.md and docs/growth.md are those that are kept."""

import importlib.util
import re
import sys
import tomllib

import msgspec
import pytest

from keyhole.experiments.grid import read_grid
from keyhole.experiments.report.paper import FINDINGS
from keyhole.experiments.sweeps import SWEEPS
from tests.helpers import ROOT

DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


results, growth = load("results"), load("growth")
KEPT = results.read_all()
SWEEPS_OF_RUNS = sorted((ROOT / "runs").rglob("*.toml"))


@pytest.mark.parametrize("page", results.PAGES, ids=lambda page: page.name)
def test_tables_and_numbers_are_those_that_are_kept(page):
    assert results.page_of(page.read_text(), KEPT) == page.read_text(), "run make figures"


def test_the_table_of_growth_is_what_the_benchmark_found():
    text = growth.PAGE.read_text()
    assert growth.page_of(text, growth.read_kept()) == text, "run make figures"
    assert text.count("<!-- growth -->") == 1


def test_every_view_is_on_the_page():
    assert {found[1] for found in results.VIEW.findall(results.PAGES[0].read_text())} == set(
        results.VIEWS
    )


def test_every_percentage_in_the_text_is_kept_or_the_papers():
    """Decimals outside tables and marks: what nobody checks is how numbers go stale."""
    papers = {
        f"{n.mean:.{k}f}" for f in FINDINGS.values() for n in f.numbers.values() for k in (1, 2)
    }
    text = results.PAGES[0].read_text()
    text = results.NUMBER.sub("", results.VIEW.sub("", text))
    assert set(re.findall(r"\b\d+\.\d+(?= (?:%|points|and|or|to|,))", text)) <= papers


def test_a_wrong_number_is_noticed():
    (name, sweep), *_ = KEPT.items()
    arm = next(line.arm for line in sweep.results.lines if line.test)
    page = f"Accuracy is <!--={name}/{arm}-->99.9<!--/--> %."
    right = results.page_of(page, KEPT)
    assert right != page
    assert results.page_of(right, KEPT) == right
    zero = results.page_of(f"<!--={name}/{arm} - {name}/{arm}--><!--/-->", KEPT)
    assert float(re.search(r">([\d.]+)<", zero)[1]) == 0.0


def test_the_figure_of_readme_saves_what_readme_says():
    tasks = {view.name: view.compose(KEPT) for view in results.SUITE}
    figure = results.draw_headline(tasks)
    told = [text.get_text() for axes in figure.axes for text in axes.texts]
    (ratio,) = re.findall(r" : .*-->([\d.]+)<!--", results.PAGES[1].read_text())
    assert sum(f"1/{ratio} of the bytes" in text for text in told) == 1
    assert len(figure.axes) == len([text for text in told if "of the bytes" in text]) == 3


def test_own_sweeps_stand_in_the_table_of_their_task(capsys):
    own = msgspec.structs.replace(KEPT["suite-2nn"], sweep="mine")
    results.print_suite({"mine": own})
    with_own = capsys.readouterr().out
    results.print_suite({})
    without = capsys.readouterr().out
    rows = set(with_own.splitlines()) - set(without.splitlines())
    assert {row.split(":")[0].strip("| ") for row in rows} == {"mine"}
    assert len(rows) == len(own.results.panels)


def test_an_own_sweep_of_another_length_says_so(capsys):
    kept = KEPT["suite-2nn"]
    shorter = msgspec.structs.replace(kept, sweep="mine", spec=kept.spec | {"rounds": 40})
    results.print_suite({"mine": shorter})
    assert "| mine (40 rounds): " in capsys.readouterr().out


def test_an_own_sweep_with_the_name_of_a_kept_one_is_refused():
    with pytest.raises(SystemExit, match="got suite-2nn; expected another"):
        results.print_suite({"suite-2nn": KEPT["suite-2nn"]})


@pytest.mark.parametrize("data", [{"name": "femnist", "sha256": "00"}, {"name": "made"}])
def test_an_own_sweep_with_other_data_is_named(data, capsys):
    own = msgspec.structs.replace(KEPT["suite-2nn"], sweep="mine", dataset=data)
    with pytest.raises(SystemExit, match=f"the data of mine .* got {data['name']}"):
        results.print_suite({"mine": own})
    assert "broadcast of a smaller model" in capsys.readouterr().out


def test_figures_are_redrawn_with_the_same_bytes(tmp_path):
    name, figure = next(iter(results.figures_of(KEPT)))
    results.save_svg(figure, tmp_path / name)
    assert (tmp_path / name).read_bytes() == (DOCS / "figures" / name).read_bytes()


@pytest.mark.slow
def test_every_figure_is_drawn_from_what_is_kept(tmp_path):
    results.draw(KEPT, tmp_path)
    drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*.svg")}
    kept = {path.name: path.read_bytes() for path in (DOCS / "figures").glob("results-*.svg")}
    assert drawn == kept


@pytest.mark.parametrize("path", SWEEPS_OF_RUNS, ids=lambda path: path.stem)
def test_every_sweep_of_runs_can_be_read(path):
    assert read_grid(path).trials >= 1
    assert tomllib.loads(path.read_text())["data"] in ("femnist", "stackexchange")


def test_every_part_of_a_view_can_be_run():
    known = {path.stem for path in SWEEPS_OF_RUNS} | SWEEPS.keys()
    named = {part.sweep for view in results.VIEWS.values() for part in view.parts}
    assert named <= known
    assert named <= results.commands().keys()


def test_every_kept_sweep_is_shown():
    assert KEPT.keys() <= {part.sweep for view in results.VIEWS.values() for part in view.parts}


@pytest.mark.parametrize("sweep", KEPT.values(), ids=KEPT.keys())
def test_the_page_says_how_many_runs_are_kept_of_how_many(sweep):
    arms = {line.arm for line in sweep.lines}
    runs = [(run.arm, run.trial) for run in sweep.runs]
    planned = {(arm, trial) for arm in arms for trial in range(sweep.trials)}
    assert len(set(runs)) == len(runs)
    assert set(runs) <= planned
    assert sweep.trials == results.planned_trials(sweep.sweep)
    assert sweep.command == results.commands()[sweep.sweep]
    told = results.origin_of(sweep.sweep, KEPT)
    assert f"{len(runs)} of {len(planned)} runs" in told
    assert ("have not been run yet" in told) == (len(runs) < len(planned))


@pytest.mark.parametrize("sweep", KEPT.values(), ids=KEPT.keys())
def test_kept_runs_are_of_the_sweep_that_runs_them_again(sweep):
    """Each has the record that its file, or the sweep of that name, has by now."""
    path = next((path for path in SWEEPS_OF_RUNS if path.stem == sweep.sweep), None)
    asked = read_grid(path) if path else SWEEPS[sweep.sweep]("small")
    for line, now in zip(sweep.lines, asked.lines, strict=True):
        if line.size is not None:
            kept = sweep.spec_of(line)
            assert line.arm == now.arm
            own = {"task", "data", "keys", "delivery"}  # their identities stand in kept runs alone
            told = {name: value for name, value in kept.describe().items() if name not in own}
            assert kept.task.name == now.spec.task.name
            assert told == {k: now.spec.describe()[k] for k in told}
