"""Keeps what has been spent of clients' privacy, run after run: a file that only grows.

An aggregator, or a device, notes every noisy sum before anything of it leaves: its name, the
population, the noise, and whom it counts. Run after run, with one trainer or another, what the sums
of a device tell together is composed as Gaussians are: each costs 1 / z^2, z being the standard
deviation of the noise over the norm of an update, and all together are as private as one with
z = 1 / sqrt(sum of the costs). Nothing is gained by sampling: who keeps a ledger sees who takes
part. A sum without noise, or with too little for its cost to be a number, costs infinitely much,
and is noted, too.

    keyhole-ledger 1\\n
    DIGEST {"sum": "...", "population": "...", "noise": z, "devices": ["..."]}\\n       and so on

DIGEST is SHA-256, in hex, of the digest before it and of the entry's text: a line that was changed,
left out or put elsewhere shows. An entry counts once it is on the disk; what a crash left of one
that was under way is cut off when the file is next opened, and of a sum that is noted already no
second entry is made; devices that share a file each note their own part. The file is readable by
its owner alone: it names devices.

Hidden: nothing; a ledger is its owner's. Not covered: an owner that cuts whole lines off the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf, isfinite
from pathlib import Path
from typing import Any

from keyhole.aggregation.privacy.accountant import gaussian_cost, gaussian_epsilon
from keyhole.errors import BudgetError, InputError, StorageError
from keyhole.files import make_directory, storage_errors, sync_directory, write_all

_HEAD = b"keyhole-ledger 1\n"
_DIGEST = 64  # hex digits
DELTA = 1e-6
"""The delta for which epsilon is stated where nothing else is said."""


@dataclass(frozen=True)
class Charge:
    """A sum that was paid for.

    Args:
        sum: its name, which no other sum has.
        population: whose sums are counted together: of a trainer, or of a service.
        noise: z, standard deviation of the noise over the norm of an update; 0 for none.
        devices: whom it counts, by name.
    """

    sum: str
    population: str
    noise: float
    devices: tuple[str, ...]

    @property
    def cost(self) -> float:
        """What it adds to 1 / z^2 of everyone it counts; infinite for next to no noise."""
        return gaussian_cost(self.noise)

    def encode(self) -> bytes:
        """Returns it as one line of text without its end."""
        told = {**vars(self), "devices": list(self.devices)}
        return json.dumps(told, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    @staticmethod
    def decode(text: bytes) -> Charge:
        """Returns what `encode` wrote; raises ValueError, KeyError or TypeError for another."""
        told = json.loads(text)
        names = [str(name) for name in told["devices"]]
        return Charge(str(told["sum"]), str(told["population"]), float(told["noise"]), tuple(names))


@dataclass
class Spent:
    """What entries cost, composed: the sum of 1 / z^2, and of how many sums."""

    cost: float = 0.0
    sums: int = 0

    def add(self, cost: float) -> None:
        """Counts one more sum."""
        self.cost, self.sums = self.cost + cost, self.sums + 1

    def epsilon(self, delta: float = DELTA) -> float:
        """Returns epsilon for a delta; infinite where a sum had no noise."""
        return gaussian_epsilon(self.cost, delta)


@dataclass
class Totals:
    """What a ledger's entries cost, by whom they count.

    Args:
        populations: what everything costs a client that is in every sum of a population.
        devices: what a device's own sums cost, of all populations together.
    """

    populations: dict[str, Spent] = field(default_factory=dict)
    devices: dict[str, Spent] = field(default_factory=dict)
    names: set[str] = field(default_factory=set, repr=False)  # of sums
    _parts: set[tuple[str, str]] = field(default_factory=set, repr=False)  # sum, one device

    def has(self, entry: Charge) -> bool:
        """Returns whether an entry is noted. Devices that share a ledger each note their part of a
        sum."""
        if len(entry.devices) == 1:
            return (entry.sum, entry.devices[0]) in self._parts
        return entry.sum in self.names

    def add(self, entry: Charge) -> None:
        """Counts one more entry."""
        if entry.sum not in self.names:
            self.populations.setdefault(entry.population, Spent()).add(entry.cost)
        self.names.add(entry.sum)
        if len(entry.devices) == 1:
            self._parts.add((entry.sum, entry.devices[0]))
        for name in entry.devices:
            self.devices.setdefault(name, Spent()).add(entry.cost)

    def after(self, device: str, cost: float) -> float:
        """Returns what a device's sums cost with one more."""
        spent = self.devices.get(device)
        return cost + (spent.cost if spent else 0.0)


