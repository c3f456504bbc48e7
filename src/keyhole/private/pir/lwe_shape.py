"""The shape of retrieval by learning with errors: its parameters, its layout and its lengths.

Whole numbers only, so that clients and servers on any machine choose the same layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isqrt

from keyhole.private.pir.messages import FRAME_BYTES, REPLY_BYTES
from keyhole.private.pir.terms import TAG_BYTES, Terms

__all__ = [
    "DIMENSION",
    "HINT_HEAD_BYTES",
    "SCALE_BITS",
    "SIGMA",
    "WORD_BYTES",
    "LweShape",
    "failure_of_byte",
    "most_columns",
]

DIMENSION = 1024
"""n, of a secret."""

SIGMA = 6.4
"""Standard deviation of an error."""

WORD_BYTES = 4
"""Of a number modulo q = 2^32."""

SCALE_BITS = 24
"""Of q / p = 2^24, what a byte is multiplied by: p = 256."""

HINT_HEAD_BYTES = 8 + 32
"""What a hint begins with: its magic and the digest of the slices."""

_MODULUS = 256  # p: entries of the matrix are bytes
_SAFETY_BITS = 40
_EXPONENT = 52_428_800  # 2^63 / (p^4 sigma^2)


def failure_of_byte(columns: int, modulus: int = _MODULUS) -> float:
    """A bound of the probability that noise changes one entry of a column: 2 exp(-t^2 / (2 s^2))
    with t = q / 2p and s = sigma sqrt(columns) p/2. For bytes it is 2 exp(-52428800 / columns).

    The noise of a byte is the sum of (d - 128) e over the columns, d a byte of the table and e an
    error. A discrete Gaussian is sub-Gaussian with its sigma (Canonne, Kamath and Steinke 2020), so
    the bound holds for every table.

    Args:
        columns: of the matrix.
        modulus: p, of its entries.

    >>> failure_of_byte(2**20) < 2**-71, failure_of_byte(2**20, modulus=294) < 2**-40
    (True, True)
    """
    return 2 * exp(-(2**63) / (modulus**4 * SIGMA**2 * columns))


def most_columns(most_keys: int, row_bytes: int) -> int:
    """The columns up to which one of all bytes of a question fails with at most 2^-40."""
    bits = 1 + _SAFETY_BITS + (most_keys * row_bytes).bit_length()
    return 1000 * _EXPONENT // (694 * bits)  # 0.694 is above log(2)


@dataclass(frozen=True)
class LweShape:
    """How slices lie in the matrix: key k is slice k mod r of column k div r.

    r is what makes the fewest bytes: hint, and most_keys queries with their replies. The hint and a
    reply grow with r, a query shrinks. The rounding to whole columns is left out of the choice.

    Args:
        num_keys: K.
        record_bytes: of one slice, without its tag.
        most_keys: m: queries of one client, at most K.

    >>> shape = LweShape(num_keys=100_000, record_bytes=2000, most_keys=1000)
    >>> shape.slices_per_column, shape.columns
    (5, 20000)
    >>> round(shape.total_bytes / 1e6, 1)
    161.6
    """

    num_keys: int
    record_bytes: int
    most_keys: int

    @staticmethod
    def of(terms: Terms) -> LweShape:
        """The shape under terms."""
        return LweShape(terms.num_keys, terms.record_bytes, terms.most_keys)

    @property
    def row_bytes(self) -> int:
        """A slice and its tag."""
        return self.record_bytes + TAG_BYTES

    @property
    def slices_per_column(self) -> int:
        """r."""
        fewest = -(-self.num_keys // most_columns(self.most_keys, self.row_bytes))
        each = self.row_bytes * (DIMENSION + self.most_keys)
        ideal = isqrt(self.most_keys * self.num_keys // each)
        near = (min(max(r, fewest, 1), self.num_keys) for r in (ideal, ideal + 1))
        return min(near, key=lambda r: (self._bytes_with(r), r))

    @property
    def columns(self) -> int:
        """Of the matrix: the length of a query in words."""
        return -(-self.num_keys // self.slices_per_column)

    @property
    def query_bytes(self) -> int:
        """Of a query for `most_keys` keys."""
        return FRAME_BYTES + WORD_BYTES * self.most_keys * self.columns

    @property
    def reply_bytes(self) -> int:
        """Of its reply."""
        words = self.most_keys * self.slices_per_column * self.row_bytes
        return REPLY_BYTES + WORD_BYTES * words

    @property
    def hint_bytes(self) -> int:
        """Of the hint, which every client fetches once a round."""
        words = DIMENSION * self.slices_per_column * self.row_bytes
        return HINT_HEAD_BYTES + WORD_BYTES * words

    @property
    def total_bytes(self) -> int:
        """Of all that one client sends and receives in a round."""
        return self.hint_bytes + self.query_bytes + self.reply_bytes

    @property
    def failure(self) -> float:
        """A bound of the probability that one byte or more of a question is decoded wrongly; its
        tag shows that, and the client has to ask again."""
        return self.most_keys * self.row_bytes * failure_of_byte(self.columns)

    def _bytes_with(self, r: int) -> int:
        up = self.most_keys * -(-self.num_keys // r)
        return up + r * self.row_bytes * (DIMENSION + self.most_keys)
