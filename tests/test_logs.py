"""Lines of logs: their form, and what they refuse to hold."""

import ast
import json
import logging

import pytest

import house
from keyhole.logs import FACTS, tell, writing_logs


def test_a_line_of_json_has_time_level_part_event_text_and_facts(capsys):
    with writing_logs("json"):
        tell("trainer", "round opened", "round 3 is open", round=3, cohort=12, seconds=None)
        tell("trainer", "round empty", "two\nlines", "warning")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("time").endswith("Z")
    told = {"level": "info", "part": "trainer", "event": "round opened", "text": "round 3 is open"}
    assert first == {**told, "round": 3, "cohort": 12, "seconds": None}
    assert (second["level"], second["text"]) == ("warning", "two lines")


def test_a_line_of_text_is_a_time_a_part_and_a_sentence(capsys):
    with writing_logs("text"):
        tell("service", "round closed", "round 3 is closed")
        logging.getLogger("keyhole.service").error("a worker is replaced: %s", "SIGKILL")
    plain, bad = (line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines())
    assert plain == "service: round 3 is closed"
    assert bad == "service: error: a worker is replaced: SIGKILL"


@pytest.mark.parametrize(("level", "lines"), [("debug", 2), ("info", 2), ("error", 1)])
def test_lines_below_the_level_are_not_written(capsys, level, lines):
    with writing_logs("json", level):
        tell("device", "update sent", "round 3 has this device's update")
        tell("device", "incident", "wrong", "error")
    tell("device", "update sent", "nobody has asked for logs any more")
    assert len(capsys.readouterr().err.splitlines()) == lines


@pytest.mark.parametrize("facts", [{"keys": 3}, {"round": [1, 2]}, {"bytes": b"ab"}])
def test_facts_are_single_values_under_known_names(facts):
    with pytest.raises(AssertionError):
        tell("device", "update sent", "a list could hold keys", **facts)


def test_no_fact_is_named_after_a_key_an_update_a_device_or_a_token():
    named = [call for module in MODULES for call in tells(module)]
    assert len(named) >= 8
    for call in named:
        assert {word.arg for word in call.keywords} - {None} <= FACTS
    assert not FACTS & {"key", "keys", "update", "device", "devices", "token", "client", "clients"}


MODULES = [house.Module(path) for path in sorted(house.SOURCE.rglob("*.py"))]


def tells(module):
    """The calls of `keyhole.logs.tell` in a module."""
    if "from keyhole.logs import" not in module.text:
        return []
    calls = [n for n in module.nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return [n for n in calls if n.func.id == "tell"]