@dataclass(frozen=True)
class Budget:
    """The most that may be spent of one device.

    Args:
        epsilon: for everything that a ledger holds; infinity sets no bound.
        delta: for which epsilon is stated.
    """

    epsilon: float = inf
    delta: float = DELTA

    def __post_init__(self) -> None:
        if not self.epsilon > 0 or not 0 < self.delta < 1:
            raise InputError(
                f"a budget that allows nothing: got epsilon {self.epsilon:g}, delta "
                f"{self.delta:g}; expected epsilon above 0, delta between 0 and 1; choose others"
            )

    def check(self, totals: Totals, entry: Charge) -> None:
        """Raises BudgetError where a sum costs one of its devices too much; the message holds a
        count and no name."""
        cost = entry.cost  # before anything is written, with a budget or without
        if self.epsilon == inf:
            return
        after = [totals.after(name, cost) for name in entry.devices]
        # Epsilon grows with the cost: the dearest are found without a search for each of them.
        worst = max(after, default=0.0)
        if gaussian_epsilon(worst, self.delta) <= self.epsilon:
            return
        dear = {each for each in set(after) if gaussian_epsilon(each, self.delta) > self.epsilon}
        count = sum(each in dear for each in after)
        raise BudgetError(
            "a sum that would spend more privacy than the ledger allows: got epsilon "
            f"{gaussian_epsilon(worst, self.delta):.4g} over all runs, for {count} of "
            f"{len(after)} devices; expected {self.epsilon:g} or less at delta {self.delta:g}; add "
            "more noise, or leave them out"
        )


UNBOUNDED = Budget()


