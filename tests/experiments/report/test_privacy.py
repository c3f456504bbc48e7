"""The report on private select: figure and tables from public numbers alone."""

import json

import pytest

from keyhole.cli import main as cli
from keyhole.experiments.report.privacy import (
    LABELS,
    PriceTable,
    draw_privacy,
    slice_tables,
    to_json,
    to_markdown,
)
from keyhole.planner.prices import price_of
from keyhole.pricing import Workload


@pytest.fixture(scope="module")
def tables():
    return slice_tables()


@pytest.fixture(scope="module")
def figure(tables):
    return draw_privacy(tables)


def test_a_panel_of_bytes_and_one_of_savings_for_each_table(figure, tables):
    top, bottom = figure.axes[:3], figure.axes[3:]
    assert [axes.get_title() for axes in top] == ["K = 10,000", "K = 100,000", "K = 1,000,000"]
    for axes, table in zip(top, tables, strict=True):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert f"{table.break_even['pir']:,}  two servers" in axes.texts[0].get_text()
    assert len(bottom) == 3
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(LABELS.values())


def test_lines_hold_the_bytes_of_real_messages(figure, tables):
    for axes, table in zip(figure.axes, tables, strict=False):
        lines = [line for line in axes.lines if len(line.get_xdata()) > 2]
        for line, way in zip(lines, LABELS, strict=True):
            m, share = line.get_xdata()[40], line.get_ydata()[40]
            need = Workload(table.num_keys, int(m), table.slice_bytes, 1)
            assert share == price_of(way, need).bytes_total / need.table_bytes


def test_rings_stand_where_the_lines_cross(figure, tables):
    for axes, table in zip(figure.axes, tables, strict=False):
        single = [line.get_xydata()[0] for line in axes.lines if len(line.get_xdata()) == 1]
        rings = {(float(m), float(height)) for m, height in single}
        assert rings == {(table.break_even[way], 1.0) for way in LABELS if way.startswith("pir")}


@pytest.mark.parametrize("way", [way for way in LABELS if way != "pregenerated"])
def test_nothing_is_left_of_the_saving_at_the_break_even_point(way, tables):
    table = tables[0]
    end = table.break_even[way]
    assert table.share(way, end) <= 1 < table.share(way, end + 1)
    assert table.kept(way, end) >= 0
    assert table.kept(way, end + 1) < 0 or end + 1 > table.break_even["pregenerated"]
    assert table.kept("pregenerated", end) == 1


def test_the_page_tells_where_each_way_stops_saving(tables):
    text = to_markdown(tables)
    assert "| PIR, two servers | 4,298 (43 %) |" in text
    assert "| 10,000 | 1,000 | 20 | 2.09 (9.6x) |" in text
    assert "(2.4x)" in text  # one server in the paper's setting
    assert text.count("\n| 1,000,000 |") == 3


def test_json_says_the_same(tables):
    found = json.loads(json.dumps(to_json(tables)))
    assert [table["num_keys"] for table in found] == [10_000, 100_000, 1_000_000]
    assert found[0]["break_even"]["pir-one-server"] == tables[0].break_even["pir-one-server"]
    assert found[0]["bytes"]["1000"]["broadcast"] == 20_000_000


def test_small_tables_can_be_drawn():
    figure = draw_privacy([PriceTable(50, 8)])
    assert len(figure.axes) == 2


def test_the_command_writes_figure_and_tables_without_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "privacy", "--out", "here"])
    assert not ended.value.code
    names = ["private-select.png", "private-select.svg", "private-select.md"]
    assert capsys.readouterr().out.splitlines() == [f"here/{name}" for name in names]
    assert (tmp_path / "here" / names[0]).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "here" / names[2]).read_text() == to_markdown(slice_tables())


def test_a_directory_named_privacy_can_still_be_reported_on(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "privacy").mkdir()
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "./privacy"])
    assert ended.value.code == 2
    assert "holds no sweep" in capsys.readouterr().err
