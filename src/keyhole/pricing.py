"""Describes what ways are priced with: the public numbers of a round, and the speed of one core.

Speeds are read from `measured.json`, which says by which command, on which machine, when and at
which commit each group was measured; tests hold them to the results of other benchmarks. Those of
deliveries and of the service are written by `python benchmarks/growth.py --write`: CPU time of
`keyhole plan --calibrate`, and of `keyhole serve` over loopback. A network card and a proxy in
front cost something too, which is not here. New memory costs page faults: replies are made almost
three times as fast in a process that keeps what it freed, as the `keyhole` command does.

`SumSpeeds` is from `benchmarks/results/secure_sum.json` and, for short rows and for secrets, from
the same code with other numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from keyhole.errors import InputError

_MEASURED = Path(__file__).with_name("measured.json")
_MAX = 1 << 40  # the limit of the terms of private retrieval


@dataclass(frozen=True)
class Workload:
    """What a round asks of a delivery. Nothing in it is private.

    Args:
        num_keys: K, the slices there are.
        keys_per_client: m, different keys of one client; private ways pad everyone to it.
        slice_bytes: of one slice.
        cohort: N, clients of a round.
        distinct: different keys that the whole cohort asks for; None takes the most there can be.
        broadcast_bytes: what everyone receives beside slices, whatever the way.
        popular: how many keys are popular, and how many of m are asked of those alone, where a way
            can do so; None asks the whole table.

    Raises:
        InputError: a number is out of range, or contradicts another.

    >>> Workload(num_keys=10_000, keys_per_client=1_000, slice_bytes=2_000, cohort=50).distinct_keys
    10000
    """

    num_keys: int
    keys_per_client: int
    slice_bytes: int
    cohort: int
    distinct: int | None = None
    broadcast_bytes: int = 0
    popular: tuple[int, int] | None = None

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
        if self.popular is not None:
            count, slots = self.popular
            _check("popular keys", count, 2, self.num_keys - 1, "take some of num_keys")
            limit = min(count - 1, self.keys_per_client)
            _check("keys asked of popular ones", slots, 1, limit, "take a share of a query's keys")

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
            f"{name} is out of range: got {value:,}; expected {minimum:,}..{limit:,}; {fix}"
        )


@dataclass(frozen=True)
class Speeds:
    """Speeds of one core: bytes per second where nothing else is said.

    Args:
        gather: copying slices of random keys.
        binding: of slices, hashed and copied into a table for private retrieval.
        path_seconds: for the path of a slice and its share of the tree, beside that.
        place_seconds: for finding all buckets of a key, when a table is made.
        aes: AES-128 in counter mode.
        scan: the XOR of the rows of a table that one query selects. It skips half of the rows, so
            this may be above what memory gives.
        scan_many: the same for `pass_queries` queries in one pass: table bytes times queries.
        scan_buckets: for one client's queries of all buckets. Each row lies in three of them, and
            they count as three.
        scan_buckets_many: the same for `pass_queries` clients in one pass.
        expand: points a second, to which a server expands the shares of queries.
        read_seconds: for reading what a client sends to one of two servers, whatever its keys.
        reply: of rows, copied into a reply and summed up for its check.
        ask_seconds: for a client's question to two servers, whatever its keys.
        share_seconds: for placing a key and sharing its query, at a client.
        opening: of replies of two servers, that a client adds up and compares with the top.
        ring_encode: of a table as one server of private retrieval multiplies with it, made anew.
        ring_answer: products a second of such a table and one query.
        ring_answer_many: the same for eight queries in one pass.
        ring_numbers: coefficients of queries, replies and hints a second, at that server.
        ring_client: coefficients a second that its client makes and opens.
        enclave_scan: of the table, read for one key under a mask.
        seal_seconds: for sealing a request and opening its answer, at a client.
        open_seconds: for opening a request and sealing its answer, at a gateway.
        forward_seconds: for mixing a request and its answer with others, at a relay.
        reading: of files, for tables that do not fit into memory. Not calibrated: the time that a
            processor takes to copy what the system holds.
        quote_seconds: for checking what an enclave shows. Not calibrated: dcap-qvl took 10.8 ms for
            a genuine TDX quote.
        pass_queries: queries that are answered in one pass over a table.
    """

    gather: float
    binding: float
    path_seconds: float
    place_seconds: float
    aes: float
    scan: float
    scan_many: float
    scan_buckets: float
    scan_buckets_many: float
    expand: float
    read_seconds: float
    reply: float
    ask_seconds: float
    share_seconds: float
    opening: float
    ring_encode: float
    ring_answer: float
    ring_answer_many: float
    ring_numbers: float
    ring_client: float
    enclave_scan: float
    seal_seconds: float
    open_seconds: float
    forward_seconds: float
    reading: float = 4e9
    quote_seconds: float = 10.8e-3
    pass_queries: int = 32

    def scan_seconds(self, table_bytes: float, queries: int) -> float:
        """Returns the CPU seconds for answering queries over the whole table, many in a pass."""
        return self._passes(table_bytes, queries, self.scan, self.scan_many)

    def bucket_seconds(self, table_bytes: float, clients: int) -> float:
        """Returns the CPU seconds for answering queries of all buckets, those of many clients in a
        pass."""
        return self._passes(table_bytes, clients, self.scan_buckets, self.scan_buckets_many)

    def ring_seconds(self, products: float, queries: int) -> float:
        """Returns the CPU seconds for multiplying queries with an encoded table, many in a pass."""
        speeds = self.ring_answer, self.ring_answer_many
        return self._passes(products, queries, *speeds, limit=8)

    def _passes(
        self, table_bytes: float, queries: int, one: float, many: float, limit: int = 0
    ) -> float:
        """A pass costs something once, and something for each query.

        Such that a pass of one query runs at speed `one`, and one of `limit` at `many`.
        """
        limit = limit or self.pass_queries
        each = max(0.0, limit / many - 1 / one) / (limit - 1)
        once = 1 / one - each
        return table_bytes * (-(-queries // limit) * once + queries * each)


@dataclass(frozen=True)
class ServiceSpeeds:
    """Of one core: seconds, or bytes per second.

    Args:
        request_seconds: for reading the head of a request and answering it, whatever it is about.
        sending: of bodies, from memory into sockets. Enciphering is in it nowhere: see `aes` of
            `Speeds`, which is faster.
        receiving: of updates: read, compared with their check, searched for NaN, written.
        store_seconds: for putting an update on the disk, whatever its length.
        handshake_seconds: for a new connection with TLS 1.3.
        add_seconds: for an update that the trainer reads, checks and adds up, whatever its length.
        adding: of updates, beside that, into the sum of their block.
        merging: of rows and keys, where sums of blocks are added to one another.
        sorting: of updates whose numbers are sorted under their keys, beside that: 0.22 GB/s with
            50 clients that choose 1,000 of 10,000 keys of 500 numbers; half of it with zeros.
    """

    request_seconds: float
    sending: float
    receiving: float
    store_seconds: float
    handshake_seconds: float
    add_seconds: float
    adding: float
    merging: float
    sorting: float

    def adding_seconds(self, update_bytes: float) -> float:
        """Returns the CPU seconds of the trainer for an update of this length, in its block."""
        return self.add_seconds + update_bytes / self.adding


@dataclass(frozen=True)
class SumSpeeds:
    """Of one core: seconds, or bytes per second.

    Args:
        masking: of vectors, to which a mask is added that is made from its seed.
        summing: of masked vectors, checked and added up by a server.
        agree_seconds: for a client's secrets with one neighbour: agreed, shared, sealed, opened.
        rebuild_seconds: for the secret of one client, from shares, at a server.
        decoding: of rows, that are read out of a sketch.
        position_seconds: for one position of a bucket, at one of two servers.
        rows: of pseudo-random rows that such a server makes and adds, beside that.
        share_seconds: for a client's shares for two servers, whatever its keys.
        key_seconds: for one key of them.
        sharing: of its rows, beside that.
    """

    masking: float
    summing: float
    agree_seconds: float
    rebuild_seconds: float
    decoding: float
    position_seconds: float
    rows: float
    share_seconds: float
    key_seconds: float
    sharing: float


AnySpeeds = TypeVar("AnySpeeds", Speeds, ServiceSpeeds, SumSpeeds)


@cache
def measured(kind: type[AnySpeeds]) -> AnySpeeds:
    """Returns the speeds of a kind, as they were measured last.

    >>> measured(Speeds).gather > measured(Speeds).binding
    True
    """
    return kind(**json.loads(_MEASURED.read_text())[kind.__name__]["speeds"])
