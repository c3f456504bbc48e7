"""Numbers the rounds of runs that use one rounds directory, one run after the other.

run.json    of the rounds directory: which run publishes there, and the number of its round 0

A run counts its rounds from 0. In a directory that other runs have used, its rounds have numbers
above theirs: the identifier of a round never means another one, and devices that took part in an
earlier run take part in this one. A run that is resumed after another has used the directory goes
on above that, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from keyhole.errors import StorageError
from keyhole.service.directory import read_current, write_file
from keyhole.service.publishing import Publisher
from keyhole.wire.manifest import number_of

_RUN = "run.json"


class _Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The run that publishes in a directory."""

    run: str
    first: int  # the number of its round 0; below 0 where it is resumed in a younger directory


@dataclass
class Numbering:
    """The numbers that rounds of a run have in the directory of its publisher.

    Args:
        run: its name, as `Draws.run` has it.
    """

    publisher: Publisher
    run: str
    _first: int | None = field(default=None, init=False)

    def of(self, t: int) -> int:
        """Returns the number of round t. The first call takes the directory over: a round that
        another run has left open is closed."""
        if self._first is None:
            self._first = self._taken_over(t)
        return self._first + t

    def round_of(self, round_id: str) -> int:
        """Returns which round of the run one is that was published; `of` was called for it."""
        number = number_of(round_id)
        assert number is not None
        assert self._first is not None
        return number - self._first

    def _taken_over(self, t: int) -> int:
        directory = self.publisher.directory
        path, owner, current = directory / _RUN, self._owner(), read_current(directory)
        if owner is not None and owner.run == self.run:
            return owner.first
        first = 0 if current is None else current.number + 1 - t
        if current is not None and (current.phase == "open" or current.trailing):
            self.publisher.close_round()
        write_file(path, msgspec.json.encode(_Owner(self.run, first)) + b"\n", True)
        return first

    def _owner(self) -> _Owner | None:
        path = self.publisher.directory / _RUN
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Owner)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise StorageError(
                f"{path.name} cannot be read: got {type(error).__name__}; expected the run that "
                "publishes here; remove it: the next run counts on from the current round"
            ) from error
