"""Measures the speeds of this machine (calibration), with the code that deliveries run.

This is the one file above `delivery` that names its protocols: what is timed is their inner loops,
and a speed such as that of a scan is shared by several.

Each piece is timed by the CPU time of this process, the median of five. It takes some seconds and
a gigabyte. On a machine that does other work, memory comes out slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from keyhole.arrays import KeyArray
from keyhole.compiled import load_compiler
from keyhole.crypto.cuckoo import Placement, batch_shape
from keyhole.crypto.dpf import expand, share_points
from keyhole.crypto.prg import Prg
from keyhole.delivery.base import PrivateTable
from keyhole.delivery.enclave.program import oblivious_select
from keyhole.delivery.paths import Top, top_of
from keyhole.delivery.pir.database import Database, PirParams
from keyhole.delivery.pir.messages import seal_reply
from keyhole.delivery.pir.one_server import OneServerClient, encode, hint_of, server_of
from keyhole.delivery.pir.scan import scan_buckets, scan_rows
from keyhole.delivery.pir.shape import POSITIONS_AT_ONCE, PRIMES, TOGETHER
from keyhole.delivery.pir.two_server import Batch, TwoServerClient, params_of, servers_of
from keyhole.delivery.relay.client import BlindClient, TableShape, slice_handler
from keyhole.delivery.relay.gateway import Gateway, relay
from keyhole.delivery.relay.ohttp import GatewayKey
from keyhole.pricing import Speeds, measured
from keyhole.server.rows import gather_rows

_ROUND = bytes(16)
_SLICE_BYTES = 2_000
_TURNS = 5
_MANY = Speeds.pass_queries
_REPLIES = 16  # that a server holds together
_FEW, _FEW_ASKED = 4_000, 33  # the smallest of tables with buckets, and of batches
_BUCKETS = batch_shape(1_000, 10**6).num_buckets


def calibrate(num_keys: int = 100_000) -> Speeds:
    """Measures this machine.

    Args:
        num_keys: of the table that is scanned, with slices of 2,000 bytes; 1,000 or more. One that
            fits into caches flatters.
    """
    load_compiler()  # as those who hold a table do
    prg = Prg.fresh()
    records = np.empty((num_keys, _SLICE_BYTES), np.uint8)
    prg.fill(records)
    database, top, building = _build(records)
    few = _database(np.ascontiguousarray(records[: max(_FEW, num_keys // 25), :8]))
    keys = prg.permutation(num_keys)[: num_keys // 100]
    found = {
        **_plain(records, prg),
        **building,
        **_scans(database, keys, prg),
        **_two_server_client(database, top, keys),
        **_two_server_replies(few, database, keys),
        **_lattice(_database(records[: num_keys // 5]), keys),
        **_relay(records, keys[:256]),
    }
    speeds: Speeds = replace(measured(Speeds), **found)
    return speeds


def _plain(records: NDArray[np.uint8], prg: Prg) -> dict[str, float]:
    """Copying and enciphering."""
    keys = prg.below(len(records), len(records) // 2)
    out = np.empty((len(keys), _SLICE_BYTES), np.uint8)
    return {
        "gather": out.nbytes / _seconds(lambda: gather_rows(records, keys, out)),
        "aes": out.nbytes / _seconds(lambda: prg.fill(out)),
    }


def _build(records: NDArray[np.uint8]) -> tuple[Database, Top, dict[str, float]]:
    """What servers of private retrieval do before anybody asks."""
    start = time.process_time()
    table = _table(records)  # once only: new memory is a good part of what it costs
    database = Database.of(table)
    built = time.process_time() - start
    short = np.ascontiguousarray(records[: len(records) // 4, :8])
    path = _seconds(lambda: _database(short)) / len(short)  # now that loops of large tables run
    top = Top.of(table.num_keys, table.tree.root, top_of(table.tree))
    placing = _seconds(lambda: Placement(len(short), _BUCKETS).members())
    return (
        database,
        top,
        {
            "binding": records.nbytes / max(built - path * len(records), built / 10),
            "path_seconds": path,
            "place_seconds": placing / len(short),
        },
    )


def _table(records: NDArray[np.uint8]) -> PrivateTable:
    """A table of which every key may be asked for."""
    return PrivateTable.of("0", bytes(32), records, len(records))


def _database(records: NDArray[np.uint8]) -> Database:
    return Database.of(_table(records))


def _scans(database: Database, keys: KeyArray, prg: Prg) -> dict[str, float]:
    """What servers do for each query, and an enclave for each key."""
    rows, batch = database.rows, Batch.of(params_of(database.padded_to(len(keys))))
    whole, some = _random((_MANY, batch.table.share_bytes), prg), keys[:_MANY]
    found = {
        "scan": rows.nbytes / _seconds(lambda: scan_rows(rows, whole[:1])),
        "scan_many": _MANY * rows.nbytes / _seconds(lambda: scan_rows(rows, whole)),
        "enclave_scan": _MANY * rows.nbytes / _seconds(lambda: oblivious_select(rows, some)),
    }
    if batch.placement is None:
        return found
    members, three = batch.placement.members(), batch.placement.num_hashes * rows.nbytes
    bits = _random((_MANY, *members.shape[:1], batch.bucket.share_bytes), prg)
    points = prg.below(batch.bucket.num_points, len(members))
    shares, _ = share_points(points, batch.bucket, _ROUND, prg)
    return {
        **found,
        "scan_buckets": three / _seconds(lambda: scan_buckets(rows, members, bits[:1])),
        "scan_buckets_many": _MANY * three / _seconds(lambda: scan_buckets(rows, members, bits)),
        "expand": members.size / _seconds(lambda: expand(shares, batch.bucket, _ROUND)),
    }


def _two_server_client(database: Database, top: Top, keys: KeyArray) -> dict[str, float]:
    """What a client of two servers does."""
    database = database.padded_to(len(keys))
    params = params_of(database)
    asker, queries = TwoServerClient(params), Batch.of(params).num_queries
    asker_of_few = TwoServerClient(params_of(database.padded_to(_FEW_ASKED)))
    servers = servers_of(database)
    questions = [asker.query(keys) for _ in range(_TURNS + 1)]
    sent = [question.messages() for question in questions]
    replies = [server.answer([m[i] for m in sent]) for i, server in enumerate(servers)]
    waiting = list(zip(questions, *replies, strict=True))

    def open_next() -> None:
        question, *both = waiting.pop()
        question.decode(both).checked(top, keys)

    few = _seconds(lambda: asker_of_few.query(keys[:_FEW_ASKED]))
    many = _seconds(lambda: asker.query(keys))
    return {
        "ask_seconds": few,
        "share_seconds": max(many - few, many / 10) / queries,
        "opening": 2 * len(replies[0][0]) / _seconds(open_next),
    }


def _two_server_replies(few: Database, database: Database, keys: KeyArray) -> dict[str, float]:
    """What a server does for each message, on a table that it scans in no time; and for a reply."""
    few = few.padded_to(_FEW_ASKED)
    (server, _), asker = servers_of(few), TwoServerClient(params_of(few))
    waiting = [asker.query(np.arange(_FEW_ASKED)).messages()[0] for _ in range(_TURNS + 1)]
    params = params_of(database.padded_to(len(keys)))
    query = TwoServerClient(params).query(keys).messages()[0]
    rows = database.rows.view(np.uint8)[: Batch.of(params).num_queries, : params.row_bytes]
    replies = range(_REPLIES)
    sealing = _seconds(lambda: [seal_reply(query, params, 0, rows.tobytes()) for _ in replies])
    return {
        "read_seconds": _seconds(lambda: server.answer([waiting.pop()])),
        "reply": _REPLIES * rows.nbytes / sealing,
    }


def _lattice(database: Database, keys: KeyArray) -> dict[str, float]:
    """What one server and its client do, on a table that is small."""
    database = database.padded_to(len(keys))
    table, mine = encode(database), keys % database.num_keys
    server = server_of(database, table=table)
    params, shape = PirParams.decode(server.params), table.shape
    # Any numbers below 2^27 will do.
    form = (shape.parts, len(PRIMES), shape.groups, shape.degree, POSITIONS_AT_ONCE)
    numbers = np.zeros((TOGETHER, *form), np.uint32)
    one = _seconds(lambda: [table.multiply(numbers[:1], at) for at in range(shape.lane_blocks)])
    many = _seconds(lambda: [table.multiply(numbers, at) for at in range(shape.lane_blocks)])
    rounding = _seconds(lambda: hint_of(table, params)) - shape.rank * one
    client = OneServerClient(params, server.hint)
    waiting = []
    for _ in range(_TURNS + 1):
        query = client.query(mine)
        waiting.append((query, server.answer(query.messages())))

    def open_next() -> None:
        query, replies = waiting.pop()
        query.decode(replies)

    spent = _seconds(lambda: client.query(mine)) + _seconds(open_next)
    spent += _seconds(lambda: OneServerClient(params, server.hint))
    return {
        "ring_encode": shape.encoded_bytes / _seconds(lambda: encode(database)),
        "ring_answer": shape.products / one,
        "ring_answer_many": TOGETHER * shape.products / many,
        "ring_numbers": shape.hint_numbers / max(rounding, one / 10),
        "ring_client": (shape.question_numbers * shape.rank + shape.hint_numbers) / spent,
    }


def _relay(records: NDArray[np.uint8], keys: KeyArray) -> dict[str, float]:
    """What a client, a relay and a gateway do for each key."""
    key, round_id = GatewayKey.fresh(), "1000-" + 16 * "0"
    shape = TableShape(0, len(records), _SLICE_BYTES, len(keys))
    gateway = Gateway([key], slice_handler(round_id, [records]))
    client = BlindClient(key.config, round_id, [shape])
    questions = [client.query([keys]) for _ in range(_TURNS + 1)]
    sent = [question.messages() for question in questions]
    answered: list[list[bytes]] = []
    opened = iter(questions)
    passed = iter(sent)
    answer = _seconds(lambda: answered.append([gateway.answer(one) for one in next(passed)]))
    replies = iter(answered)
    opening = _seconds(lambda: next(opened).decode(next(replies)))
    sealing = _seconds(lambda: client.query([keys]))
    # Through a gateway that takes no time.
    passing = _seconds(lambda: relay(sent, lambda sealed: sealed))
    return {
        "seal_seconds": (sealing + opening) / len(keys),
        "open_seconds": answer / len(keys),
        "forward_seconds": passing / (len(sent) * len(keys)),
    }


def _random(shape: tuple[int, ...], prg: Prg) -> NDArray[np.uint8]:
    """Shares look like this."""
    out = np.empty(shape, np.uint8)
    prg.fill(out)
    return out


def _seconds(call: Callable[[], object], turns: int = _TURNS) -> float:
    """The median CPU time of some turns, after one in which code is compiled and memory mapped."""
    call()
    spent = []
    for _ in range(turns):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return max(statistics.median(spent), 1e-9)
