"""The page in a real browser: what is drawn, read aloud, and reached by keys, while it lives."""

import shutil

import pytest

import browser as driver
from keyhole.experiments.watch.address import ServiceWatch
from keyhole.experiments.watch.app import WatchApp
from keyhole.rounds.record import encode_records
from keyhole.service.routes import MetricsApp
from keyhole.service.status import RunsFiles
from keyhole.service.telling import gauges_of
from keyhole.service.transport import serving
from tests.experiments.watch.watched import make_folder, record_of, watching
from tests.service.small_service import small_service

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(driver.missing()), reason=f"not installed: {driver.missing()}"),
]
TOP4, NOISE = "emnist-top4", "emnist-top8-noise"
READY = "return document.querySelector('#cohorts-emnist-top4') && document.querySelector('#bytes')"


@pytest.fixture(scope="module")
def shown():
    with driver.browser() as window:
        yield window


@pytest.fixture
def page(shown, tmp_path):
    folder = make_folder(tmp_path / "runs")
    with watching(folder) as url:
        shown.open("about:blank")  # the page before has asked for the last time
        shown.errors()
        shown.open(f"{url}/#{TOP4}&{NOISE}")
        shown.wait(READY)
        yield shown, folder
        assert shown.errors() == []


def text(window, selector="main"):
    return window.run("return document.querySelector(arguments[0]).innerText", selector)


def test_everything_of_two_runs_and_a_round_is_on_the_page(page):
    window, _ = page
    words = text(window)
    for told in (
        "round 4: 0 of 3 updates, 3 devices to come",
        "6 of 6, 1 empty",
        "25 %",  # 2,000 of 8,000 bytes
        "≤ 25 %",  # of devices that hide theirs
        "keys and whose they are",
        "3.25; 0.5 for those who do not see who takes part",
        "round 3 closed empty (time)",
        "a worker was lost: <b>its</b> clients were trained again",  # a name is no HTML
    ):
        assert told in words
    assert window.run("return document.querySelectorAll('#chart-accuracy path').length") >= 5
    asked = window.run(
        "return performance.getEntriesByType('resource').map((e) => new URL(e.name).host)"
    )
    assert set(asked) == {window.run("return location.host")}


def test_all_of_it_is_reached_and_read_by_keys(page):
    window, _ = page
    box = f"run-{NOISE}"
    for _ in range(40):
        window.press("Tab")
        if window.run("return document.activeElement.id") == box:
            break
    window.press("Space")
    window.wait("return !document.querySelector('#privacy table')")
    assert window.run("return document.activeElement.id") == box  # where one was
    window.press("Space")
    window.wait("return document.querySelector('#privacy table')")
    window.run("document.getElementById('chart-accuracy').focus()")
    window.press("Right", "Right")
    told = window.run("return document.querySelector('#metric-accuracy output').textContent")
    assert told.startswith("2 rounds: top4 22 % (")
    window.run("document.querySelector('[id^=cohort-emnist-top4]').focus()")
    window.press("Left", "Left", "Left", "Left")
    told = window.run("return document.querySelector('#cohorts-emnist-top4 output').textContent")
    assert told.startswith("round 2: 10 asked, 8 counted, 1 late, 1 lost; closed by goal; 1.2 KB")


def test_a_screen_reader_meets_names(page):
    window, _ = page
    names = window.names()
    told = {role: [name for r, name in names if r == role] for role, _ in names}
    assert any(name.startswith("accuracy, validation. top4 ends at 62") for name in told["image"])
    assert {"Runs", "Who learned what", "Privacy spent"} <= set(told["table"])
    controls = [
        n for role in ("checkbox", "radio", "image", "progressbar", "table") for n in told[role]
    ]
    assert len(controls) >= 9
    assert all(controls)
    assert {"columnheader", "rowheader", "heading", "main"} <= told.keys()


def test_rounds_show_as_they_are_made(page):
    window, folder = page
    path = folder / NOISE / "trial-0" / "records.jsonl"
    with path.open("ab") as file:
        file.write(encode_records([record_of(6, 0.9)]))
    window.wait("return document.querySelector('#runs').innerText.includes('7 of 7')")
    shutil.rmtree(folder / TOP4)
    window.wait("return !document.querySelector('#cohorts-emnist-top4')")
    assert "No run" not in text(window)
    window.errors()  # that the run is gone


def test_a_service_shows_the_rounds_that_were_seen_there(shown, tmp_path):
    shown.errors()
    with small_service(tmp_path) as service:
        service.publish(cohort=["device-1", "device-2"])
        service.app.metrics.show(lambda: gauges_of(RunsFiles(tmp_path), lambda: 1e10))
        metrics = MetricsApp(service.app.metrics, service.app.limits)
        with serving(metrics, prepare=lambda: None) as address:
            watched = ServiceWatch(f"{address}/metrics")
            with serving(WatchApp(watched, None), prepare=lambda: None) as url:
                shown.open(url)
                shown.wait("return document.querySelector('#rounds progress')")
                assert "round 0: 0 of 2 updates, 2 devices to come" in text(shown)
                service.publisher.close_round()
                service.publish()
                shown.wait("return document.querySelector('#seen')")
                rows = shown.run(
                    "return [...document.querySelectorAll('#seen tbody tr')].map("
                    "(row) => row.firstChild.textContent)"
                )
                assert rows == ["1", "0"]
                assert shown.errors() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1180, 390])
def test_nothing_is_cut_off_or_too_pale(page, width, dark):
    window, _ = page
    window.look(width, 900, dark=dark)
    window.wait("return innerWidth === arguments[0]", width)
    assert window.run("return document.documentElement.scrollWidth") <= width
    assert window.pale() == []


def test_a_page_whose_server_is_gone_says_so_and_goes_on(shown, tmp_path):
    folder = make_folder(tmp_path / "runs")
    with watching(folder) as url:
        shown.open(f"{url}/#{TOP4}")
        shown.wait(READY)
    shown.wait("return document.getElementById('state').innerText.includes('does not answer')")
    assert "6 of 6" in text(shown)  # what was known stays
    shown.errors()
