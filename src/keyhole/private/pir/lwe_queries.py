"""The client's side of learning with errors: queries for columns, and what opens their replies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from keyhole.private.pir.lwe import BLOCK, Words, add_product, public_matrix
from keyhole.private.pir.lwe_noise import draw_errors
from keyhole.private.pir.lwe_shape import DIMENSION, SCALE_BITS
from keyhole.private.prg import Prg
from keyhole.types import KeyArray

__all__ = ["Opening", "encrypt"]


@dataclass(frozen=True, repr=False)
class Opening:
    """What opens the replies to queries.

    Args:
        secrets: (u, 1024), one for each query.
        errors: (u,), the sum of the errors of each query.
    """

    secrets: Words
    errors: Words

    def __repr__(self) -> str:
        """Secrets stay secret: printing shows how many there are."""
        return f"Opening({len(self.secrets)} queries)"

    def decode(self, rows: Words, slices: NDArray[np.int64], hint: Words) -> NDArray[np.uint8]:
        """Returns the bytes of one slice of each column, (u, row_bytes).

        Args:
            rows: (u or more, r, row_bytes), what the server replies.
            slices: (u,) below r: which slice.
            hint: (r, 1024, row_bytes).
        """
        out = np.empty((len(slices), rows.shape[2]), np.uint8)
        for each in np.unique(slices):
            mine = np.flatnonzero(slices == each)
            mask = np.zeros((len(mine), rows.shape[2]), np.uint32)
            add_product(mask, self.secrets[mine], hint[each])
            noisy = rows[mine, each] - mask - np.uint32(128) * self.errors[mine, None]
            out[mine] = (noisy + np.uint32(1 << (SCALE_BITS - 1))) >> np.uint32(SCALE_BITS)
        return out


def encrypt(columns: KeyArray, length: int, seed: bytes, prg: Prg) -> tuple[Words, Opening]:
    """Returns queries A s + e + 2^24 u, (m, length), each with a new secret, and their opening.

    The public matrix is made block by block, once for all queries: 1024 products for each of its
    columns and each query, in memory for the queries and about 8 MB and 12 KB a query more.

    Args:
        columns: (m,) below `length`: the column that each query asks for.
        length: of a query.
        seed: of the public matrix.
        prg: where secrets and errors come from.
    """
    count = len(columns)
    words = np.empty((count, DIMENSION), "<u4")
    prg.fill(words.view(np.uint8))
    secrets, sums = words.astype(np.uint32, copy=False), np.zeros(count, np.uint32)
    queries = np.empty((count, length), "<u4")
    starts = range(0, length, BLOCK)
    for start, block in zip(starts, public_matrix(seed, length), strict=True):
        some = draw_errors(prg, (count, block.shape[1])).view(np.uint32)
        sums += some.sum(axis=1, dtype=np.uint32)
        add_product(some, secrets, block)
        queries[:, start : start + BLOCK] = some
    queries[np.arange(count), columns] += np.uint32(1 << SCALE_BITS)
    return queries, Opening(secrets, sums)
