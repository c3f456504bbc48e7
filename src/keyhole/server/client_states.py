"""Keeps what clients hold between rounds, as bytes: in memory, or in a file for each client.

A file is named CLIENT-ROUND. Those of a round are on the disk before its step is committed, and
count once it is: opening the files removes those of later rounds, which a kill has left. The file
of an earlier round goes once a newer one counts, so that one state of each client stays.

Hidden: nothing. Not hidden: every state, from those who can read the directory; they alone can.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from keyhole.files import make_directory, storage_errors, write_together

MAX_STATE_BYTES = 16 << 20
"""Max bytes that one client keeps between rounds unless told otherwise."""

_AT_ONCE = 256  # files that are open at a time
_NAME = re.compile(r"(\d+)-(\d+)")


class ClientStates:
    """The newest state of each client; empty at first.

    Args:
        directory: where they are kept; None keeps them in memory.
        round: the last one that counts, None for all that are there.

    >>> states = ClientStates()
    >>> states.offer({3: b"state"})
    >>> states.get(3)
    >>> states.write(0)
    >>> states.commit(0)
    >>> states.get(3)
    b'state'
    """

    def __init__(self, directory: Path | None = None, round: int | None = None) -> None:
        self._directory = directory
        self._held: dict[int, bytes] = {}
        self._rounds: dict[int, int] = {}  # client -> that of its newest file
        self._offered: dict[int, bytes] = {}
        if directory is not None and directory.is_dir():
            self._open(directory, round)

    def get(self, client: int, before: int | None = None) -> bytes | None:
        """Returns the state of a client, None where it has none.

        Args:
            before: a round; a state of this one or a later one belongs to another run.
        """
        if client not in self._rounds or (before is not None and self._rounds[client] >= before):
            return None
        if self._directory is None:
            return self._held[client]
        path = self._path(client, self._rounds[client])
        with storage_errors(path, "read"):
            return path.read_bytes()

    def offer(self, states: Mapping[int, bytes]) -> None:
        """Takes the states that clients have brought in the round under way, in place of others
        that were offered; they do not count before `commit`."""
        self._offered = dict(states)

    def write(self, t: int) -> None:
        """Puts what was offered on the disk: call it before the step of round t is committed.

        Raises:
            StorageError: the disk is full or failed.
        """
        if self._directory is None or not self._offered:
            return
        make_directory(self._directory)
        held = [(self._path(client, t).name, state) for client, state in self._offered.items()]
        for start in range(0, len(held), _AT_ONCE):
            write_together(self._directory, dict(held[start : start + _AT_ONCE]))

    def commit(self, t: int) -> None:
        """Lets what was written count, and removes what it replaces."""
        offered, self._offered = self._offered, {}
        for client, state in offered.items():
            older = self._rounds.get(client)
            self._rounds[client] = t
            if self._directory is None:
                self._held[client] = state
            elif older is not None and older != t:
                self._path(client, older).unlink(missing_ok=True)

    def _path(self, client: int, t: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{client}-{t}"

    def _open(self, directory: Path, last: int | None) -> None:
        """Finds the newest file of each client that counts, and removes the others."""
        for path in sorted(directory.iterdir()):
            named = _NAME.fullmatch(path.name)
            if named is None:
                if path.suffix == ".tmp":  # of a write that was killed
                    path.unlink(missing_ok=True)
                continue
            client, t = map(int, named.groups())
            newest = self._rounds.get(client, -1)
            if last is not None and t > last:
                path.unlink(missing_ok=True)
            elif t > newest:
                self._rounds[client] = t
                if newest >= 0:
                    self._path(client, newest).unlink(missing_ok=True)
            elif t < newest:
                path.unlink(missing_ok=True)