def default_ledger() -> Path:
    """Returns where devices of this user keep their ledger, unless they are told another place:
    keyhole/ledger in the directory for state, XDG_STATE_HOME or ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "keyhole" / "ledger"


class Ledger:
    """A ledger in a file, open for writing; threads and processes may share it.

    Raises:
        StorageError: the file cannot be opened or written, or a line is not what was written, and
            nothing is cut off or mended.
    """

    def __init__(self, path: Path, budget: Budget = UNBOUNDED) -> None:
        self.budget, self._path = budget, path
        make_directory(path.parent)
        with storage_errors(path, "open"):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            sync_directory(path.parent)
        self.totals, self._read_to, self._last = Totals(), 0, ""
        self._lock = threading.Lock()
        with self._locked():
            pass

    def __repr__(self) -> str:
        return f"Ledger({len(self.totals.names)} sums, {len(self.totals.devices)} devices)"

    def close(self) -> None:
        """Lets go of the file; nothing is lost without it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def check(self, entry: Charge) -> None:
        """Raises what `charge` would raise, and notes nothing."""
        _check_entry(entry)
        with self._locked():
            if not self.totals.has(entry):
                self.budget.check(self.totals, entry)

    def charge(self, entry: Charge) -> bool:
        """Notes a sum, before anything of it leaves; it is on the disk when this returns.

        Returns:
            Whether it is new; a sum that is noted already is not noted again.

        Raises:
            InputError: it has no name, or noise that is no finite number.
            BudgetError: it is beyond the budget, and was not noted.
            StorageError: it could not be written, and was not noted.
        """
        _check_entry(entry)
        with self._locked():
            if self.totals.has(entry):
                return False
            self.budget.check(self.totals, entry)
            self._append(entry)
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the file, with all that others have noted in the meantime."""
        with self._lock:
            with storage_errors(self._path, "lock"):
                fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                self._catch_up()
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _catch_up(self) -> None:
        """Reads entries that are not read yet; cuts off what a crash has left of the last one."""
        with storage_errors(self._path, "read"):
            size = os.fstat(self._file).st_size
            data = os.pread(self._file, size - self._read_to, self._read_to)
        whole = _whole_lines(data, self._read_to == 0, self._path)
        for entry, digest in _entries(data[:whole], self._read_to == 0, self._last, self._path):
            self.totals.add(entry)
            self._last = digest
        self._read_to += whole
        with storage_errors(self._path, "write"):
            if whole < len(data):
                os.ftruncate(self._file, self._read_to)
                os.fsync(self._file)
            if self._read_to == 0:
                os.lseek(self._file, 0, os.SEEK_SET)
                write_all(self._file, [_HEAD])
                os.fsync(self._file)
                self._read_to = len(_HEAD)

    def _append(self, entry: Charge) -> None:
        text = entry.encode()
        digest = _digest(self._last, text)
        line = f"{digest} ".encode("ascii") + text + b"\n"
        with storage_errors(self._path, "write"):
            os.lseek(self._file, self._read_to, os.SEEK_SET)
            try:
                write_all(self._file, [line])
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, self._read_to)
                raise
        self.totals.add(entry)
        self._last, self._read_to = digest, self._read_to + len(line)


def read_ledger(path: Path) -> list[Charge]:
    """Returns the entries of a ledger, which another process may be writing.

    Raises:
        StorageError: there is no such file, it cannot be read, or a line is not what was written.
    """
    with storage_errors(path, "read"):
        data = path.read_bytes()
    whole = data[: _whole_lines(data, True, path)]
    return [entry for entry, _ in _entries(whole, True, "", path)]


def totals_of(entries: Iterable[Charge]) -> Totals:
    """Returns what entries cost together."""
    totals = Totals()
    for entry in entries:
        totals.add(entry)
    return totals


def describe(totals: Totals, delta: float = DELTA) -> dict[str, Any]:
    """Returns totals as JSON has them; an epsilon without bound is None."""

    def told(by_name: Mapping[str, Spent]) -> list[dict[str, Any]]:
        found = [
            {"name": name, "sums": spent.sums, "epsilon": _or_none(spent.epsilon(delta))}
            for name, spent in by_name.items()
        ]
        return sorted(found, key=lambda each: (-_or_inf(each["epsilon"]), each["name"]))

    return {
        "delta": delta,
        "composition": "Gaussians, one after the other; nothing gained by sampling",
        "populations": told(totals.populations),
        "devices": told(totals.devices),
    }


def _or_none(epsilon: float) -> float | None:
    return epsilon if isfinite(epsilon) else None


def _or_inf(epsilon: float | None) -> float:
    return inf if epsilon is None else epsilon


def _check_entry(entry: Charge) -> None:
    if not isfinite(entry.noise) or not entry.sum:
        raise InputError(
            f"an entry that says nothing: got noise {entry.noise}; expected a sum with a name, and "
            "a finite noise; pass those of the params"
        )


def _digest(last: str, text: bytes) -> str:
    return sha256(last.encode("ascii") + text).hexdigest()


def _whole_lines(data: bytes, is_start: bool, path: Path) -> int:
    """How many bytes are lines that were written to their end: the last may be one of a process
    that was killed. A file that holds less than its head is a new one; one that begins with
    anything else is no ledger, and nothing of it is cut off."""
    whole = data.rfind(b"\n") + 1
    if is_start and not _HEAD.startswith(data[: len(_HEAD)]):
        raise _damaged(path, 1)
    return whole


def _entries(data: bytes, is_start: bool, last: str, path: Path) -> Iterator[tuple[Charge, str]]:
    lines = data.split(b"\n")[:-1]
    if is_start and lines:
        lines.pop(0)  # the head, which `_whole_lines` has compared
    for number, line in enumerate(lines, 2 if is_start else 1):
        digest, text = line[:_DIGEST].decode("ascii", "replace"), line[_DIGEST + 1 :]
        try:
            entry = Charge.decode(text)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _damaged(path, number) from error
        if _digest(last, text) != digest:
            raise _damaged(path, number)
        last = digest
        yield entry, digest


def _damaged(path: Path, line: int) -> StorageError:
    return StorageError(
        f"{path.name} is damaged: got another line {line} than was written; expected the lines of "
        "a ledger, each with the digest of those before it; restore the file from a copy: nothing "
        "is spent until it is whole"
    )
