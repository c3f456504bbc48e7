"""The page of clients/web in a real browser: tabs of it train, and say what they do."""

import json
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pytest

import browser as driver
import keyhole as kh
from keyhole.service.origins import WithOrigins
from keyhole.wire.messages import Ask, encode_query
from tests.helpers import load_example
from tests.project.test_up import free_ports, run, up
from tests.service.recorder import Recorder
from tests.web.test_take_part import CHOSEN, POSTS, SPEC, TAGS, WORDS, published, sent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(driver.missing()), reason=f"not installed: {driver.missing()}"),
]
ROUNDS, KEYS = 6, 32  # of the project of examples/tabs
NAMES = {"words": [f"word{n}" for n in range(WORDS)], "tags": [f"tag{n}" for n in range(TAGS)]}
TYPED = "\n".join(
    " ".join([f"word{n}" for n in post["words"]] + [f"#tag{n}" for n in post["tags"]])
    for post in POSTS
)
FILL_IN = """
for (const [id, text] of Object.entries(arguments[0])) {
  const field = document.getElementById(id);
  field.value = text;
  for (const event of ['input', 'change']) field.dispatchEvent(new Event(event));
}
"""


@pytest.fixture(scope="module")
def tabs():
    return load_example("tabs/run")


@pytest.fixture(scope="module")
def window():
    with driver.browser() as found:
        yield found


def told(window, name):
    return window.run("return document.getElementById(arguments[0]).textContent", name)


def wait_for(window, name, text):
    """Waits until an element says something."""
    seen = "return document.getElementById(arguments[0]).textContent.includes(arguments[1])"
    window.wait(seen, name, text)


@contextmanager
def page(tabs, where, about, port):
    """The page at a port; gives its origin."""
    tabs.write_page(where, about)
    with tabs.page_server(where, port) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def small_page(tabs, directory, is_let_in=True, **settings):
    """The page, with the words and tags of one round at two services; them, and its origin."""
    (port,) = free_ports(1)
    let_in = f"http://127.0.0.1:{port}" if is_let_in else "https://elsewhere.example"
    rounds = directory / "rounds"
    rounds.mkdir()
    with (
        published(rounds, lambda app: Recorder(WithOrigins(app, [let_in])), **settings) as found,
        page(tabs, directory / "page", {**NAMES, "second": found.urls[1]}, port) as origin,
    ):
        yield found, origin


def start(window, origin, **fields):
    """Opens the page, fills it in and presses Enter in the field of the token."""
    window.open("about:blank")
    window.open(origin)
    wait_for(window, "counted", "The model has")
    window.run(FILL_IN, fields)
    window.run("document.getElementById('token').focus()")
    window.press("Enter")


def rows(window):
    """What the table of rounds says, newest first."""
    return window.run(
        "return [...document.querySelectorAll('#table tr')].map("
        "(row) => [...row.children].map((cell) => cell.textContent))"
    )


def focused(window):
    return window.run("return document.activeElement.id")


def check_tab(window, words):
    """A tab that has taken part in all rounds, and is stopped by a key."""
    wait_for(window, "rounds", str(ROUNDS))
    assert told(window, "error") == ""
    asked = told(window, "words").split(", ")
    assert len(set(asked)) == KEYS
    assert set(asked) <= set(words)
    assert "The service sees which words these are" in told(window, "learned")
    assert [int(row[0]) for row in rows(window)] == list(range(ROUNDS))[::-1]
    losses = [float(row[4]) for row in rows(window)]
    assert losses == sorted(losses)  # each round began with a better model than the one before
    assert focused(window) == "stop"
    window.press("Enter")
    wait_for(window, "status", f"Stopped, after {ROUNDS} rounds.")
    assert focused(window) == "start"
    assert window.errors() == []


def test_two_tabs_train_a_model_with_keyhole_up(tabs, window, tmp_path, monkeypatch):
    service, port = free_ports(2)
    monkeypatch.setattr(tabs, "SERVICE_PORT", service)
    monkeypatch.setattr(tabs, "PAGE_PORT", port)
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "hobbies"
    tabs.write_project(folder)
    tokens = [path.read_text() for path in tabs.make_kits(folder)]
    about = tabs.page_of(folder)
    with page(tabs, folder / tabs.PAGE, about, port) as origin, up(folder) as lines:
        assert any(f"pages of {origin} may be devices" in line for line in lines)
        opened = []
        for number, token in enumerate(tokens):
            opened.append(window.new_tab())
            start(window, origin, token=token, example=str(number))
        done = run(folder, "--deploy", "--rounds", str(ROUNDS))
        assert done.returncode == 0, done.stderr
        for tab in opened:
            window.go_to(tab)
            check_tab(window, about["words"])
    (trained,) = (folder / "runs").iterdir()
    records = kh.open_run(trained).records()
    assert [record.staleness for record in records] == [[0, 0]] * ROUNDS
    assert {record.closed for record in records} == {"goal"}
    cohorts = (trained / "trial-0" / "cohorts.jsonl").read_text().splitlines()
    assert [sorted(json.loads(line)["devices"]) for line in cohorts] == [tabs.DEVICES] * ROUNDS
    numbers = (KEYS + 1) * len(about["tags"])  # rows of the words, and the bias
    for record in records:
        assert record.client_sizes == [numbers] * 2
        assert all(4 * numbers < each < 6 * numbers for each in record.bytes_down + record.bytes_up)
    recall = kh.open_run(trained).metrics["recall_at_5"]
    assert recall > 0.25  # five of seventy-two tags are 0.07


