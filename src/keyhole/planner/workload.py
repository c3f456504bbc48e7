"""Need: the public numbers of a round, from which every way of delivery is priced.

Trust: what a delivery may be asked to keep, and from whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from keyhole.errors import InputError

_MAX = 1 << 40  # the limit of the terms of private retrieval


@dataclass(frozen=True)
class Need:
    """What a round asks of a delivery. Nothing in it is private.

    Args:
        num_keys: K, the slices there are.
        keys_per_client: m, different keys of one client; private ways pad everyone to it.
        slice_bytes: of one slice.
        cohort: N, clients of a round.
        distinct: different keys that the whole cohort asks for; None takes the most there can be.
        broadcast_bytes: what everyone receives beside slices, whatever the way.

    Raises:
        InputError: a number is out of range, or contradicts another.

    >>> Need(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50).distinct_keys
    10000
    """

    num_keys: int
    keys_per_client: int
    slice_bytes: int
    cohort: int
    distinct: int | None = None
    broadcast_bytes: int = 0

    def __post_init__(self) -> None:
        _check("num_keys", self.num_keys, 1, _MAX, "count the slices there are")
        _check(
            "keys_per_client",
            self.keys_per_client,
            1,
            self.num_keys,
            "take no more than num_keys",
        )
        _check("slice_bytes", self.slice_bytes, 1, _MAX, "count the bytes of one slice")
        _check("cohort", self.cohort, 1, _MAX, "count the clients of a round")
        _check("broadcast_bytes", self.broadcast_bytes, 0, _MAX, "use 0 for none")
        if self.distinct is not None:
            fix = "check it against num_keys, keys_per_client and cohort"
            _check("distinct", self.distinct, self.keys_per_client, self._max_distinct, fix)

    @property
    def distinct_keys(self) -> int:
        """Different keys of the cohort."""
        return self._max_distinct if self.distinct is None else self.distinct

    @property
    def table_bytes(self) -> int:
        """All slices."""
        return self.num_keys * self.slice_bytes

    @property
    def asked_bytes(self) -> int:
        """The slices of one client."""
        return self.keys_per_client * self.slice_bytes

    @property
    def _max_distinct(self) -> int:
        return min(self.num_keys, self.cohort * self.keys_per_client)


def _check(name: str, value: int, minimum: int, limit: int, fix: str) -> None:
    if not minimum <= value <= limit:
        raise InputError(
            f"{name} is out of range",
            got=f"{value:,}",
            allowed=f"{minimum:,}..{limit:,}",
            fix=fix,
        )


Trust: TypeAlias = Literal["open", "unlinked", "hidden", "hidden-one-server", "hidden-enclave"]
"""What a delivery must keep from whom."""

TRUSTS: Mapping[Trust, str] = MappingProxyType(
    {
        "open": "a server may learn each client's keys",
        "unlinked": "nobody learns whose keys are whose",
        "hidden": "nobody learns a key, if two operators do not work together",
        "hidden-one-server": "nobody learns a key, by cryptography and with one operator",
        "hidden-enclave": "nobody learns a key, with one operator and hardware that is trusted",
    }
)
"""Trust -> what it asks for."""
