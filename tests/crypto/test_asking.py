"""What every question does: it gives out its secrets once."""

import sys

import pytest

from keyhole.crypto import once as asking
from keyhole.crypto.once import Once
from keyhole.errors import ReplayError


def test_what_is_for_one_use_is_taken_once():
    once = Once(5, "messages")
    assert (once.peek(), once.peek(), once.take()) == (5, 5, 5)
    for again in (once.take, once.peek):
        with pytest.raises(ReplayError, match="its messages a second time"):
            again()


def test_printing_does_not_show_what_is_held():
    assert repr(Once("secret", "messages")) == "Once(messages)"


def takes_with_one_between(at):
    """What two takes give if the second runs when the first is about to execute its line `at`, as
    another thread may; and whether the first has such a line."""
    once, got, lines = Once(5, "messages"), [], []

    def take():
        try:
            got.append(once.take())
        except ReplayError:
            got.append(None)

    def watch(frame, event, _):
        if frame.f_code.co_filename != asking.__file__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
            if len(lines) == at:
                sys.settrace(None)
                take()
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        take()
    finally:
        sys.settrace(before)
    return got, len(lines) >= at


def test_nobody_takes_it_a_second_time_in_between():
    tried, at = 0, 1
    while True:
        got, is_there = takes_with_one_between(at)
        if not is_there:
            break
        assert sorted(got, key=str) == [5, None]
        tried, at = tried + 1, at + 1
    assert tried > 1
