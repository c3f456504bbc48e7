"""Errors form one tree, and each states four facts."""

import ast
import pickle
import re
from pathlib import Path

import pytest

import keyhole as kh
from keyhole import errors
from keyhole.errors import KeyholeError

SOURCE = Path(kh.__file__).parent
MESSAGE = "it broke: got 3; expected 2; mend it; or leave it"


def every_error():
    return [getattr(errors, name) for name in errors.__all__]


def test_errors_form_one_tree_that_is_drawn_at_its_top():
    for kind in every_error():
        assert issubclass(kind, KeyholeError)
        assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", every_error())
def test_errors_know_how_a_command_and_a_service_end(kind):
    assert 1 <= kind.exit_code <= 125
    assert 400 <= kind.http_status <= 599


@pytest.mark.parametrize("kind", every_error())
def test_errors_cross_processes_with_their_facts(kind):
    again = pickle.loads(pickle.dumps(kind(MESSAGE)))
    assert type(again) is kind
    assert str(again) == MESSAGE
    facts = (again.wrong, again.got, again.allowed, again.fix)
    assert facts == ("it broke", "3", "2", "mend it; or leave it")


@pytest.mark.parametrize("message", ["client 3 has none", "", "it broke: got 3"])
def test_a_message_of_own_code_may_have_any_form(message):
    error = pickle.loads(pickle.dumps(errors.NoExamplesError(message)))
    assert str(error) == message
    assert (error.wrong, error.got, error.allowed, error.fix) == (message, "", "", "")
    assert errors.worded(error.wrong, error.got, error.allowed, error.fix) == message


def test_facts_are_worded_as_the_message_that_they_were_read_from():
    error = KeyholeError(MESSAGE)
    assert errors.worded(error.wrong, error.got, error.allowed, error.fix) == MESSAGE


def messages():
    """(where, text) of each message that src spells in one piece; a placeholder is `{}`."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) in errors.__all__):
                continue
            text = node.args[0] if len(node.args) == 1 and not node.keywords else None
            if isinstance(text, ast.Constant | ast.JoinedStr):
                parts = getattr(text, "values", [text])
                yield (
                    f"{path.relative_to(SOURCE)}:{node.lineno}",
                    "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in parts),
                )


def test_every_message_in_the_source_states_four_facts():
    found = list(messages())
    assert len(found) > 100
    form = re.compile(r"[^;]+: got [^;]+; expected [^;]+; .+", re.DOTALL)
    assert [(where, text) for where, text in found if not form.fullmatch(text)] == []
