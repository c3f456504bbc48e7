"""Leaves of a model that nobody trains: what they are, and which of their rows each client has.

A frozen leaf has no optimizer state and is not stepped. It reaches a client once for each digest,
its rows as the client comes to need them, and no update holds it. `Receipts` counts what that
costs: the rows of a client's keys that it has not received before, or whole tables where the
delivery keeps keys to itself. Rows count in the round in which the client received slices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole.arrays import Array, KeyArray
from keyhole.crypto.merkle import HASH_BYTES, TreeShape, find_siblings, proof_length
from keyhole.primitives.layout import KeysBySpace, Layout, Part, layout_digest
from keyhole.server.client_states import ClientStates

if TYPE_CHECKING:
    from keyhole.server.state import ServerState


@dataclass(frozen=True, eq=False)
class FrozenLeaves:
    """The frozen leaves of a whole model.

    Args:
        layout: these leaves and their cuts, under all key spaces of the model.
        values: path -> float32 array.
    """

    layout: Layout
    values: Mapping[str, Array]

    @cached_property
    def digest(self) -> str:
        """What tells these values from others, 64 hex digits."""
        total = sha256(layout_digest(self.layout))
        for path in sorted(self.values):
            total.update(np.ascontiguousarray(self.values[path]).data)
        return total.hexdigest()

    @cached_property
    def state(self) -> ServerState:
        """The values as tables, to be published. They are never stepped: there are no moments."""
        from keyhole.server.optimizers import SGD
        from keyhole.server.state import ServerState  # loads Numba, which devices do without

        return ServerState.dense(self.layout, dict(self.values), SGD(1.0))


@dataclass
class Receipts:
    """Who has received which rows of frozen leaves, as far as the trainer knows.

    Args:
        leaves: what there is to receive.
        received: of each client, the keys of each part that it has; a run has its own.
    """

    leaves: FrozenLeaves
    received: ClientStates = field(default_factory=ClientStates)
    _pending: dict[int, bytes] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(model: Any) -> Receipts | None:
        """Returns receipts of a model's `frozen_leaves`; None where it has none."""
        leaves = getattr(model, "frozen_leaves", None)
        return None if leaves is None else Receipts(leaves)

    def kept_in(self, directory: Path | None, last: int | None) -> Receipts:
        """Returns those of a run, which begins anew or goes on after round `last`."""
        return Receipts(self.leaves, ClientStates(directory, last))

    def charge(self, client: int, keys: KeysBySpace, *, whole: bool, proofs: bool) -> int:
        """Notes that a client received slices of `keys`; returns the bytes of frozen leaves that
        it received with them.

        Args:
            whole: whether it downloads whole tables, so that its keys stay its own.
            proofs: whether rows come with what binds them to a root.
        """
        held = self._held(client)
        count, now = 0, []
        for part, known in zip(self.leaves.layout.parts, held, strict=True):
            asked = _every(part) if whole else np.unique(part.keys_of(keys).array)
            fresh = np.setdiff1d(asked, known, assume_unique=True)
            count += len(fresh) * part.record.itemsize
            if proofs and not whole and len(fresh):
                find_siblings.load()  # a cohort has many clients
                count += HASH_BYTES * proof_length(TreeShape(part.space.num_keys), fresh)
            now.append(np.union1d(known, fresh) if len(fresh) else known)
        if count:
            self._pending[client] = bytes.fromhex(self.leaves.digest) + _pack(now)
        return count

    def write(self, t: int) -> None:
        """Puts what is new on the disk, before the step of round t is committed."""
        self.received.offer(self._pending)
        self.received.write(t)

    def commit(self, t: int) -> None:
        """Lets what was written count."""
        self.received.commit(t)
        self._pending = {}

    def _held(self, client: int) -> list[KeyArray]:
        stored = self._pending.get(client) or self.received.get(client) or b""
        parts = self.leaves.layout.parts
        if stored[:32] != bytes.fromhex(self.leaves.digest):  # nothing yet, or other values
            return [np.empty(0, np.int64) for _ in parts]
        return _unpack(stored[32:], len(parts))


def _every(part: Part) -> KeyArray:
    return np.arange(part.space.num_keys, dtype=np.int64)


def _pack(keys: list[KeyArray]) -> bytes:
    """The keys of each part behind how many there are."""
    return b"".join(len(each).to_bytes(8, "little") + each.astype("<i8").tobytes() for each in keys)


def _unpack(data: bytes, parts: int) -> list[KeyArray]:
    found, at = [], 0
    for _ in range(parts):
        count = int.from_bytes(data[at : at + 8], "little")
        at += 8
        found.append(np.frombuffer(data, "<i8", count, at).astype(np.int64))
        at += 8 * count
    return found
