"""The page: complete, escaped, and alone."""

import re
from html.parser import HTMLParser

import pytest

from keyhole.experiments.report.page import write_page, write_section
from keyhole.experiments.report.reading import read_results
from tests.experiments.report.runs import write_sweep, write_trial

VOID = {"meta", "img", "br", "hr", "link", "input"}


class Balance(HTMLParser):
    """Fails on a tag that is not closed in its turn; keeps addresses that a browser would load."""

    def __init__(self):
        super().__init__()
        self.open = []
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(out, to):
    sections = [write_section(sweep, to)[0] for sweep in read_results(out)]
    return write_page("runs", sections, to).read_text()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    write_sweep(out, "emnist-cnn", [("CNN", "m = 4", 4, "cnn"), ("CNN", "m = 8", 8, "none")])
    write_trial(out, "cnn", 0)
    write_trial(out, "cnn", 1, (0.3,), None)
    title = '<img src=x onerror="alert(1)"> & "more"'
    lines = [("<b>", "</td><script>alert(1)</script>", 1, "evil")]
    write_sweep(out, "other", lines, title=title, data="<i>")
    write_trial(out, "evil", 0, changes={"client.algorithm": "<script>alert(2)</script>"})
    return page_of(out, out / "report")


def test_the_page_loads_nothing(page):
    assert not re.search(r"https?:", page)
    parser = Balance()
    parser.feed(page)
    assert parser.addresses
    assert all(a.startswith(("#", "data:image/svg+xml;base64,")) for a in parser.addresses)
    assert "url(" not in page
    assert "@import" not in page


def test_every_tag_is_closed(page):
    parser = Balance()
    parser.feed(page)
    assert parser.open == []


def test_everything_is_escaped(page):
    assert "<script" not in page
    assert "<img src=x" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "&lt;script&gt;alert(2)&lt;/script&gt;" in page


def test_the_page_tells_paper_figures_table_and_settings(page):
    assert "The paper, Figure 5 (left) and Table 2." in page
    assert "The paper has no such experiment." in page
    assert page.count("<figure>") == 4
    assert "75.02 ± 0.92" in page
    assert "<dt>client.lr</dt><dd>0.1</dd>" in page
    assert "<dt>seed</dt><dd>7</dd>" in page
    assert "synthetic (writers, sha256 abababababab...)" in page


def test_the_page_marks_what_is_unfinished(page):
    assert "(2 lines incomplete)" in page
    assert "1 of 2 (1 unfinished)" in page
    assert 'class="incomplete"' in page
    assert "trial 1 is unfinished after 10 of 20 rounds" in page
    assert "no trial was begun" in page


def test_the_same_results_give_the_same_page(tmp_path):
    write_sweep(tmp_path, "s", [("p", "a", 1, "arm")], figures=["frontier"])
    write_trial(tmp_path, "arm", 0)
    assert page_of(tmp_path, tmp_path / "one") == page_of(tmp_path, tmp_path / "two")
