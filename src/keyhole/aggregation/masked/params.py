"""Defines the public facts of a masked sum, and the graph of neighbours that share masks.

Below 200 clients everybody is everybody's neighbour (Bonawitz et al., CCS 2017). Above, every
client has the same small, even number k of neighbours (Bell et al., CCS 2020): clients stand on a
circle in a public random order, and neighbours are the k / 2 next ones on either side, which is
Harary's graph.

With the degree and the threshold of `degree_of` and `threshold_of`, for an honest-but-curious
server, and for corrupt and dropped clients that are chosen without knowledge of the order (it comes
from the name of the round, which must not be known before), all of this holds but for the
probabilities of `Risk`:

- private: no client has `threshold` or more corrupt neighbours, so the server and they cannot open
  what the protocol keeps closed; and the clients that are honest and stay are connected, so the
  server learns no sum over a part of them;
- correct: every client keeps `threshold` neighbours that have not dropped, so the sum is opened.

Not covered: a server that lies about who has dropped, or that chooses the order.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

import numpy as np

from keyhole.crypto.codec import read_facts
from keyhole.crypto.prg import Prg, fixed_key
from keyhole.errors import InputError

COMPLETE_BELOW = 200
"""Clients from which on the graph is sparse; for fewer it would save little."""

_USUAL_FRACTION = 0.2


@dataclass(frozen=True)
class Risk:
    """What a sparse graph has to bear, and how rarely it may fail to.

    Args:
        corrupt: fraction of clients that tell the server all they know.
        dropped: fraction of clients that leave during the round.
        privacy_bits: the sum of one part of the clients is exposed with probability below
            2 * 2^-privacy_bits (a corrupt neighbourhood, and a graph that falls apart).
        failure_bits: a sum cannot be opened with probability below 2^-failure_bits.
    """

    corrupt: float = _USUAL_FRACTION
    dropped: float = _USUAL_FRACTION
    privacy_bits: int = 40
    failure_bits: int = 30

    def __post_init__(self) -> None:
        if not (self.corrupt >= 0 and self.dropped >= 0 and self.corrupt + self.dropped < 1):
            raise InputError(
                "too many corrupt and dropped clients to be tolerated: got "
                f"{self.corrupt} and {self.dropped}; expected 0 or more, together below 1; no "
                "graph helps where nobody honest stays"
            )


def neighbours(
    count: int, degree: int | None = None, seed: bytes = b""
) -> tuple[tuple[int, ...], ...]:
    """Returns the neighbours of every client, ascending, without itself.

    Args:
        degree: neighbours of each: even, or count - 1 for the complete graph; that of `degree_of`
            if None.
        seed: of the order on the circle: the name of the round. The complete graph has no order.

    >>> neighbours(3)
    ((1, 2), (0, 2), (0, 1))
    >>> len(neighbours(1000)[0])
    112
    """
    degree = degree_of(count) if degree is None else degree
    _check(count, degree)
    if degree == count - 1:
        return tuple((*range(own), *range(own + 1, count)) for own in range(count))
    order = Prg(fixed_key(seed, b"keyhole-graph")).permutation(count)
    steps = np.r_[-(degree // 2) : 0, 1 : degree // 2 + 1]
    lists = np.empty((count, degree), np.int64)
    lists[order] = order[(np.arange(count)[:, None] + steps) % count]
    lists.sort(axis=1)
    return tuple(map(tuple, lists.tolist()))


def degree_of(count: int, risk: Risk | None = None) -> int:
    """Returns the least even degree for which there is a threshold that bears the risk; count - 1,
    the complete graph, below 200 clients or if there is none.

    Clients that are honest and stay are connected if nowhere on the circle k / 2 in a row are
    gone: the next that stays is then a neighbour. With g corrupt or dropped of N, k / 2 places in a
    row are all gone with probability prod_(i < k/2) (g - i) / (N - i), and there are N beginnings.

    >>> [degree_of(count) for count in (50, 199, 200, 1000, 10_000)]
    [49, 198, 68, 112, 134]
    """
    risk = risk or Risk()
    if count >= COMPLETE_BELOW:
        for degree in range(2, count - 1, 2):
            if _falls_apart(count, degree, risk) > -risk.privacy_bits:
                continue
            minimum, limit = _thresholds(count, degree, risk)
            if minimum <= limit:
                return degree
    return count - 1


def threshold_of(count: int, degree: int | None = None, risk: Risk | None = None) -> int:
    """Returns how many shares open a secret.

    In the complete graph floor(2 count / 3) + 1, where a client keeps a share of its own secrets:
    it bears that a third drops. In a sparse one the most with which sums can be opened: corrupt
    neighbours of one client are k draws of N - 1 clients without replacement, and so are dropped
    ones; hypergeometric tails, times N for all clients, are held below the bounds of the risk. A
    share that a client keeps of its own secrets changes nothing for the worse.

    Args:
        degree: neighbours of each; all the others if None.

    >>> threshold_of(50), threshold_of(1000, degree_of(1000))
    (34, 59)
    """
    if degree is None or degree == count - 1:
        return 2 * count // 3 + 1
    risk = risk or Risk()
    _check(count, degree)
    minimum, limit = _thresholds(count, degree, risk)
    if minimum > limit or _falls_apart(count, degree, risk) > -risk.privacy_bits:
        raise InputError(
            f"no threshold bears the risk with so few neighbours: got {degree} neighbours of "
            f"{count} clients; expected the degree of degree_of, or more; leave the degree out, or "
            "name the threshold as well"
        )
    return limit


def _thresholds(count: int, degree: int, risk: Risk) -> tuple[int, int]:
    """The least threshold that is private and the most that is correct, either of which may be
    out of reach."""
    corrupt, dropped = math.ceil(risk.corrupt * count), math.ceil(risk.dropped * count)
    minimum = _quantile(count, corrupt, degree, risk.privacy_bits)
    # degree - threshold + 1 dropped neighbours are too many.
    limit = degree + 1 - _quantile(count, dropped, degree, risk.failure_bits)
    return minimum, limit


def _quantile(count: int, special: int, degree: int, bits: int) -> int:
    """The least t, 1 or more, such that any client has t special neighbours with probability at
    most 2^-bits."""
    others = count - 1
    total, tail = _log_choose(others, degree), 0.0
    for number in range(min(special, degree), 0, -1):
        log = _log_choose(special, number) + _log_choose(others - special, degree - number) - total
        tail += math.exp(log)
        if count * tail > 2.0**-bits:
            return number + 1
    return 1


def _falls_apart(count: int, degree: int, risk: Risk) -> float:
    """Bound on the binary logarithm of the probability that those who stay are not connected."""
    gone = math.ceil(risk.corrupt * count) + math.ceil(risk.dropped * count)
    run = degree // 2
    log = math.log(count) + _log_choose(gone, run) - _log_choose(count, run)
    return log / math.log(2)


def _log_choose(n: int, k: int) -> float:
    """Logarithm of the number of ways to take k of n."""
    if not 0 <= k <= n:
        return -math.inf
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _check(count: int, degree: int) -> None:
    """Refuses what is no regular graph."""
    is_circle = 2 <= degree < count and degree % 2 == 0
    if count < 2 or not (is_circle or degree == count - 1):
        raise InputError(
            f"a graph of neighbours that does not exist: got {count} clients with "
            f"{degree} neighbours each; expected 2 clients or more; an even number of "
            "neighbours, or all the others; take one neighbour more, or leave the "
            "degree out"
        )


_MAGIC = b"KHG1"
_FORM = struct.Struct("<4sBBH16sIQII")
_MAX_CLIENTS = 1 << 16
_MAX_ENTRIES = 1 << 32
_MAX_PAIRS = 1 << 24  # clients times neighbours of a sparse graph, which every party holds


@dataclass(frozen=True)
class SecAggParams:
    """The public facts of one secure sum.

    Args:
        round: 16 bytes: which sum this is. No client takes part in one twice.
        cohort: N, how many clients are invited; their places are 0 to N - 1.
        length: of every vector.
        bits: of every entry: sums wrap at 2^16 or 2^32.
        threshold: t, how many members of a group must stay to the end for its secrets to be
            rebuilt; by default floor(2 N / 3) + 1 of all, or what the sparse graph asks for.
        degree: k, with how many others each client shares masks; by default with all of them below
            200 clients and with those of the sparse graph from there on.
        signed: whether clients sign what they see, which a server that cheats does not survive.
            Then everyone shares masks with everyone, since everyone must see the same list.

    >>> SecAggParams(bytes(16), cohort=50, length=8).shares_needed
    34
    """

    round: bytes
    cohort: int
    length: int
    bits: Literal[16, 32] = 32
    threshold: int | None = None
    degree: int | None = None
    signed: bool = False

    def __post_init__(self) -> None:
        if len(self.round) != 16 or self.bits not in (16, 32):
            raise _bad(f"a name of {len(self.round)} bytes, entries of {self.bits} bits")
        if not (2 <= self.cohort <= _MAX_CLIENTS and 1 <= self.length <= _MAX_ENTRIES):
            raise _bad(f"{self.cohort} clients, {self.length} entries")
        if self.signed and self.degree not in (None, self.cohort - 1):
            raise _bad(f"signatures, and {self.degree} neighbours each")
        if self.degree not in (None, self.cohort - 1) and self.cohort * self.degree > _MAX_PAIRS:
            raise _bad(f"{self.cohort} clients, with {self.degree} neighbours each")
        smallest = min(len(group) for group in self._groups)
        # One share alone must not open a secret, and a sum of one is an input.
        if not 2 <= self.shares_needed <= smallest:
            raise _bad(f"threshold {self.shares_needed} in groups of {smallest}")
        if self.signed and 2 * self.shares_needed <= self.cohort:
            raise _bad(f"signatures, and threshold {self.shares_needed} of {self.cohort}")

    @property
    def is_complete(self) -> bool:
        """Whether everyone shares masks with everyone."""
        return len(self._groups[0]) == self.cohort

    @cached_property
    def shares_needed(self) -> int:
        """t: with fewer shares a secret stays one."""
        if self.threshold is not None:
            return self.threshold
        return threshold_of(self.cohort, len(self._groups[0]) - 1)

    @property
    def min_survivors(self) -> int:
        """How many inputs a sum that is released has at least."""
        if self.is_complete:
            return self.shares_needed
        return threshold_of(self.cohort, self.cohort - 1)

    @cached_property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        degree = degree_of(self.cohort) if self.degree is None else self.degree
        if self.signed or degree == self.cohort - 1:
            return (tuple(range(self.cohort)),) * self.cohort
        near = neighbours(self.cohort, degree, self.round)
        return tuple(tuple(sorted((place, *others))) for place, others in enumerate(near))

    def group(self, place: int) -> tuple[int, ...]:
        """Returns the places that hold shares of a client's secrets, ascending: those with which
        it shares masks, and its own."""
        return self._groups[place]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of ring elements, as they travel."""
        return np.dtype("<u4" if self.bits == 32 else "<u2")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that stand for all of it in every message."""
        return sha256(self.encode()).digest()

    def encode(self) -> bytes:
        """Returns the settings as a client fetches them; a zero stands for a default."""
        return _FORM.pack(
            _MAGIC,
            self.bits,
            self.signed,
            0,
            self.round,
            self.cohort,
            self.length,
            self.threshold or 0,
            self.degree or 0,
        )

    @staticmethod
    def decode(data: bytes) -> SecAggParams:
        """Returns the settings that `data` holds."""
        return read_facts(data, "settings of a secure sum", _unpack)


def _unpack(data: bytes) -> SecAggParams:
    _, bits, signed, _, name, cohort, length, threshold, degree = _FORM.unpack(data)
    return SecAggParams(name, cohort, length, bits, threshold or None, degree or None, signed == 1)


def _bad(got: str) -> InputError:
    return InputError(
        f"settings of a secure sum that make no sense: got {got}; expected names of "
        f"16 bytes; 16 or 32 bits; 2..{_MAX_CLIENTS} clients; 1..2^32 entries; all "
        "others as neighbours, or so few that there are 2^24 in all; thresholds from "
        "2 to the size of a group, with signatures above half of everyone; leave "
        "threshold and degree to their defaults"
    )
