"""Server 0 of two guesses which slice one slot asks for, and puts its own in the place of it.

What it adds to its reply turns the guessed row into a forged one. Where a row vouches for itself by
a tag that anyone can make, a right guess gives a good row and a wrong one garbage; a device that
fails at garbage then tells whether the guess was right.
"""

from hashlib import sha256

import numpy as np

from keyhole.delivery import base
from keyhole.delivery.paths import Top
from keyhole.delivery.pir import database
from tests.attacks.failing_devices import LAYOUT, OTHER, WANTED, raising, transcript
from tests.delivery.pir.mutations import rows_of, with_rows
from tests.service.pir.pair import pair
from tests.service.recorder import Recorder
from tests.service.small_service import random_model

RECORD = 8  # bytes of a row of two numbers; a path has 32 more


class Forger(Recorder):
    """A server that adds `change` to the only row of its replies."""

    change = None

    async def __call__(self, scope, receive, send):
        async def forge(message):
            body = message.get("body", b"")
            if self.change is not None and body[:5] == b"KHP2\2":
                rows = np.frombuffer(rows_of(body), np.uint8) ^ self.change
                message = {**message, "body": with_rows(body, rows.tobytes())}
            await send(message)

        await super().__call__(scope, receive, forge)


def tag(key, record):
    """What anyone can make for any slice."""
    text = int(key).to_bytes(8, "little") + record.tobytes()
    return np.frombuffer(sha256(text).digest(), np.uint8)


def tagging(monkeypatch):
    """Plants the hole: rows that carry tags in place of paths, and a device that fails."""

    def fill(tree, records, out):
        out[:, :RECORD] = records
        for key, record in enumerate(records):
            out[key, RECORD:] = tag(key, record)

    def are_right(self, keys, rows):
        tags = [tag(key, row[:RECORD]) for key, row in zip(keys, rows, strict=True)]
        return (rows[:, RECORD:] == np.array(tags).reshape(len(keys), 32)).all(axis=1)

    for module in (base, database):
        monkeypatch.setattr(module, "fill_rows", fill)
    monkeypatch.setattr(Top, "are_right", are_right)
    raising(monkeypatch)


def watched(directory, guess):
    """What both servers see of a device after server 0 forged the slice it guessed."""
    held = np.ascontiguousarray(random_model(LAYOUT)["w"][guess]).view(np.uint8)
    forged = np.full(RECORD, 66, np.uint8)
    with pair(directory, wrap=Forger) as both:
        both.recorders[0].change = np.concatenate(
            [held ^ forged, tag(guess, held) ^ tag(guess, forged)]
        )
        fetch = both.fetch()
        with fetch.others[0]:
            return transcript(both, fetch)


def test_a_forged_slot_tells_nothing(tmp_path):
    right, wrong = (watched(tmp_path / str(guess), guess) for guess in (WANTED, OTHER))
    assert right == wrong
    assert "left the round" not in right[1]


def test_tags_that_anyone_can_make_tell_whether_a_guess_was_right(tmp_path, monkeypatch):
    tagging(monkeypatch)
    right, wrong = (watched(tmp_path / str(guess), guess) for guess in (WANTED, OTHER))
    assert "left the round" not in right[1]
    assert wrong[1] == ["left the round"] * 2
