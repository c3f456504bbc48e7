"""Rounds of a small model on a disk, and ways to damage them."""

import os
from pathlib import Path

import numpy as np

import keyhole as kh
from keyhole.server.initial import Normal
from keyhole.server.optimizers import SGD
from keyhole.server.row_sums import RowUpdate
from keyhole.server.state import ServerState
from keyhole.service.publishing import Publisher
from keyhole.service.reading import RoundsDirectory, verify_round

WORD = kh.KeySpace("word", 40)
LIKE = {"w": np.broadcast_to(np.float32(0), (40, 5)), "b": np.zeros(3, np.float32)}
LAYOUT = kh.Layout.of(LIKE, kh.Cut(WORD, {"w": 0}))


def small_state(optimizer=None, kind="dense"):
    """Parts are (everyone: b, word: w); a record of a word is 20 bytes."""
    optimizer = optimizer or SGD(0.5)
    lazy = ServerState.lazy(LAYOUT, optimizer, {"w": Normal(0.1)}, seed=4)
    return lazy if kind == "lazy" else ServerState.dense(LAYOUT, lazy.model(), optimizer)


def step(state, words=(3, 17)):
    """A step that touches these words and everyone's part; a function of the step alone."""
    rng = np.random.default_rng(state.steps)
    keys = [np.zeros(1, np.int64), np.array(sorted(words), np.int64)]
    updates = [
        RowUpdate(k, rng.normal(size=(len(k), part.slice_size)).astype(np.float32))
        for k, part in zip(keys, LAYOUT.parts, strict=True)
    ]
    state.step(updates)


def files_of(directory):
    """Path -> bytes of everything below a directory."""
    directory = Path(directory)
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def names_of(directory):
    return sorted(path.name for path in (Path(directory) / "rounds").iterdir())


def flip(path, offset=0):
    """Changes one bit of a file, in place; an offset below 0 counts from its end."""
    with Path(path).open("r+b") as file:
        file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def published(directory, state=None, number=0, **options):
    """Publishes one round; returns its directory."""
    with Publisher(directory) as publisher:
        found = publisher.publish_state(state or small_state(), number=number, **options)
    return Path(directory) / "rounds" / found.id


def check_current(directory):
    """Verifies every byte of the current round; returns (number, records of all tables)."""
    rounds = RoundsDirectory(directory)
    current = rounds.current()
    if current is None:
        return None
    with rounds.hold(current.round) as found:
        verify_round(found)
        records = [t.gather(np.arange(t.info.num_keys)).records.copy() for t in found.tables]
    rounds.close()
    return current.number, records