def test_a_tab_fetches_from_two_services_of_which_neither_learns_its_words(tabs, window, tmp_path):
    with small_page(tabs, tmp_path, delivery="pir") as (found, origin):
        token, pinned = found.service.token(), found.service.trainer.public.encode()
        given = {"url": found.urls[0], "token": token, "posts": TYPED}
        start(window, origin, **given, **{"trainer-key": pinned})
        wait_for(window, "rounds", "1")
        assert "Neither service learns from the fetch" in told(window, "learned")
        assert told(window, "words") == ", ".join(f"word{n}" for n in CHOSEN)
        bias = encode_query([Ask(0, np.array([0]))])
        asked = [body for each in found.recorders for body in each.bodies("/slices")]
        assert [body for body in asked if body] == [bias]  # a browser asks first whether it may
        _, _, keys = sent(found)
        assert keys["word"].array.tolist() == CHOSEN
        window.run("document.getElementById('stop').click()")
        wait_for(window, "status", "Stopped, after 1 round.")
    assert window.errors() == []


OWN_TASK = {"spec": {**SPEC, "task": {"name": "films:TASK", "identity": "TASK 12ab"}}}


@pytest.mark.parametrize(
    ("settings", "given", "line"),
    [
        ({}, {"token": "kh2.a.b"}, "got no good token"),
        ({}, {"url": "127.0.0.1:8100"}, "The address of a service cannot be used"),
        ({}, {"posts": "nothing that it knows #tag0"}, "The model has no word of your posts"),
        ({}, {"posts": ""}, "There are no posts"),
        ({}, {"trainer-key": "ab"}, "expected 64 hexadecimal digits"),
        ({}, {"trainer-key": "ab" * 32}, "is not signed by the trainer"),
        ({"delivery": "pir"}, {"second": ""}, "give the second server's address"),
        (OWN_TASK, {}, "got the task films:TASK, code with the identity TASK 12ab"),
        ({"is_let_in": False}, {}, "ask the operator to add --allow-origin http://127.0.0.1:"),
        (
            {},
            {"url": "http://127.0.0.1:CLOSED"},
            "got no answer (5 attempts)",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tabs, window, tmp_path, settings, given, line):
    with small_page(tabs, tmp_path, **settings) as (found, origin):
        usual = {"url": found.urls[0], "token": found.service.token(), "posts": TYPED}
        fields = {**usual, **given}
        fields["url"] = fields["url"].replace("CLOSED", str(free_ports(1)[0]))
        start(window, origin, **fields)
        wait_for(window, "error", line)
        assert "\n" not in told(window, "error")
        assert "alert" in {role for role, _ in window.names()}
        assert not window.run("return document.getElementById('start').disabled")
        assert not found.service.stored(found.published.id)
    window.errors()  # what the browser says of refused requests


def test_a_screen_reader_meets_names_and_nothing_is_cut_off_or_too_pale(tabs, window, tmp_path):
    with small_page(tabs, tmp_path) as (found, origin):
        start(window, origin, url=found.urls[0], token=found.service.token(), posts=TYPED)
        wait_for(window, "rounds", "1")
        window.run("document.querySelector('details').open = true")
        names = window.names()
        for role in ("textbox", "button", "table"):
            assert [name for each, name in names if each == role]
            assert all(name for each, name in names if each == role), role
        assert {"status", "columnheader", "heading", "main"} <= {role for role, _ in names}
        for width in (1180, 390):
            for dark in (False, True):
                window.look(width, 900, dark=dark)
                window.wait("return innerWidth === arguments[0]", width)
                assert window.run("return document.documentElement.scrollWidth") <= width
                assert window.pale() == []
        asked = "return performance.getEntriesByType('resource').map((e) => new URL(e.name).origin)"
        assert set(window.run(asked)) == {origin}  # the page itself; its worker asks the service
        window.run("document.getElementById('stop').click()")
        wait_for(window, "status", "Stopped")
    assert window.errors() == []
