"""A server of private retrieval damages the rows it suspects and watches whether a device fails.

With one server, columns of the table and the hint are damaged alike, so that nothing is wrong with
any other column. A device that failed would tell it that one of these was asked for.
"""

from dataclasses import replace

import pytest

from keyhole.delivery.pir.database import Database
from keyhole.delivery.pir.one_server import OneServerPir, server_of
from keyhole.delivery.pir.two_server import TwoServerPir, servers_of
from keyhole.device.private import QueryFetch
from tests.attacks.failing_devices import OTHER, WANTED, raising, transcript
from tests.service.pir.pair import ONE, TWO, pair


def damaged(table, guess):
    """The table with one row changed, under the params of the true one."""
    true = Database.of(table)
    rows = true.rows.copy()
    rows[guess, 0] ^= 1
    return replace(true, rows=rows)


def watched_by_one(directory, monkeypatch, guess):
    """What the only server sees of a device after it damaged the row that it guessed."""
    open_it = lambda self, table: (server_of(damaged(table, guess)),)  # noqa: E731
    monkeypatch.setattr(OneServerPir, "open", open_it)
    with pair(directory, ONE) as both:
        return transcript(both, QueryFetch(OneServerPir()))


def watched_by_both(directory, monkeypatch, guess):
    """Likewise of two servers, both with the damaged row: what neither could do alone."""
    open_it = lambda self, table: servers_of(damaged(table, guess))  # noqa: E731
    monkeypatch.setattr(TwoServerPir, "open", open_it)
    with pair(directory, TWO) as both:
        fetch = both.fetch()
        with fetch.others[0]:
            return transcript(both, fetch)


@pytest.mark.parametrize("watched", [watched_by_one, watched_by_both])
def test_a_damaged_column_tells_nothing(tmp_path, monkeypatch, watched):
    right = watched(tmp_path / "right", monkeypatch, WANTED)
    wrong = watched(tmp_path / "wrong", monkeypatch, OTHER)
    assert right == wrong
    assert "left the round" not in right[1]


@pytest.mark.parametrize("watched", [watched_by_one, watched_by_both])
def test_a_device_that_fails_tells_which_column_was_asked_for(tmp_path, monkeypatch, watched):
    raising(monkeypatch)
    right = watched(tmp_path / "right", monkeypatch, WANTED)
    wrong = watched(tmp_path / "wrong", monkeypatch, OTHER)
    assert right[1] == ["left the round"] * 2
    assert "left the round" not in wrong[1]
